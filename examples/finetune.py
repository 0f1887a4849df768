"""Fine-tuning in two phases, with an average of the weights: `python -m examples.finetune`.

A small network has learned one set of synthetic images. For another set it gets a new head, which is trained alone
first, while the backbone is frozen and its batch norms are in eval mode; then the backbone joins, at a lower learning
rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kitsune
from examples.cifar10 import evaluate
from examples.run import Run, add_options
from models.synthetic import SyntheticImages

_CLASSES = 10
_SHAPE = (3, 32, 32)
_HELD_OUT = 1_000_000  # the numbers of batches that are not trained on begin here

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Three convolutions with batch norm, and a linear head: (N, 3, 32, 32) to logits (N, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [_SHAPE[0], width, 2 * width, 4 * width]
        convolutions = [nn.Conv2d(*each, 5, stride=2, padding=2, bias=False) for each in pairwise(widths)]
        blocks = [nn.Sequential(each, nn.BatchNorm2d(each.out_channels), nn.ReLU()) for each in convolutions]
        self.backbone = nn.Sequential(*blocks, nn.Flatten())
        self.head = nn.Linear(4 * width * 4 * 4, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains, and tests the weights and their average."""
    parser = argparse.ArgumentParser(prog="python -m examples.finetune", description="Fine-tuning in two phases.")
    add_options(parser, batch_size=64)
    parser.add_argument("--batches", type=int, default=200, metavar="N", help="of each phase (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, metavar="N", help="of the model (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--decay", type=float, default=0.98, help="of the average of weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    run = Run(options)

    def batches(images: SyntheticImages, first: int, count: int) -> Iterable[Batch]:
        return (images.batch(options.batch_size, index=first + i, device=run.device) for i in range(count))

    model = Classifier(options.width).to(run.device)
    learned = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model.train()
    train(run, "pretraining", model, learned, batches(SyntheticImages(_SHAPE), 0, options.batches))
    images = SyntheticImages(_SHAPE, seed=1)

    model.head = nn.Linear(model.head.in_features, _CLASSES).to(run.device)
    model.backbone.requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.head.parameters(), lr=options.lr)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.decay), use_buffers=True)

    model.train()
    model.backbone.eval()
    train(run, "frozen", model, optimizer, batches(images, 0, options.batches), average)

    model.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": model.backbone.parameters(), "lr": options.lr / 10})
    model.train()
    train(run, "unfrozen", model, optimizer, batches(images, options.batches, options.batches), average)

    for name, tested in {"weights": model, "average": average}.items():
        accuracy = evaluate(tested, batches(images, _HELD_OUT, max(1, options.batches // 10)))
        run.log(f"test of the {name}", accuracy=accuracy)
    return run.finish(optimizer)


def train(
    run: Run,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    average: AveragedModel | None = None,
) -> None:
    """One phase, in the mode that `model` is in; logs the mean loss of every 10 batches."""
    losses: list[float] = []
    for index, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)
        losses.append(loss.item())
        if index % 10 == 0:
            run.log(f"{name}, batch {index}", loss=sum(losses[-10:]) / 10)


if __name__ == "__main__":
    main()
