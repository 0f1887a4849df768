"""LeNet on MNIST, in a plain training loop: `python -m examples.mnist --download`.

What Kitsune changes is one line: the optimizer is wrapped. The rest is as anybody writes it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
import models
from examples.data import add_options, batches
from models import datasets


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains; returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(prog="python -m examples.mnist", description="LeNet on MNIST with Adam.")
    add_options(parser)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = models.build("lenet", seed=options.seed)
    train, test = batches(workload, datasets.mnist, parser, options)
    model = workload.module.to(device)

    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # the line

    accuracy = 0.0
    for epoch in range(options.epochs):
        started = time.perf_counter()
        model.train()
        total = torch.zeros((), device=device)
        for x, y in kitsune.prefetch(train, device):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total.item() / len(train)
        accuracy = evaluate(model, kitsune.prefetch(test, device))
        seconds = time.perf_counter() - started
        print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {accuracy:.2%}, {seconds:.1f} s", flush=True)
    if isinstance(optimizer, kitsune.KitsuneOptimizer):
        print(optimizer.status())
    return accuracy


@torch.no_grad()
def evaluate(model: nn.Module, images: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of images whose class `model` finds."""
    model.eval()
    right = count = 0
    for x, y in images:
        right += int((model(x).argmax(1) == y).sum())
        count += len(y)
    return right / count


if __name__ == "__main__":
    main()
