"""Backward passes on several streams, in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.engine import backward_plans, planning
from kitsune.engine.backward_plans import fastest
from kitsune.engine.planned_recording import record_planned
from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from kitsune.loop import backward_recorder
from kitsune.loop.backward_recorder import BackwardRecorder
from kitsune.memory.pool import MemoryPool
from tests.kitsune import static_memory
from tests.kitsune.loop.test_nested_outputs import Aside
from tests.kitsune.loops import accumulating
from tests.kitsune.test_streams import costs_of_a_gpu
from tests.kitsune.training import Net, Training, batch, compare, sgd

STEPS = 40
EAGER = 6  # before the first capture
PLACES = ["static memory", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)
    if request.param == "cuda":
        return "cuda"
    static_memory.install(monkeypatch)
    for module in ("split_step", "drop_in"):
        monkeypatch.setattr(f"kitsune.loop.{module}.refuse_streams", lambda device: None)
    return "cpu"


@pytest.fixture
def favour(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the plan that is tried at this place win."""

    def choose(place: int) -> None:
        def measure(_recording: Recording, _inputs: Sequence[Tensor]) -> float:
            tried.append(1.0)
            return 1.0 if len(tried) == place + 1 else 2.0

        tried: list[float] = []
        monkeypatch.setattr(backward_plans, "_replay_us", measure)

    return choose


def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Net(batch_norm=True, dropout=0.3).to(device)
    return model, sgd(model)


def train(device: str, made: Any = None, **options: Any) -> Training:
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cuda" else {}
    options = {"mode": "auto", "steps": STEPS, "replays": STEPS - EAGER, "enable_fusion": False, **tolerance, **options}
    return compare("drop_in", made or partial(build, device), batches=partial(batch, device=device), **options)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whatever_wins_the_loop_trains_the_same(place: int, device: str, favour: Callable[[int], None]) -> None:
    favour(place)
    status = train(device, num_streams=4).status()
    assert [schedule.chosen for schedule in status.schedules].index(True) == place
    assert [schedule.num_streams > 1 for schedule in status.schedules] == [False, *[True] * (len(status.schedules) - 1)]
    assert status.not_in_effect == ()
    assert "backward" in status.covered
    assert "in use" in str(status)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_losses_that_are_deferred_have_plans_too(
    place: int, whole: bool, device: str, favour: Callable[[int], None]
) -> None:
    """From the loss on, or with the call, where that can wait."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = (Net() if whole else Net(batch_norm=True, dropout=0.3)).to(device)
        return model, sgd(model)

    favour(place)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cuda" else {}
    options: dict[str, Any] = {"mode": "auto", "enable_fusion": False, "steps": STEPS, "replays": STEPS - EAGER}
    batches = partial(batch, device=device)
    alone = compare("drop_in", made, batches=batches, **options, **tolerance).status()
    favour(place + len(alone.schedules))
    status = compare("drop_in", made, batches=batches, defer_loss=True, **options, **tolerance).status()
    assert "loss" in status.covered
    assert [schedule.chosen for schedule in status.schedules].index(True) == place
    assert len(status.schedules) > 2


@dataclass
class Planning:
    """What was done for backward passes once they may have several streams.

    Attributes:
        times: how often plans were made.
        trials: how many recordings were timed.
        beside: of the recordings in the memory of others, how many streams each has.
    """

    times: int = 0
    trials: int = 0
    beside: list[int] = field(default_factory=list)


@pytest.fixture
def planning_done(monkeypatch: pytest.MonkeyPatch) -> Planning:
    done = Planning()
    plans, fastest = backward_plans.plans, backward_plans.fastest
    in_order, by_plan = BackwardRecorder._in_order, BackwardRecorder._by_plan

    def counted_plans(*args: Any) -> tuple[Planned, ...]:
        done.times += 1
        return plans(*args)

    def counted_trials(*args: Any) -> backward_plans.Fastest:
        found = fastest(*args)
        done.trials += len(found.times_us)
        return found

    def noted_in_order(self: BackwardRecorder, backward: Any) -> Recording:
        if backward.beside is not None and self._num_streams > 1:
            done.beside.append(1)
        return in_order(self, backward)

    def noted_by_plan(self: BackwardRecorder, backward: Any, planned: Planned) -> Recording:
        if backward.beside is not None:
            done.beside.append(planned.plan.schedule.num_streams)
        return by_plan(self, backward, planned)

    monkeypatch.setattr(backward_plans, "plans", counted_plans)
    monkeypatch.setattr(backward_plans, "fastest", counted_trials)
    monkeypatch.setattr(BackwardRecorder, "_in_order", noted_in_order)
    monkeypatch.setattr(BackwardRecorder, "_by_plan", noted_by_plan)
    return done


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_second_recording_has_the_plan_of_the_first(
    place: int, device: str, favour: Callable[[int], None], planning_done: Planning
) -> None:
    favour(place)
    schedules = train(device, loop=accumulating).status().schedules
    assert schedules[place].chosen
    assert planning_done.times == 1
    assert planning_done.trials == len(schedules)
    assert planning_done.beside == [schedules[place].num_streams]


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_second_recording_of_a_deferred_loss_has_it_too(
    place: int, whole: bool, device: str, favour: Callable[[int], None], planning_done: Planning
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = (Net() if whole else Net(batch_norm=True, dropout=0.3)).to(device)
        return model, sgd(model)

    train(device, made, loop=accumulating)
    num_first = planning_done.trials
    favour(place + num_first)
    schedules = train(device, made, loop=accumulating, defer_loss=True).status().schedules
    assert schedules[place].chosen
    assert planning_done.times == 3
    assert planning_done.trials == 2 * num_first + len(schedules)
    assert planning_done.beside[1:] == [schedules[place].num_streams]


@pytest.mark.usefixtures("replay_is_faster")
def test_a_second_recording_with_other_results_has_plans_of_its_own(
    device: str, favour: Callable[[int], None], planning_done: Planning
) -> None:
    """Once the first one was planned, what was computed on the way to a second loss is kept until it goes back."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        for index, (part_x, part_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            scaled = training.model(part_x) * 2
            loss = training.loss_fn(scaled, part_y)
            kept = scaled if index == 1 and planning_done.times >= 3 else None
            del scaled
            loss.backward()
            del kept
        training.optimizer.step()
        return loss.detach()

    train(device, loop=accumulating)
    num_first = planning_done.trials
    favour(1 + num_first)
    schedules = train(device, loop=loop, defer_loss=True).status().schedules
    assert [schedule.strategy for schedule in schedules].count("in order") == 1
    assert planning_done.times == 4
    assert planning_done.trials == 2 * num_first + 2 * len(schedules)


@pytest.mark.usefixtures("replay_is_faster")
def test_where_the_plan_cannot_be_recorded_again_the_second_one_is_in_order(
    device: str, favour: Callable[[int], None], planning_done: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_beside(*args: Any, **conditions: Any) -> Recording:
        if planning_done.beside:
            raise RefusedError(Refusal("too little memory for it"))
        return record_planned(*args, **conditions)

    monkeypatch.setattr(backward_recorder, "record_planned", fail_beside)
    favour(1)
    status = train(device, loop=accumulating).status()
    assert status.schedules[1].chosen
    assert planning_done.beside == [status.schedules[1].num_streams, 1]
    assert "too little memory for it" in status.refusals
    assert status.mode == "replay"


class Gated(nn.Module):
    """Saves an expanded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.b(self.a(x).tanh() * self.gate(x).sigmoid().expand(-1, 8))
        return gated


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_saved_may_be_expanded(place: int, device: str, favour: Callable[[int], None]) -> None:
    def gated() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = Gated().to(device)
        return model, sgd(model)

    favour(place)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cuda" else {}
    options: dict[str, Any] = {"mode": "auto", "enable_fusion": False, "steps": STEPS, "replays": STEPS - EAGER}
    status = compare("drop_in", gated, batches=partial(batch, device=device), **options, **tolerance).status()
    assert status.schedules[place].chosen
    assert not any("planning failed" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_whatever_fails_when_the_call_is_recorded_anew_the_loop_goes_on(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **options: Any) -> Any:
        if options["num_streams"] > 1:
            raise RuntimeError("a driver's error")
        return record(*_args, **options)

    record = BackwardRecorder.record
    monkeypatch.setattr(BackwardRecorder, "record", fail)
    status = train(device).status()
    assert status.mode == "replay"
    assert status.schedules == ()
    assert any("recorded anew (RuntimeError: a driver's error)" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_each_part_of_a_backward_pass_has_its_own_plan(device: str, favour: Callable[[int], None]) -> None:
    """Here one part goes back from the loss to the logits, and another one from there."""

    def with_loss() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = Aside().to(device)
        return model, sgd(model)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss: Tensor = training.model(x, y)[0]
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    favour(1)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cuda" else {}
    options: dict[str, Any] = {"mode": "auto", "enable_fusion": False, "steps": STEPS, "replays": STEPS - EAGER}
    status = compare(
        "drop_in", with_loss, loop=loop, batches=partial(batch, device=device), **options, **tolerance
    ).status()
    assert [schedule.strategy for schedule in status.schedules].count("in order") == 2
    assert [schedule.chosen for schedule in status.schedules].count(True) == 2
    assert status.schedules[1].chosen


@pytest.mark.usefixtures("replay_is_faster")
def test_the_measured_time_decides(device: str) -> None:
    status = train(device).status()
    (first, *others) = [schedule.measured_us or 0.0 for schedule in status.schedules]
    (chosen,) = [schedule for schedule in status.schedules if schedule.chosen]
    assert chosen.measured_us == min([*others, first] if min(others) < 0.98 * first else [first])


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("options", [{"num_streams": 1}, {"mode": "replay"}])
def test_on_one_stream_nothing_is_tried(options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_plans, "plans", lambda *_: pytest.fail("planned"))
    replays = STEPS - (2 if options.get("mode") == "replay" else EAGER)
    assert train(device, replays=replays, **options).status().schedules == ()


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("max_memory", [None, 2**30])
def test_plans_keep_to_the_memory_that_the_user_allows(
    max_memory: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients that come in are copied; what is left of the memory is for values."""
    bounds: list[int | None] = []
    plans = backward_plans.plans

    def noted(*arguments: Any) -> Any:
        bounds.append(arguments[3])
        return plans(*arguments)

    monkeypatch.setattr(backward_plans, "plans", noted)
    status = train(device, max_memory=max_memory).status()
    assert len(status.schedules) > 1
    (bound,) = bounds
    assert bound is None if max_memory is None else 2**30 - 2**20 < bound < 2**30


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 1])
def test_where_planning_fails_the_pass_stays_on_one_stream(
    place: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of what was tried."""

    def fail(*_args: Any, **_options: Any) -> float:
        tried.append(1.0)
        if len(tried) > place:
            raise RuntimeError("no such event")
        return 1.0

    def made() -> MemoryPool:
        memories.append(MemoryPool())
        return memories[-1]

    tried: list[float] = []
    memories: list[MemoryPool] = []
    monkeypatch.setattr(backward_plans, "_replay_us", fail)
    monkeypatch.setattr(backward_recorder, "MemoryPool", made)
    status = train(device).status()
    assert status.schedules == ()
    assert any("planning failed (RuntimeError: no such event)" in refusal for refusal in status.refusals)
    assert [memory.statistics().held_bytes for memory in memories] == [0] * len(memories)


@pytest.mark.usefixtures("replay_is_faster")
def test_an_interrupt_leaves_nothing_behind(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is captured again."""

    def interrupt(*_args: Any, **_options: Any) -> None:
        monkeypatch.setattr(backward_plans, "_replay_us", original)
        raise KeyboardInterrupt

    original = backward_plans._replay_us
    monkeypatch.setattr(backward_plans, "_replay_us", interrupt)
    model, optimizer = build(device)
    training = Training("drop_in", model, optimizer, mode="auto", enable_fusion=False)
    interrupts = 0
    for index in range(STEPS):
        (x, y), _ = batch(index, device=device)
        try:
            training.step(x, y)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert training.status().mode == "replay"


class Tried:
    """A recording that takes so long."""

    def __init__(self, us: float) -> None:
        self.us, self.releases = us, 0

    def release(self) -> None:
        self.releases += 1


def choose(
    times_us: Sequence[float | Exception], monkeypatch: pytest.MonkeyPatch
) -> tuple[backward_plans.Fastest, list[Tried], list[RefusedError]]:
    made = [Tried(us) if isinstance(us, float) else us for us in times_us]
    rest, refused = iter(made[1:]), list[RefusedError]()

    def record(_planned: Planned) -> Any:
        tried = next(rest)
        if isinstance(tried, Exception):
            raise tried
        return tried

    monkeypatch.setattr(backward_plans, "_replay_us", lambda recording, _inputs: recording.us)
    others: Any = [None] * (len(made) - 1)
    first: Any = made[0]
    found = fastest(first, others, record, (), refused.append)
    return found, [one for one in made if isinstance(one, Tried)], refused


@pytest.mark.parametrize(
    ("times_us", "place"), [([100.0], 0), ([100.0, 99.0, 120.0], 0), ([100.0, 90.0, 95.0], 1), ([100.0, 90.0, 80.0], 2)]
)
def test_the_fastest_is_kept(times_us: list[float], place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one unless another is clearly faster."""
    found, made, _ = choose(times_us, monkeypatch)
    assert (found.place, found.times_us) == (place, tuple(times_us))
    assert found.recording is made[place]  # type: ignore[comparison-overlap]
    assert [one.releases for one in made] == [int(at != place) for at in range(len(made))]


def test_a_plan_that_cannot_be_recorded_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found, made, refused = choose([100.0, RefusedError(Refusal("too little memory")), 50.0], monkeypatch)
    assert (found.place, found.times_us) == (2, (100.0, None, 50.0))
    assert [one.releases for one in made] == [1, 0]
    assert [str(error) for error in refused] == ["too little memory"]


def test_where_a_trial_fails_the_first_recording_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tried(100.0), Tried(50.0)

    def measure(recording: Tried, _inputs: object) -> float:
        if recording is made[1]:
            raise RuntimeError("an illegal address")
        return recording.us

    monkeypatch.setattr(backward_plans, "_replay_us", measure)
    first: Any = made[0]
    others: Any = [None]
    with pytest.raises(RuntimeError, match="illegal address"):
        fastest(first, others, lambda _: made[1], (), lambda _: None)  # type: ignore[arg-type, return-value]
    assert [one.releases for one in made] == [0, 1]


@pytest.mark.usefixtures("replay_is_faster")
def test_until_plans_have_been_tried_the_loop_is_not_settled(device: str) -> None:
    """Who waits for the steady state meets no trial afterwards."""
    model, optimizer = build(device)
    training = Training("drop_in", model, optimizer, mode="auto", enable_fusion=False)
    settled = []
    for index in range(STEPS):
        (x, y), _ = batch(index, device=device)
        training.step(x, y)
        settled.append(training.status().mode == "replay")
        assert not settled[-1] or training.status().schedules
    assert settled == sorted(settled)
    assert settled[-1]
