"""The parts of a step are found; what they take is measured on a GPU."""

from __future__ import annotations

import pytest
import torch

from kitsune.fallback import Chooser
from tests.benchmarks import command, host_pace


def test_every_part_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # it is switched on
    monkeypatch.setattr(host_pace, "_BLOCKS", 2)
    monkeypatch.setattr(host_pace, "_BLOCK", 3)
    monkeypatch.setattr(host_pace, "_SETTLED_STEPS", 2)
    monkeypatch.setattr(Chooser, "_settle", lambda chooser: setattr(chooser, "settled", True))  # whatever is faster
    monkeypatch.setattr(Chooser, "_is_clear", lambda chooser: True)
    found = host_pace.measure("mlp", 4, "fp32", "cpu")
    assert sorted(found) == ["guards", "look", "nothing", "numbers", "replay", "step"]
    assert all(len(times) == 2 and min(times) >= 0 for times in found.values())
    assert min(found["step"]) > max(found["nothing"])
    document = {"model": "mlp", "batch": 4, "precision": "fp32", "commit": None, "rounds": [found, found]}
    assert command.blocks_table(document, "part").count("\n| ") == 7
