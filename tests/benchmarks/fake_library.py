"""A library of small models for tests of the coverage command, each of which has another thing become of it."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from tests.benchmarks.coverage.sample import Batch, Sample


class Net(nn.Module):
    """A layer, around which something else is done."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "raises":
            raise ValueError("no such input")
        found: Tensor = self.drop(self.layer(x))
        if self.kind == "refused" and x.sum() > 1e9:
            return found * 2
        return found


def missing() -> str | None:
    return None


def versions() -> dict[str, str]:
    return {"fake": "1.0"}


def families() -> list[str]:
    return ["captured", "refused", "raises", "exits", "hangs", "greedy"]


def model_of(family: str) -> str:
    return f"net_{family}"


def build(model: str) -> Sample:
    kind = model.removeprefix("net_")
    if kind == "exits":
        os._exit(3)
    if kind == "hangs":
        time.sleep(600)
    if kind == "greedy":
        torch.ones(2**40, dtype=torch.uint8)
    return Sample(Net(kind), lambda net, x: net(x).square().mean(), batch)


def batch(index: int) -> Batch:
    return {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(index))}
