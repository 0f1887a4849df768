"""ResNet-18 on CIFAR-10, with the whole step in one call: `python -m examples.cifar10 --download --epochs 30`.

SGD with Nesterov momentum, a one-cycle learning rate, gradients clipped by norm, bfloat16 autocast on a GPU.
`examples.cifar10_loop` is a recipe of the same kind as a plain loop.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

import kitsune
from examples.data import add_data_options, batches
from examples.run import Run, add_options
from models import datasets
from models.resnet import cifar_resnet18
from models.synthetic import SyntheticImages


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains and tests."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10", description="ResNet-18 on CIFAR-10 with SGD.")
    add_options(parser, batch_size=128)
    add_data_options(parser)
    parser.add_argument("--lr", type=float, default=0.2, help="the highest learning rate (default: %(default)s)")
    options = parser.parse_args(arguments)
    run = Run(options)
    train, test = batches(SyntheticImages((3, 32, 32), signal=0.2), datasets.cifar10, parser, options)
    model = cifar_resnet18().to(run.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.epochs * len(train), cycle_momentum=False
    )
    step = kitsune.TrainStep(
        model,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer,
        clip_grad_norm=5.0,
        enable_amp=run.device.type == "cuda",
        config=kitsune.Config(mode="eager") if options.plain else None,
    )

    for epoch in range(1, options.epochs + 1):
        model.train()
        total = torch.zeros((), device=run.device)
        for x, y in kitsune.prefetch(train, run.device):
            total += step(x.contiguous(memory_format=torch.channels_last), y)
            schedule.step()
        loss, accuracy = total.item() / len(train), evaluate(model, kitsune.prefetch(test, run.device))
        run.log(f"epoch {epoch}", loss=loss, accuracy=accuracy)
    return run.finish(step)


@torch.no_grad()
def evaluate(model: nn.Module, images: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of images whose class `model` finds. They lie on its device."""
    model.eval()
    right = count = 0
    for x, y in images:
        right += int((model(x).argmax(1) == y).sum())
        count += len(y)
    return right / count


if __name__ == "__main__":
    main()
