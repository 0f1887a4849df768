"""What Kitsune does in iterations that it does not replay, of which there may be many: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn import functional

import kitsune
from kitsune.config import Mode

pytestmark = pytest.mark.usefixtures("nobody_else_looks")

OWN = str(Path(kitsune.__file__).parent)
MOST_CALLS = {"auto": 60, "replay": 120, "eager": 40}
"""Functions of Kitsune's, in an iteration whose shapes are new; each takes about half a microsecond."""


def num_own_calls(iteration: Callable[[], None]) -> int:
    """How many functions of Kitsune's, written in Python, are called in an iteration."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(note)
    try:
        iteration()
    finally:
        sys.setprofile(None)
    return count


def loop(mode: Mode, layers: int) -> Callable[[int], None]:
    """An iteration of training a model of so many layers, with a batch of the size that it is given."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = kitsune.KitsuneOptimizer(torch.optim.Adam(model.parameters()), mode=mode)

    def iterate(size: int) -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(torch.randn(size, 4)), torch.randn(size, 4)).backward()
        optimizer.step()

    return iterate


@pytest.mark.support("Shapes and modes", "shapes that do not come back", "plain PyTorch, with a reason")
@pytest.mark.parametrize("mode", ["auto", "replay"])
def test_a_novel_shape_costs_the_same_whatever_the_model(mode: Mode) -> None:
    counts = {}
    for layers in (2, 30):
        iterate = loop(mode, layers)
        for size in range(1, 4):
            iterate(size)
        counts[layers] = num_own_calls(lambda iterate=iterate: iterate(4))
    assert counts[2] == counts[30]
    assert counts[2] <= MOST_CALLS[mode]


def test_a_loop_that_is_not_to_be_replayed_is_hardly_looked_at() -> None:
    iterate = loop("eager", 2)
    for _ in range(5):
        iterate(3)
    assert num_own_calls(lambda: iterate(3)) <= MOST_CALLS["eager"]


@pytest.mark.parametrize("mode", ["auto", "replay"])
def test_shapes_that_do_not_come_back_are_told_of(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kitsune")
    iterate = loop(mode, 2)
    for size in range(1, 61):
        iterate(size)
    assert any("signatures of the arguments were met, hardly any of them twice" in text for text in caplog.messages)
