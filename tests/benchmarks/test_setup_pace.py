"""Set-up is divided into stages; what they take is for whoever runs it to judge."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import setup_pace
from tests.benchmarks.setup_pace import STAGES, Stages


def test_every_stage_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # it is switched on
    found = setup_pace.measure("mlp", 4, "amp", "cpu")
    assert list(found) == [*STAGES, "rest", "in all"]
    assert min(found.values()) > 0
    assert sum(found.values()) == pytest.approx(2 * found["in all"])
    document = {"model": "mlp", "batch": 4, "precision": "amp", "exhaustive": False, "commit": None}
    document["rounds"] = [found, found]
    assert setup_pace.table(document).count("\n| ") == len(found) + 1


def test_time_goes_to_the_innermost_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Work:
        def outer(self) -> None:
            spend(1.0)
            self.inner()
            spend(2.0)

        def inner(self) -> None:
            spend(4.0)

    monkeypatch.setattr(setup_pace.time, "perf_counter", lambda: now)
    monkeypatch.setattr(setup_pace, "STAGES", {"Dynamo": (Work, "outer"), "guards": (Work, "inner")})
    stages = Stages(lambda: spend(0.5))
    with stages.watched():
        Work().outer()
        spend(8.0)
        Work().inner()
    assert stages.seconds == {"Dynamo": 3.5, "guards": 9.0}
