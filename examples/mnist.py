"""PyTorch's basic MNIST example, unchanged but for one line: `python -m examples.mnist --download`.

Network, optimizer and loop are those of https://github.com/pytorch/examples/tree/main/mnist.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import kitsune
from examples.data import Batches, add_data_options, batches
from examples.run import Run, add_options
from models import datasets
from models.synthetic import SyntheticImages

_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "adadelta": (torch.optim.Adadelta, 1.0),
    "adam": (torch.optim.Adam, 1e-3),
}
"""Each with its learning rate."""


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout: (N, 1, 28, 28) to log-probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2))
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(
    run: Run, model: nn.Module, loader: Batches, optimizer: torch.optim.Optimizer, epoch: int, log_interval: int
) -> None:
    """One epoch."""
    model.train()
    for index, (data, target) in enumerate(loader):
        data, target = data.to(run.device), target.to(run.device)
        optimizer.zero_grad()
        output = model(data)
        loss = functional.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if index % log_interval == 0:
            run.log(f"epoch {epoch}, batch {index} of {len(loader)}", loss=loss.item())


def test(run: Run, model: nn.Module, loader: Batches, epoch: int) -> None:
    """The mean loss and the accuracy on images that were not trained on."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(run.device), target.to(run.device)
            output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            correct += int((output.argmax(dim=1) == target).sum())
            count += len(target)
    run.log(f"epoch {epoch}, test", test_loss=loss / count, accuracy=correct / count)


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains and tests."""
    parser = argparse.ArgumentParser(prog="python -m examples.mnist", description="PyTorch's basic MNIST example.")
    add_options(parser, batch_size=64)
    add_data_options(parser)
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adadelta", help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, help="learning rate (default: 1 for Adadelta, 0.001 for Adam)")
    parser.add_argument("--gamma", type=float, default=0.7, help="its factor after each epoch (default: %(default)s)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="batches between lines of progress")
    options = parser.parse_args(arguments)
    run = Run(options)
    train_loader, test_loader = batches(SyntheticImages((1, 28, 28)), datasets.mnist, parser, options)

    model = Net().to(run.device)
    kind, lr = _OPTIMIZERS[options.optimizer]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=lr if options.lr is None else options.lr)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    scheduler = StepLR(optimizer, step_size=1, gamma=options.gamma)
    for epoch in range(1, options.epochs + 1):
        train(run, model, train_loader, optimizer, epoch, options.log_interval)
        test(run, model, test_loader, epoch)
        scheduler.step()
    return run.finish(optimizer)


if __name__ == "__main__":
    main()
