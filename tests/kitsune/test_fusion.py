"""Training steps with their operators fused. On the CPU, where the fused operators are their references."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
import models
from kitsune.engine import contest, fusing, planning, rewriting
from kitsune.engine.fusing import Fusing
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from kitsune.plan import Plan
from tests.kitsune.fusion.running import always, never
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.test_streams import costs_of_a_gpu
from tests.kitsune.training import Net, Training, batch, compare, sgd

STEPS = 140
EAGER = 10  # before the first capture, and again after the trials


class Judge:
    """Judges as it is told, and is never late."""

    def __init__(self, judge: Callable[[Alone], Verdict]) -> None:
        self._judge = judge

    def __call__(self, alone: Alone) -> Verdict:
        return self._judge(alone)

    def is_late(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _a_device_that_fuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KITSUNE_ENABLE_FUSION")  # it is the default
    monkeypatch.setattr("kitsune.engine.region.refuse_fusion", lambda device: None)
    monkeypatch.setattr("kitsune.loop.step_loop.refuse_fusion", lambda device: None)
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Judge(always))
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)


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
@pytest.mark.parametrize("options", [{"enable_fusion": False}, {"mode": "replay"}])
def test_without_fusion_nothing_is_tried(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fusing, "advance", lambda *_: pytest.fail("fused"))
    training = train(replays=STEPS - (1 if options.get("mode") == "replay" else 5), rtol=0, atol=0, **options)
    (schedule,) = training.status().schedules
    assert not schedule.fused


@pytest.mark.parametrize("enable_fusion", [False, True])
def test_compilers_are_made_ready_where_they_will_be_needed(
    enable_fusion: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[torch.device] = []
    monkeypatch.setattr("kitsune.loop.step_loop.expect", expected.append)
    model, optimizer = build()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, enable_fusion=enable_fusion)
    for number in range(2):
        step(*batch(number)[0])
    assert expected == [torch.device("cpu")] * enable_fusion


@pytest.mark.usefixtures("replay_is_faster")
def test_where_nothing_is_worth_fusing_the_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Judge(never))
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
@pytest.mark.parametrize("amp", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "lr"), [("mlp", 0.01), ("lenet", 0.05)])
def test_whole_models_train_as_they_do_eagerly(
    name: str, lr: float, amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every template that fits.

    At these learning rates rounding stays rounding: parameters changed by a millionth change no loss by more than that.
    """
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: 1)
    workload = models.build(name, seed=0)
    snapshot = copy.deepcopy(workload.module.state_dict())
    losses = []
    for mode in ("auto", "eager"):
        workload.module.load_state_dict(snapshot)
        optimizer = torch.optim.SGD(workload.module.parameters(), lr=lr, momentum=0.9)
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
    monkeypatch.setattr(rewriting, "_SILENT_SECONDS", patience)
    with caplog.at_level("INFO", "kitsune"):
        train(replays=STEPS - EAGER)
    warnings = [record for record in caplog.records if "being fused" in record.getMessage()]
    assert [record.levelname for record in warnings] == (["WARNING"] if patience == 0 else [])
    assert [record.levelname for record in caplog.records if "fusion, part 1:" in record.getMessage()] == ["INFO"]


class Overwriting(nn.Module):
    """Writes through a view of a batch norm's result, in a layout changed in place, and to a bias after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.other = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        before = y + 1
        y[:, 0] = 0
        z = x[:4].sin()
        z.t_()
        masked = torch.relu(self.other(x))
        with torch.no_grad():
            self.other.bias.neg_()
        return self.last(before + y * 3 + masked) + z.t()[:1, :3]


class Apart(nn.Module):
    """A layer in float32 within what may run under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = torch.relu(self.first(x.float()))
        return self.last(hidden)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("model", [Overwriting, Apart])
def test_what_may_not_be_moved_or_rounded_is_not(
    model: type[nn.Module], autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused steps give what steps give that are replayed as they were captured."""
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: len(contest._makers) - 1)
    found = []
    for fuse in (True, False):
        torch.manual_seed(1)
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        step = kitsune.TrainStep(
            module, nn.functional.cross_entropy, optimizer, enable_fusion=fuse, num_streams=1, mode="auto"
        )
        losses = []
        for index in range(STEPS):
            (x, y), _ = batch(index)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(step(x, y))
        assert step.status().schedules[-1].fused == fuse
        found.append([torch.stack(losses), *module.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if autocast else 1e-4, atol=2e-3 if autocast else 1e-5)


@pytest.mark.usefixtures("replay_is_faster")
def test_whatever_a_compiler_raises_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilationError(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise CompilationError("no such instruction")

    monkeypatch.setattr(rewriting, "compile_ahead", fail)
    status = train(rtol=0, atol=0, replays=STEPS - 5).status()
    assert any("fusing failed (CompilationError: no such instruction)" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_where_fusing_fails_streams_are_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("too little memory")

    monkeypatch.setattr(rewriting, "compile_ahead", fail)
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)
    monkeypatch.setattr("kitsune.engine.region.refuse_streams", lambda device: None)
    status = train(rtol=0, atol=0, num_streams=2, replays=STEPS - EAGER).status()
    assert {schedule.num_streams for schedule in status.schedules} == {1, 2}
    assert any("fusing failed (OutOfMemoryError: too little memory)" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_a_fused_step_that_leaves_other_values_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_wrongly(under_way: Fusing) -> tuple[rewriting.Rewritten, ...]:
        found = new(under_way)
        if not found:
            return ()
        ((graph, fusions),) = found
        wrong = copy.deepcopy(graph)
        node = next(node for node in wrong.graph.nodes if node.target == torch.ops.aten.addmm.default)
        node.kwargs = {"alpha": 1.01}
        wrong.recompile()
        return ((wrong, fusions),)

    new = Fusing.new
    monkeypatch.setattr(Fusing, "new", fused_wrongly)
    status = train(rtol=0, atol=0, replays=STEPS - 5).status()
    assert not any(schedule.fused for schedule in status.schedules)
    assert any("was compared with the captured one: " in refusal for refusal in status.refusals)


class Disk:
    """Where choices are kept: what an earlier process has chosen, and what is written."""

    def __init__(self, choice: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        kept = {"num_streams": 1, "max_memory": None, "cuda_graphs": True, **options}
        self._content = None if choice is None else {"choice": choice, "options": kept}
        self.written: list[Mapping[str, Any]] = []
        make = fusing._Here.__init__

        def init(way: fusing._Here, *args: Any) -> None:
            make(way, *args)
            way.memory = self  # type: ignore[assignment]

        monkeypatch.setattr(fusing._Here, "__init__", init)

    def read(self) -> Mapping[str, Any] | None:
        return self._content

    def write(self, choice: Mapping[str, Any]) -> None:
        self.written.append(choice)


AS_CAPTURED = {"form": "as captured", "strategy": "in order", "num_streams": 1}
AS_FUSED = {**AS_CAPTURED, "form": "fused"}


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize(
    ("chosen", "options", "num_tried"),
    [
        (None, {}, 2),
        (AS_FUSED, {}, 2),
        (AS_CAPTURED, {}, 1),
        (AS_CAPTURED, {"num_streams": 4}, 2),  # of a process with other options
        ({**AS_FUSED, "form": "generated code, the whole step"}, {}, 2),  # which is not found any more
        ({"of": "another version"}, {}, 2),
    ],
)
def test_what_an_earlier_process_chose_is_tried_alone_if_it_is_there(
    chosen: dict[str, Any] | None, options: dict[str, Any], num_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: len(contest._makers) - 1)
    disk = Disk(chosen, monkeypatch, **options)
    status = train(replays=STEPS - (EAGER if num_tried == 2 else 5)).status()
    assert [schedule.fused for schedule in status.schedules] == [False, True][:num_tried]
    assert [one["choice"] for one in disk.written] == [AS_FUSED] * (num_tried - 1)
