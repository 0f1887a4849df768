"""Both loops run and are timed; what they take is measured on a GPU."""

from __future__ import annotations

import pytest

from kitsune.fallback import Chooser
from tests.benchmarks import command, unchanged_loop


def test_both_loops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_loop, "_BLOCKS", {"eager": 2, "deferred": 3})
    monkeypatch.setattr(unchanged_loop, "_BLOCK", {"eager": 2, "deferred": 2})
    monkeypatch.setattr(unchanged_loop, "_SETTLED_STEPS", 2)
    monkeypatch.setattr(Chooser, "_settle", lambda chooser: setattr(chooser, "settled", True))  # whatever is faster
    monkeypatch.setattr(Chooser, "_is_clear", lambda chooser: True)
    found = unchanged_loop.measure("mlp", 4, "amp", "cpu")
    assert {name: len(times) for name, times in found.items()} == {"eager": 2, "deferred": 3}
    assert min(map(min, found.values())) > 0
    document = {"model": "mlp", "batch": 4, "precision": "amp", "commit": None, "rounds": [found, found]}
    assert command.blocks_table(document, "loop").count("\n| ") == 3


def test_a_loop_that_is_not_replayed_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_loop, "_MOST_STEPS", 3)
    loop = unchanged_loop.Loop("mlp", 4, "fp32", "cpu", is_deferred=True)
    with pytest.raises(RuntimeError, match="not replayed as a whole"):
        loop.settle()
