"""Training steps with their operators fused. On the CPU, where the fused operators are their references."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kitsune
import models
from kitsune.fusion.judge import Verdict
from kitsune.loop import contest, fusing, planning
from kitsune.passes.regions import fuse_regions
from kitsune.plan import Plan
from tests.kitsune.fusion.running import always
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.training import Net, Training, compare, sgd

STEPS = 140
EAGER = 10  # before the first capture, and again after the trials


@pytest.fixture(autouse=True)
def _a_device_that_fuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kitsune.loop.whole_step.refuse_fusion", lambda device: None)
    monkeypatch.setattr("kitsune.loop.step_loop.refuse_fusion", lambda device: None)
    monkeypatch.setattr(fusing, "Measured", lambda device, cache: always)
    monkeypatch.setattr(fusing, "fuse_regions", partial(fuse_regions, backend=OPERATORS))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net(batch_norm=True)
    return model, sgd(model)  # Adam would make much of the gradient of a bias before a batch norm, which is noise


def train(**options: Any) -> Training:
    options = {"mode": "auto", "steps": STEPS, "rtol": 1e-4, "atol": 1e-5, **options}
    return compare("train_step", build, **options)


def plan_of(training: Training) -> Plan:
    assert training.train_step is not None
    plan = training.train_step.plan()
    assert plan is not None
    return plan


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 1])
def test_the_fused_step_is_one_of_those_tried(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: place)
    training = train(replays=STEPS - EAGER)
    status = training.status()
    assert [(one.strategy, one.num_streams, one.fused) for one in status.schedules] == [
        ("in order", 1, False),
        ("in order", 1, True),
    ]
    assert [one.chosen for one in status.schedules] == [place == 0, place == 1]
    assert all(one.measured_us is not None for one in status.schedules)
    plan = plan_of(training)
    assert plan.is_fused == (place == 1)
    fused = [task.operator for task in plan.graph.tasks if task.operator.startswith("kitsune.batch_norm")]
    assert len(fused) == 2 * place
    assert "fused" in str(status)
    assert {fusion.template for fusion in plan.fusions} >= ({"region"} if place else set())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("options", [{"enable_fusion": False}, {"max_memory": "1GB"}, {"mode": "replay"}])
def test_without_fusion_nothing_is_tried(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "rewritten", lambda *_: pytest.fail("rewritten"))
    training = train(replays=STEPS - (1 if options.get("mode") == "replay" else 5), rtol=0, atol=0, **options)
    (schedule,) = training.status().schedules
    assert not schedule.fused


@pytest.mark.usefixtures("replay_is_faster")
def test_where_nothing_is_worth_fusing_the_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "Measured", lambda device, cache: lambda alone: Verdict("it is not faster", 1.0, 1.0))
    training = train(rtol=0, atol=0, replays=STEPS - 5)
    (schedule,) = training.status().schedules
    assert not schedule.fused


def test_where_it_cannot_be_done_it_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, optimizer = build()
    step = kitsune.TrainStep(model, nn.functional.cross_entropy, optimizer, enable_fusion=True)
    assert step.status().not_in_effect == ("enable_fusion",)
    assert any("enable_fusion needs CUDA" in refusal for refusal in step.status().refusals)
    quiet = kitsune.TrainStep(model, nn.functional.cross_entropy, optimizer)
    assert quiet.status().refusals == quiet.status().not_in_effect == ()


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_whole_models_train_as_they_do_eagerly(name: str, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every template that fits."""
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: 1)
    workload = models.build(name, seed=0)
    snapshot = copy.deepcopy(workload.module.state_dict())
    losses = []
    for mode in ("auto", "eager"):
        workload.module.load_state_dict(snapshot)
        optimizer = torch.optim.SGD(workload.module.parameters(), lr=0.05, momentum=0.9)
        step = kitsune.TrainStep(workload.module, workload.loss_fn, optimizer, mode=mode, enable_amp=amp, num_streams=1)
        losses.append(torch.stack([step(*workload.batch(4, index=index)) for index in range(STEPS)]))
        if mode == "auto":
            plan = step.plan()
            assert plan is not None
            assert plan.is_fused
    tolerance = 0.05 if amp else 1e-3
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_the_user_is_told_once_what_takes_so_long(
    patience: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusing, "_SILENT_SECONDS", patience)
    with caplog.at_level("INFO", "kitsune"):
        train(replays=STEPS - EAGER)
    warnings = [record for record in caplog.records if "being fused" in record.getMessage()]
    assert [record.levelname for record in warnings] == (["WARNING"] if patience == 0 else [])
    assert [record.levelname for record in caplog.records if "fusion, part 1:" in record.getMessage()] == ["INFO"]
