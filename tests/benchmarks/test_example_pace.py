"""Examples are timed with and without Kitsune, and what is slower is told."""

from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from examples.run import Run
from tests.benchmarks import example_pace


@pytest.mark.parametrize("plain", [True, False])
def test_a_run_is_timed(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    log = Run.log
    options = "--synthetic --limit 5 --epochs 3 --batch-size 4 --log-interval 1 --device cpu"
    found = example_pace.paces("mnist --optimizer adam", options.split(), plain)
    assert len(found["seconds"]) == 4  # between the last five of 15 batches
    assert min(found["seconds"]) > 0
    assert found["mode"] == ([] if plain else ["replay"])
    assert Run.log is log


def runs(*seconds: float, mode: str = "replay") -> list[dict[str, Any]]:
    return [{"seconds": [one] * 3, "mode": [mode]} for one in seconds]


def test_what_is_slower_is_told() -> None:
    faster = {"plain": runs(1.0, 1.2), "kitsune": runs(0.5, 0.6)}
    slower = {"plain": runs(1.0, 1.0), "kitsune": runs(1.05, 1.05, mode="eager")}
    assert example_pace.line("gan", faster) == "gan: 0.500 of plain PyTorch's time (replay)"
    assert example_pace.line("gan", slower) == "gan: 1.050 of plain PyTorch's time (eager), more than 1.03"


def test_the_examples_take_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options in example_pace.EXAMPLES.items():
        with pytest.raises(SystemExit) as ended:
            example_pace.paces(name, [*options.split(), "--help"], plain=False)
        assert ended.value.code == 0


def end(*_: object) -> None:
    os._exit(3)


def test_an_example_that_ends_its_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_pace, "paces", end)
    with pytest.raises(BrokenProcessPool):
        example_pace.measure(["gan"], rounds=1)
