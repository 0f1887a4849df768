"""The parts of an iteration are timed; what they take is for whoever runs it to judge."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import loop_pace


@pytest.mark.parametrize("variant", loop_pace.VARIANTS)
def test_every_part_is_timed(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_pace, "_BLOCKS", 2)
    monkeypatch.setattr(loop_pace, "_BLOCK", 3)
    monkeypatch.setattr(loop_pace, "_SETTLED_STEPS", 8)
    found = loop_pace.measure(variant, "amp", 2)
    assert list(found) == ["iteration", *loop_pace.PARTS, "calls"]
    assert min(found.values()) > 0
    assert loop_pace.table([{variant: found}, {variant: found}]).count("\n") == len(found) + 1


def test_calls_are_counted() -> None:
    def part() -> None:
        len([])
        torch.is_grad_enabled()

    assert loop_pace._num_calls(part) == 3
