"""A model of one's own for the benchmarks, in one file:

python -m harness.run --workload examples/own_model.py:build
python -m harness.compare
"""

import torch
from torch import Tensor, nn

from models import Workload


class Spirals:
    """Points of two arms of a spiral; each numbered batch is a draw of its own."""

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Points (batch_size, 2) and the arms (batch_size,) that they lie on."""
        source = torch.Generator().manual_seed(index)
        arms = torch.randint(2, (batch_size,), generator=source)
        radius = torch.rand(batch_size, generator=source)
        angle = 6 * radius + torch.pi * arms
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        noise = 0.02 * torch.randn(batch_size, 2, generator=source)
        return (points + noise).to(device), arms.to(device)


def build() -> Workload:
    """What is trained: called with torch's random numbers seeded, so that all variants start from the same weights."""
    return Workload(
        name="spirals",
        module=nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)),
        loss_fn=nn.CrossEntropyLoss(),
        data=Spirals(),
        default_batch_size={"cpu": 64, "cuda": 256},
        batch_sizes={"cpu": (64, 256), "cuda": (64, 256, 1024)},
        learning_rate=3e-3,
    )
