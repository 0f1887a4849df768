"""Steps planned on several streams, and the choice between plans. On the CPU, where operators run in a plan's order."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import kitsune
import models
from kitsune.collection import no_garbage_collection
from kitsune.device import refuse_streams
from kitsune.engine import by_address, contest, planned_recording, planning, recording, region
from kitsune.engine.recording import Recording
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.placing import Writer, only
from kitsune.fallback import Chooser
from kitsune.memory.pool import MemoryPool
from kitsune.memory.pooled import pooled_bytes
from kitsune.memory.segments import pieces
from kitsune.plan import Costs, TaskGraph
from kitsune.schedule import check
from kitsune.schedule.cost import analytic_costs
from kitsune.schedule.limits import cuda_limits
from kitsune.status import ScheduleTime
from tests.kitsune import static_memory
from tests.kitsune.schedule.oracles import enforces, redundant
from tests.kitsune.training import Net, Training, adam, batch, compare, sgd

NUM_STREAMS = 4
STEPS = 200
record = Recording.__init__
EAGER = 10  # before the first capture, and again after the trials


def costs_of_a_gpu(module: fx.GraphModule, graph: TaskGraph, _inputs: object) -> Costs:
    return analytic_costs(module.graph, graph, cuda_limits("a GPU", (9, 0)))


@pytest.fixture(autouse=True)
def _a_device_with_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kitsune.engine.region.refuse_streams", lambda device: None)
    monkeypatch.setattr("kitsune.loop.step_loop.refuse_streams", lambda device: None)
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)
    monkeypatch.setattr(by_address, "_SIGHTINGS", 2)


@pytest.fixture
def favour(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def choose(place: int) -> None:
        monkeypatch.setattr(contest.Contest, "_best", lambda contest: place)

    return choose


def build(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(batch_norm=True, dropout=0.3)
        return model, make(model)

    return model_and_optimizer


def train(make: Callable[[nn.Module], torch.optim.Optimizer] = adam, **options: Any) -> Training:
    options = {"mode": "auto", "num_streams": NUM_STREAMS, "replays": STEPS - EAGER, "steps": STEPS, **options}
    return compare("train_step", build(make), **options)


def test_streams_are_the_default_where_they_can_be_measured() -> None:
    assert kitsune.Config().max_streams() == 4
    assert kitsune.Config(mode="replay").max_streams() == 1
    assert kitsune.Config(max_memory="1GB", num_streams=8).max_streams() == 8


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("static", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("place", "make"), [(0, adam), (1, sgd), (3, adam)], ids=["first", "second", "fourth"])
def test_whatever_wins_the_step_is_the_same(
    place: int, make: Any, static: bool, favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if static:
        static_memory.install(monkeypatch)
    favour(place)
    training = train(make)
    status = training.status()
    assert status.mode == "replay"
    assert [schedule.chosen for schedule in status.schedules].index(True) == place
    assert [schedule.measured_us for schedule in status.schedules].count(None) == 0
    assert status.not_in_effect == ()
    assert training.train_step is not None
    plan = training.train_step.plan()
    assert plan is not None
    assert plan.measured_us == status.schedules[place].measured_us
    assert plan.schedule.strategy == status.schedules[place].strategy
    assert (plan.schedule.num_streams > 1) == (place > 0)


@pytest.mark.usefixtures("replay_is_faster")
def test_plans_on_several_streams_are_tried() -> None:
    status = train().status()
    assert status.schedules[0].strategy == "in order"
    assert {schedule.strategy for schedule in status.schedules[1:]} == {"chains", "list"}
    assert max(schedule.num_streams for schedule in status.schedules) <= NUM_STREAMS
    assert sum(schedule.chosen for schedule in status.schedules) == 1
    assert "predicted" in str(status)
    assert len(status.as_dict()["schedules"]) == len(status.schedules)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize(
    ("options", "replays"),
    [({"num_streams": 1}, 35), ({"mode": "replay", "num_streams": 4}, 39)],
)
def test_one_stream_is_planned_and_nothing_tried(options: dict[str, Any], replays: int) -> None:
    training = compare("train_step", build(adam), steps=40, replays=replays, **{"mode": "auto", **options})
    (schedule,) = training.status().schedules
    assert (schedule.strategy, schedule.num_streams, schedule.measured_us, schedule.chosen) == (
        "in order",
        1,
        None,
        True,
    )


def needs_of(limit: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], kitsune.Status]:
    """What recordings needed that were allowed so many bytes, the step in order first, and what became of the step."""
    needed: list[int] = []
    with monkeypatch.context() as patch:
        refuse = recording._refuse_memory

        def noted(number: int, max_memory: int) -> None:
            needed.append(number)
            refuse(number, max_memory)

        patch.setattr(recording, "_refuse_memory", noted)
        status = train(max_memory=limit).status()
    return needed, status


@pytest.mark.usefixtures("replay_is_faster")
def test_plans_are_made_to_fit_the_memory_that_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MEMORY_FACTOR", 2.0)
    (in_order, *others), status = needs_of(2**30, monkeypatch)
    assert len(status.schedules) > 1
    limit = (in_order + max(others)) // 2
    assert in_order < limit < max(others)
    (first, *bounded), status = needs_of(limit, monkeypatch)
    assert first == in_order
    assert status.mode == "replay"
    assert len(status.schedules) > 1
    assert bounded
    assert max(bounded) <= limit
    assert status.refusals == status.not_in_effect == ()


@pytest.mark.usefixtures("replay_is_faster")
def test_plans_that_take_much_more_memory_than_the_step_in_order_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _, *others = train().status().schedules
    assert others
    told = iter([0])  # nothing before the step in order is recorded, and always 1 byte since: arenas take more
    monkeypatch.setattr(GraphPool, "num_bytes", lambda _: next(told, 1))
    monkeypatch.setattr(planned_recording, "_MOST", 0.0)
    monkeypatch.setattr(planned_recording, "_MORE_AT_LEAST", 0)
    status = train().status()
    assert [schedule.chosen for schedule in status.schedules] == [True, *[False] * len(others)]
    assert all(schedule.measured_us is None for schedule in status.schedules[1:])
    assert "streams takes" in status.refusals[0]
    assert "MiB of memory, of 0 that it may" in status.refusals[0]


@pytest.mark.usefixtures("replay_is_faster")
def test_where_graphs_do_not_tell_what_they_take_plans_are_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_recording, "_MOST", 0.0)
    monkeypatch.setattr(planned_recording, "_MORE_AT_LEAST", 0)
    for told in (0, None):  # operators issued one by one; another allocator
        monkeypatch.setattr(GraphPool, "num_bytes", lambda _, told=told: told)
        status = train().status()
        assert status.refusals == ()
        assert all(schedule.measured_us is not None for schedule in status.schedules)


def test_what_a_plan_on_several_streams_may_take() -> None:
    """ResNet-18's float32 step, in MiB: 1.05 times all that stays, less what lies beside the graph."""
    state, trained = torch.empty(134 << 20, dtype=torch.uint8), torch.empty(45 << 20, dtype=torch.uint8)
    most = planned_recording.most_on_streams(770 << 20, [state], [trained])
    assert most == int(1.05 * ((134 + 770 + 45) << 20)) - (134 << 20)
    assert planned_recording.most_on_streams(50 << 20, [], []) == (50 + 64) << 20


def test_what_the_values_of_a_plan_on_several_streams_may_take() -> None:
    """What libraries work in and the allocator rounds up is as much as in order, and takes nothing where that is 0."""
    assert planned_recording.room_on_streams(970 << 20, 770 << 20, 700 << 20) == 900 << 20
    assert planned_recording.room_on_streams(970 << 20, 770 << 20, 780 << 20) == 970 << 20


def schedules_in_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> Sequence[ScheduleTime]:
    """Those that are tried; later ones have room.

    Rounded up, values as small as those here would never be too large. So most of what they may need is left out. And
    the graph of the step in order takes a gigabyte, as it is told: a plan on several streams may take more then.
    """
    monkeypatch.setattr(planning, "MEMORY_FACTOR", 0.3)
    schedules = train().status().schedules
    assert not any(schedule.roomy for schedule in schedules)
    told = iter([0])  # nothing before it is recorded
    monkeypatch.setattr(GraphPool, "num_bytes", lambda _: next(told, 2**30))
    return schedules


@pytest.mark.usefixtures("replay_is_faster")
def test_where_there_is_room_plans_that_use_it_are_tried(
    favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = schedules_in_want_of_memory(monkeypatch)
    favour(len(without))
    status = train().status()
    more = status.schedules[len(without) :]
    assert [schedule.roomy for schedule in status.schedules] == [*[False] * len(without), *[True] * len(more)]
    assert len(more) == 2
    assert {schedule.strategy for schedule in more} == {"list"}
    assert [schedule.chosen for schedule in status.schedules].index(True) == len(without)
    assert all(schedule.measured_us is not None for schedule in status.schedules)
    assert status.refusals == ()
    assert str(status).count(", with more memory") == len(more)


@pytest.mark.usefixtures("replay_is_faster")
def test_where_a_plan_takes_more_than_there_is_room_for_the_next_best_replays(
    favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known once the plan is recorded, alone, after the trials."""
    favour(len(schedules_in_want_of_memory(monkeypatch)))
    recorded = Counter[int]()
    record_planned = region.record_planned

    def record_once(memory: MemoryPool, planned: planning.Planned, *inputs: Any, **conditions: Any) -> Recording:
        recorded[id(planned)] += 1
        if planned.is_roomy and recorded[id(planned)] > 1:
            conditions["most_bytes"] = -1
        return record_planned(memory, planned, *inputs, **conditions)

    monkeypatch.setattr(region, "record_planned", record_once)
    status = train().status()
    assert any(schedule.roomy and schedule.measured_us is not None for schedule in status.schedules)
    assert not any(schedule.chosen and schedule.roomy for schedule in status.schedules)
    assert sum(schedule.chosen for schedule in status.schedules) == 1
    assert status.mode == "replay"
    assert any("streams takes" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("is_empty", [True, False])
def test_memory_is_taken_in_one_piece_where_the_pool_has_none(
    is_empty: bool, favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favour(1)
    monkeypatch.setattr(GraphPool, "is_empty", is_empty)
    monkeypatch.setattr(planning.Planned, "pieces", lambda _: (7,))
    given = list[tuple[int, ...]]()

    def note(recording: Recording, *args: Any, lowered: Any = None, pieces: Any = (), **more: Any) -> None:
        if lowered is not None:
            given.append(pieces)
        record(recording, *args, lowered=lowered, pieces=pieces, **more)

    monkeypatch.setattr(Recording, "__init__", note)
    train()
    assert set(given) == {(7,) if is_empty else ()}


def test_what_lies_in_an_arena_needs_no_piece() -> None:
    """The model is asked for the other values alone."""
    name, module, inputs = next(traced_steps())
    planned = planning.challengers(module, inputs, NUM_STREAMS)[0]
    graph, schedule = planned.plan.graph, planned.plan.schedule
    large = [dataclasses.replace(value, num_bytes=value.num_bytes << 12) for value in graph.values]
    larger = dataclasses.replace(planned.plan, graph=dataclasses.replace(graph, values=tuple(large)))
    every = {value.name: Writer(torch.ops.aten.add.out, "out") for value in graph.values}
    assert dataclasses.replace(planned, plan=larger, writers=every).pieces() == (0,) * schedule.num_streams, name
    assert dataclasses.replace(planned, plan=larger, writers={}).pieces() == pieces(larger.graph, schedule)
    assert any(pieces(larger.graph, schedule))


@pytest.mark.usefixtures("replay_is_faster")
def test_a_trial_is_not_the_steady_state_yet() -> None:
    model, optimizer = build(adam)()
    training = Training("train_step", model, optimizer, mode="auto", num_streams=NUM_STREAMS)
    modes = []
    for index in range(STEPS):
        (x, y), _ = batch(index)
        training.step(x, y)
        modes.append(training.status().mode)
    trials = len(training.status().schedules)
    assert modes[-1] == "replay"
    assert modes.count("measuring") >= trials * contest._SAMPLES


@pytest.mark.usefixtures("replay_is_faster")
def test_each_plan_is_timed_as_the_loop_will_replay_it(
    favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches come back to two places: each plan has a recording that copies, and two that read there, when timed."""
    made: list[int] = []
    seen: list[int] = []
    record, launch = Recording.__init__, contest.Contest._launch

    def count(recording: Recording, *args: Any, in_place: Collection[int] = (), **more: Any) -> None:
        made.append(len(in_place))
        record(recording, *args, in_place=in_place, **more)

    def timed(trials: Any, inputs: Sequence[Tensor]) -> Any:
        seen.append(trials.winner.num_recordings)
        return launch(trials, inputs)

    monkeypatch.setattr(Recording, "__init__", count)
    monkeypatch.setattr(contest.Contest, "_launch", timed)
    monkeypatch.setattr(region, "_copies_matter", lambda *_: True)
    static_memory.install(monkeypatch)
    favour(1)
    buffers = [batch(index)[0] for index in range(2)]

    def batches(index: int) -> Any:
        for buffer, fresh in zip(buffers[index % 2], batch(index)[0], strict=True):
            buffer.copy_(fresh)
        return buffers[index % 2], {}

    training = train(batches=batches)
    plans = len(training.status().schedules)
    assert made == [0, 2, 2] * (plans + 1)  # the winner is made anew
    assert set(seen) == {3}


def moved_at(*steps: int) -> Callable[[Training, int], None]:
    def edit(training: Training, index: int) -> None:
        if index in steps:
            training.model.first.weight.data = training.model.first.weight.data.clone()

    return edit


@pytest.mark.usefixtures("replay_is_faster")
def test_a_change_in_the_middle_of_the_trials_starts_anew(
    favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "_REPLAYS_BEFORE_MORE_TRIALS", 20)
    favour(1)
    training = train(edit=moved_at(25), replays=STEPS - EAGER - 1)
    assert training.status().schedules[1].chosen


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_captured_again_is_not_chosen_again(
    place: int, favour: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what had won meets the plan in order again."""
    monkeypatch.setattr(region, "_REPLAYS_BEFORE_MORE_TRIALS", 20)
    chosen: list[Any] = []

    def edit(training: Training, index: int) -> None:
        if index == STEPS and training.train_step is not None:
            chosen.extend(schedule for schedule in training.status().schedules if schedule.chosen)
            favour(1 if place else 0)
        moved_at(STEPS)(training, index)

    favour(place)
    status = train(edit=edit, steps=2 * STEPS, replays=2 * STEPS - 2 * EAGER).status()
    (before,) = chosen
    assert len(status.schedules) == (2 if place else 1)
    (after,) = [schedule for schedule in status.schedules if schedule.chosen]
    assert (after.strategy, after.num_streams) == (before.strategy, before.num_streams)


@pytest.mark.usefixtures("replay_is_faster")
def test_what_changes_all_the_time_is_not_tried_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[object] = []
    monkeypatch.setattr(
        Recording,
        "__init__",
        lambda recording, *args, **more: (recordings.append(None), record(recording, *args, **more))[1],
    )
    train(edit=moved_at(40, 80, 120, 160), replays=STEPS - EAGER - 5)
    assert len(recordings) <= 4 + 7 + 2


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("place", [0, 2])
def test_tasks_are_timed_without_a_trace(place: int, favour: Callable[[int], None], tmp_path: Path) -> None:
    """A step is planned with its arguments in the midst of a training, which goes on as if it had not been."""

    def measure(training: Training, index: int) -> None:
        step = training.train_step
        if step is None:  # the training to compare with
            return
        (x, y), _ = batch(index)
        if index == 2:
            assert step.plan(x, y) is None
        if index == STEPS - 5:
            plans.append(step.plan(x, y))
            assert step.plan(x[:1], y[:1]) is None
            assert step.plan() == dataclasses.replace(plans[0], measured_spans=None)

    plans: list[Any] = []
    favour(place)
    compare(
        "train_step",
        build(adam),
        steps=STEPS,
        edit=measure,
        replays=STEPS - EAGER,
        mode="auto",
        num_streams=NUM_STREAMS,
    )
    (plan,) = plans
    assert len(plan.measured_spans) == len(plan.graph.tasks)
    assert all(start <= end for start, end in plan.measured_spans)
    assert any(start < end for start, end in plan.measured_spans)
    plan.timeline(tmp_path / "trace.json")
    assert kitsune.Plan.from_json(plan.to_json()) == plan


@pytest.mark.usefixtures("replay_is_faster")
def test_a_step_that_cannot_be_timed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise kitsune.errors.RefusedError(kitsune.Refusal("there is too little device memory"))

    monkeypatch.setattr("kitsune.engine.region.measure_spans", fail)
    training = train()
    assert training.train_step is not None
    (x, y), _ = batch(0)
    with pytest.raises(kitsune.KitsuneError, match="cannot be timed: there is too little device memory"):
        training.train_step.plan(x, y)
    training.step(x, y)
    assert training.status().mode == "replay"


@pytest.mark.usefixtures("replay_is_faster")
def test_another_thread_trains_while_tasks_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = train()
    (x, y), _ = batch(0)
    losses: list[torch.Tensor] = []

    def train_meanwhile(*_: Any) -> tuple[tuple[float, float], ...]:
        thread = threading.Thread(target=lambda: losses.append(training.step(x, y)))
        thread.start()
        thread.join()
        return ()

    monkeypatch.setattr("kitsune.engine.region.measure_spans", train_meanwhile)
    before = training.model.first.weight.detach().clone()
    assert training.train_step is not None
    training.train_step.plan(x, y)
    assert 0 < float(losses[0]) < 100
    assert not torch.equal(training.model.first.weight, before)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("interrupted", [2, 3, 5])
def test_an_interrupted_recording_leaves_a_step_that_can_be_captured_again(
    interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def interrupt(recording: Recording, *args: Any, **more: Any) -> None:
        made.append(recording)
        if len(made) == interrupted:
            raise KeyboardInterrupt
        record(recording, *args, **more)

    monkeypatch.setattr(Recording, "__init__", interrupt)
    model, optimizer = build(adam)()
    training = Training("train_step", model, optimizer, mode="auto", num_streams=NUM_STREAMS)
    (x, y), _ = batch(0)
    with pytest.raises(KeyboardInterrupt):
        training.run(STEPS)
    assert training.status().graphs == 0
    for _ in range(3):
        training.step(x, y)
    assert training.status().mode == "replay"


def test_where_eager_is_faster_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chooser, "_settle", lambda chooser: chooser.refuse(kitsune.errors.Refusal("eager is faster")))
    monkeypatch.setattr(Chooser, "_is_clear", lambda chooser: True)
    monkeypatch.setattr(planning, "challengers", lambda *_: pytest.fail("planned"))
    training = compare("train_step", build(adam), steps=40, replays=5, mode="auto", num_streams=4)
    assert training.status().mode == "eager"


def traced_steps() -> Iterator[tuple[str, fx.GraphModule, list[torch.Tensor]]]:
    for name in models.names():
        workload = models.build(name, seed=0)
        caught: list[tuple[fx.GraphModule, list[torch.Tensor]]] = []
        original = Recording.__init__

        def catch(recording: Recording, module: fx.GraphModule, inputs: Any, **conditions: Any) -> None:
            caught.append((module, list(inputs)))  # noqa: B023
            original(recording, module, inputs, **conditions)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "__init__", catch)
            optimizer = torch.optim.Adam(workload.module.parameters(), fused=True)
            step = kitsune.TrainStep(workload.module, workload.loss_fn, optimizer, mode="replay")
            for index in range(2):
                step(*workload.batch(2, index=index))
        yield name, *caught[0]


def test_plans_of_the_three_models() -> None:
    """On several streams their values need hardly more memory than in order, and each plan is what is run."""
    for name, module, inputs in traced_steps():
        alone = planning.in_order(module, inputs[0].device).plan
        assert alone.memory.arena_bytes == 0
        assert set(alone.memory.offsets) == {None}
        challengers = planning.challengers(module, inputs, NUM_STREAMS)
        assert challengers, name
        for planned in challengers:
            graph, memory, schedule = planned.plan.graph, planned.plan.memory, planned.plan.schedule
            rounding = 512 * len(graph.values)
            assert memory.live_bytes <= 1.02 * alone.memory.live_bytes + rounding, (name, schedule.strategy)
            left = only(graph, {value.name for value in graph.values} - planned.writers.keys())
            assert memory.arena_bytes + pooled_bytes(left, schedule) <= pooled_bytes(graph, schedule)
            assert check(graph, schedule) == []
            assert enforces(graph, schedule, schedule.waits)
            assert redundant(schedule) == []
            assert kitsune.Plan.from_json(planned.plan.to_json()) == planned.plan
        bound = min(planned.plan.memory.live_bytes for planned in challengers)
        bounded = planning.challengers(module, inputs, NUM_STREAMS, bound)
        assert bounded, name
        assert all(planned.plan.memory.live_bytes <= bound for planned in bounded)
        assert planning.challengers(module, inputs, NUM_STREAMS, 0) == ()


@pytest.mark.usefixtures("replay_is_faster")
def test_without_streams_one_is_used_and_the_status_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("engine.region", "loop.step_loop"):
        monkeypatch.setattr(f"kitsune.{module}.refuse_streams", refuse_streams)
    monkeypatch.setattr(planning, "challengers", lambda *_: pytest.fail("planned"))
    status = train().status()
    assert status.mode == "replay"
    assert len(status.schedules) == 1
    assert status.not_in_effect == ("num_streams",)
    assert "needs CUDA streams" in status.refusals[-1]
    assert [record.message for record in caplog.records] == [
        f"the training step does without what may be faster: {status.refusals[-1]}"
    ]
    caplog.clear()
    status = train(num_streams=None).status()
    assert status.not_in_effect == status.refusals == ()
    assert caplog.records == []


@pytest.mark.usefixtures("replay_is_faster")
def test_a_dropped_step_needs_no_garbage_collection() -> None:
    model, optimizer = build(adam)()
    training = Training("train_step", model, optimizer, mode="auto", num_streams=NUM_STREAMS)
    for index in range(STEPS):
        (x, y), _ = batch(index)
        training.step(x, y)
    reference = weakref.ref(model.first.weight)
    with no_garbage_collection():
        del training, model, optimizer
        assert reference() is None


@pytest.mark.usefixtures("replay_is_faster")
def test_planning_that_fails_leaves_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(planning, "measured_costs", fail)
    status = train().status()
    assert len(status.schedules) == 1
    assert "planning failed (OutOfMemoryError: CUDA out of memory)" in status.refusals[-1]


@pytest.mark.usefixtures("replay_is_faster")
def test_no_memory_for_an_arena_leaves_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("kitsune.memory.pool.MemoryPool.arena", fail)
    status = train().status()
    assert status.schedules[0].chosen
    assert any("too little device memory for a plan" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_an_interrupted_trial_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    give = MemoryPool.give
    monkeypatch.setattr(MemoryPool, "give", lambda pool, block: (given.append(block), give(pool, block)))
    monkeypatch.setattr(planning.Planned, "lowered", lambda planned, arena: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train()
    assert len(given) == 1


@pytest.mark.usefixtures("replay_is_faster")
def test_planning_happens_once_even_if_it_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(planning, "challengers", lambda *arguments: calls.append(arguments) or ())
    assert len(train().status().schedules) == 1
    assert len(calls) == 1
