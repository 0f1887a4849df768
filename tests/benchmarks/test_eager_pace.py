"""What Kitsune costs where it cannot help is measured; calls of functions, which no noise changes, are judged here."""

from __future__ import annotations

import pytest

from tests.benchmarks import eager_pace, short_script


def test_small_calls_that_are_settled_on_eager_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_pace, "_BLOCKS", 1)
    found = eager_pace.measure_calls()
    for one in found.values():
        assert one["median_calls"] < 1.02 * found["plain"]["calls"]
        assert one["calls"] < 1.1 * found["plain"]["calls"]
    assert eager_pace.calls_table(found).count("\n") == len(found) + 1


def test_scripts_are_trained_and_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(eager_pace, "SCRIPTS", {"mlp": 2})
    monkeypatch.setattr(
        eager_pace, "_processor_seconds", lambda _, variant, _bytecode: 2.0 if variant == "plain" else 2.1
    )
    losses = {short_script.train(name, one, 3) for name in ("mlp", "conv") for one in eager_pace.VARIANTS}
    assert len(losses) == 2
    eager_pace.main(["scripts", "--rounds", "2"])
    assert "| mlp, 2 steps | 2.00 (+0%) | 2.10 (+5%) | 2.10 (+5%) |" in capsys.readouterr().out
