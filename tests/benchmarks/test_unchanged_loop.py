"""Both loops run and are timed; what they take is measured on a GPU."""

from __future__ import annotations

import pytest

from kitsune.fallback import Chooser
from tests.benchmarks import unchanged_loop


def test_both_loops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_loop, "_BLOCKS", {"eager": 2, "deferred": 3})
    monkeypatch.setattr(unchanged_loop, "_BLOCK", {"eager": 2, "deferred": 2})
    monkeypatch.setattr(unchanged_loop, "_SETTLED_STEPS", 2)
    monkeypatch.setattr(Chooser, "_settle", lambda chooser: setattr(chooser, "settled", True))  # whatever is faster
    monkeypatch.setattr(Chooser, "_is_clear", lambda chooser: True)
    found = unchanged_loop.measure("mlp", 4, "amp", "cpu")
    counts = {"eager": 2, "Python before eager": 2, "deferred": 3, "Python before deferred": 3}
    assert {name: len(times) for name, times in found.items()} == counts
    assert min(map(min, found.values())) > 0
    assert unchanged_loop.table(document([found, found])).count("\n| ") == 5


def document(rounds: list[dict[str, list[float]]]) -> dict[str, object]:
    return {"model": "mlp", "batch": 4, "precision": "amp", "commit": None, "rounds": rounds}


def test_blocks_on_a_disturbed_host_are_told_apart() -> None:
    slow = {
        "eager": [9.0, 8.0],
        "Python before eager": [2.0, 1.0],
        "deferred": [7.0],
        "Python before deferred": [2.0],
    }
    fast = {**slow, "deferred": [4.0], "Python before deferred": [1.05]}
    text = unchanged_loop.table(document([slow, fast]))
    assert "eager, at full pace: 2 of 4 blocks: 8.0, 8.0" in text
    assert "deferred, at full pace: 1 of 2 blocks: 4.0, 4.0" in text
    assert "deferred, at full pace: 0 of 1 blocks" in unchanged_loop.table(document([{**slow, "eager": [9.0, 8.0]}]))


def test_files_of_earlier_versions_are_shown() -> None:
    assert "full pace" not in unchanged_loop.table(document([{"eager": [9.0], "deferred": [7.0]}]))


def test_processes_of_a_commit_and_a_machine_are_summed_up_together() -> None:
    first = {"eager": [9.0, 9.4, 8.0], "deferred": [7.0, 6.0, 7.2], "Python before deferred": [2.0, 1.0, 3.0]}
    second = {"eager": [12.0], "deferred": [5.0], "Python before deferred": [4.0]}
    earlier = {"eager": [30.0], "deferred": [20.0]}
    here, there = {"facts": {"boot_id": "a"}}, {"facts": {"boot_id": "b"}}
    other = document([earlier]) | there | {"commit": "0123456789, with changes"}
    documents = [document([first]) | here, other, document([second]) | here]
    assert unchanged_loop.summary(documents).splitlines()[2:] == [
        "| mlp, 4 | `None` | amp | 2 | 1 | 5 to 6 | 5 to 7 | 9 to 12 |",
        "| mlp, 4 | `0123456`, with changes | amp | 1 |  | 20 | 20 | 30 |",
    ]


def test_a_loop_that_is_not_replayed_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_loop, "_MOST_STEPS", 3)
    loop = unchanged_loop.Loop("mlp", 4, "fp32", "cpu", is_deferred=True)
    with pytest.raises(RuntimeError, match="not replayed as a whole"):
        loop.settle()
