"""ResNet-9 on CIFAR-10 in a plain loop with mixed precision: `python -m examples.cifar10_loop --download --epochs 20`.

The recipe of fast CIFAR-10 training: SGD with Nesterov momentum, one cycle of learning rate and momentum, label
smoothing, float16 autocast with a gradient scaler, gradients clipped by norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import kitsune
from examples.data import add_data_options, batches
from examples.run import Run, add_options
from models import datasets
from models.synthetic import SyntheticImages

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def conv(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    """A 3x3 convolution, batch norm, ReLU, and what comes after."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), *more)


class Residual(nn.Module):
    """Two convolutions, added to what they take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width, width), conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


def resnet9(width: int, num_classes: int = 10) -> nn.Module:
    """(N, 3, 32, 32) to logits (N, num_classes)."""
    return nn.Sequential(
        conv(3, width),
        conv(width, 2 * width, nn.MaxPool2d(2)),
        Residual(2 * width),
        conv(2 * width, 4 * width, nn.MaxPool2d(2)),
        conv(4 * width, 8 * width, nn.MaxPool2d(2)),
        Residual(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, num_classes),
    )


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains and tests."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.cifar10_loop", description="ResNet-9 on CIFAR-10 in a plain loop."
    )
    add_options(parser, batch_size=256)
    add_data_options(parser)
    parser.add_argument("--lr", type=float, default=0.2, help="the highest learning rate (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="of the first layer (default: %(default)s)")
    parser.add_argument("--precision", choices=_DTYPES, help="(default: float16 on a GPU, float32 on the CPU)")
    options = parser.parse_args(arguments)
    run = Run(options)
    device = run.device
    dtype = _DTYPES[options.precision or ("float16" if device.type == "cuda" else "float32")]
    train, test = batches(SyntheticImages((3, 32, 32), signal=0.2), datasets.cifar10, parser, options)
    model = resnet9(options.width).to(device)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * len(train))
    for epoch in range(1, options.epochs + 1):
        model.train()
        total = torch.zeros((), device=device)
        for x, y in train:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            total += loss.detach()

        model.eval()
        right = count = 0
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            for x, y in test:
                right += int((model(x.to(device)).argmax(1) == y.to(device)).sum())
                count += len(y)
        run.log(f"epoch {epoch}", loss=total.item() / len(train), accuracy=right / count)
    return run.finish(optimizer)


if __name__ == "__main__":
    main()
