"""ResNet-18 on CIFAR-10, with the whole step in one call: `python -m examples.cifar10 --download --epochs 30`.

SGD with Nesterov momentum, a one-cycle learning rate, gradients clipped by norm, bfloat16 autocast on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

import kitsune
import models
from examples.data import add_options, batches
from examples.mnist import evaluate
from models import datasets


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains; returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10", description="ResNet-18 on CIFAR-10 with SGD.")
    add_options(parser)
    parser.add_argument("--lr", type=float, default=0.2, help="the highest learning rate (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = models.build("resnet18", seed=options.seed)
    train, test = batches(workload, datasets.cifar10, parser, options)
    model = workload.module.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.epochs * len(train), cycle_momentum=False
    )
    step = kitsune.TrainStep(
        model,
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer,
        clip_grad_norm=5.0,
        enable_amp=device.type == "cuda",
        mode="eager" if options.plain else "auto",
    )

    accuracy = 0.0
    for epoch in range(options.epochs):
        started = time.perf_counter()
        model.train()
        total = torch.zeros((), device=device)
        for x, y in kitsune.prefetch(train, device):
            total += step(x.contiguous(memory_format=torch.channels_last), y)
            schedule.step()
        mean = total.item() / len(train)
        accuracy = evaluate(model, kitsune.prefetch(test, device))
        seconds = time.perf_counter() - started
        print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {accuracy:.2%}, {seconds:.1f} s", flush=True)
    print(step.status())
    return accuracy


if __name__ == "__main__":
    main()
