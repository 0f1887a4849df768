"""A training that ends soon, as a script: `python short_script.py mlp|conv plain|loop|deferred STEPS`.

It imports Kitsune where it uses it, and nothing else but torch; `eager_pace` runs it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp() -> tuple[nn.Module, Tensor]:
    """The model, and a batch."""
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers), torch.randn(32, 32)


def conv() -> tuple[nn.Module, Tensor]:
    """The model, and a batch."""
    first = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    layers = (*first, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 13 * 13, 10))
    return nn.Sequential(*layers), torch.randn(32, 3, 32, 32)


def train(name: str, variant: str, steps: int) -> float:
    """Trains; returns the last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = mlp() if name == "mlp" else conv()
    y = torch.randint(10, (x.shape[0],))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if variant != "plain":
        import kitsune

        optimizer = kitsune.KitsuneOptimizer(optimizer, defer_loss=variant == "deferred")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
