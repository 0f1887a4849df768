"""The times of a plan's tasks: complete, possible by the schedule, and measured without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

import models
from kitsune.capture.trace import trace
from kitsune.engine import planning
from kitsune.errors import RefusedError
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.in_order import InOrder
from kitsune.execution.lanes import TimedCudaLanes, TimedHostLanes, timed_lanes_for
from kitsune.execution.lower import Lowered, lower
from kitsune.execution.stream_pool import MAX_STREAMS, StreamPool
from kitsune.execution.timed import _from_first_start, measure_spans
from kitsune.memory.pool import Block
from kitsune.plan import Cost, Costs, MemoryPlan, Plan, Schedule, TaskGraph, Wait, task_graph, timeline
from kitsune.plan.plan import Span
from kitsune.schedule.cost import analytic_costs
from kitsune.schedule.limits import cuda_limits
from tests.kitsune.execution.test_cuda_graph import at_rest
from tests.kitsune.execution.test_lower import PROGRAMS, any_schedule
from tests.kitsune.execution.test_on_streams import CUDA, Stream, function, values
from tests.kitsune.graph.programs import Program, inputs, traced
from tests.kitsune.steps import TracedStep, bits, dropout_step, model_step, traced_step


@pytest.fixture(autouse=True)
def _costs_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(module: fx.GraphModule, graph: TaskGraph, _inputs: object) -> Costs:
        return analytic_costs(module.graph, graph, cuda_limits("a GPU", (9, 0)))

    monkeypatch.setattr(planning, "measured_costs", costs)


def timed(module: fx.GraphModule, schedule: Schedule) -> Lowered:
    return lower(module, task_graph(module.graph), schedule, timed=True)


def one_stream(module: fx.GraphModule) -> Schedule:
    num_tasks = len(task_graph(module.graph).tasks)
    return Schedule("in order", tuple(range(num_tasks)), (0,) * num_tasks)


def new_pool() -> GraphPool:
    return GraphPool(StreamPool())


def measure(module: fx.GraphModule, tensors: Sequence[Tensor]) -> tuple[Span, ...]:
    return measure_spans(module, timed(module, one_stream(module)), tensors, new_pool())


def check(graph: TaskGraph, schedule: Schedule, spans: tuple[Span, ...]) -> None:
    """The spans make a plan that can be stored and drawn: all tasks, in the order of the streams, after the waits."""
    memory = MemoryPlan((None,) * len(graph.values), 0, 0)
    costs = Costs((Cost(0.0),) * len(graph.tasks), launch_us=0.0, sync_us=0.0, source="analytic")
    plan = Plan(graph, schedule, memory, costs, predicted_us=0.0, measured_spans=spans)
    assert Plan.from_json(plan.to_json()) == plan
    assert min((start for start, _ in spans), default=0.0) == 0.0
    timeline.trace(plan)


class Undisturbed:
    """Tensors and random number generators, and that they stay as they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors]
        self._before = self._now()

    def _now(self) -> list[object]:
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
        return bits([tensor.detach().cpu() for tensor in (*self._tensors, *states)])

    def check(self) -> None:
        assert self._now() == self._before
        assert [tensor._version for tensor in self._tensors] == self._versions


@given(PROGRAMS, st.integers(0, 2**20), st.integers(1, 4))
def test_all_tasks_of_any_program_are_timed(program: Program, seed: int, num_streams: int) -> None:
    module, tensors = traced(program), inputs()
    graph = task_graph(module.graph)
    schedule = any_schedule(graph, seed, num_streams)
    undisturbed = Undisturbed(tensors)
    check(graph, schedule, measure_spans(module, timed(module, schedule), tensors, new_pool()))
    undisturbed.check()


LONG = {"resnet18": (pytest.mark.slow,)}
STEPS = [pytest.param(partial(model_step, name), id=name, marks=LONG.get(name, ())) for name in models.names()]


@pytest.mark.parametrize("make", [*STEPS, pytest.param(dropout_step, id="dropout")])
def test_steps_as_planned(make: Callable[[], TracedStep], tmp_path: Path) -> None:
    step = make()
    several = planning.challengers(step.module, step.inputs, 4)
    assert several
    for planned in (planning.in_order(step.module, torch.device("cpu")), several[0]):
        plan = planned.plan
        arena = Block(torch.full((plan.memory.arena_bytes,), 0xFF, dtype=torch.uint8))  # NaN, in floating point
        undisturbed = Undisturbed(step.inputs)
        lowered = planned.lowered(arena, timed=True)
        spans = measure_spans(planned.module, lowered, step.inputs, new_pool())
        undisturbed.check()
        check(plan.graph, plan.schedule, spans)
        measured = dataclasses.replace(plan, measured_spans=spans)
        measured.timeline(tmp_path / "trace.json")
        assert "measured" in (tmp_path / "trace.json").read_text()

        expected_values, found_values = step.fresh_inputs(), step.fresh_inputs()
        torch.manual_seed(0)
        expected = InOrder(planned.module)(expected_values)
        torch.manual_seed(0)
        found = InOrder(lowered.module, lanes=TimedHostLanes)(found_values)
        assert bits([*found, *found_values]) == bits([*expected, *expected_values])


def test_every_run_starts_from_the_values_of_the_inputs() -> None:
    """Runs that went on where the last one ended would leave the table."""

    def advance(table: Tensor, place: Tensor) -> list[Tensor]:
        row = table[place]
        place.add_(1)
        return [row]

    tensors = [torch.randn(2, 3), torch.tensor([1])]
    module = trace(advance, tensors)
    check(task_graph(module.graph), one_stream(module), measure(module, tensors))
    assert tensors[1].item() == 1


def test_written_inputs_that_share_memory_do_so_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(4)
    tensors = [memory[:3], memory[1:]]
    module = trace(lambda x, y: [x.add_(1), y.mul_(2)], tensors)
    seen: list[tuple[int, list[float]]] = []
    run = InOrder.__call__

    def watch(in_order: InOrder, given: Sequence[Tensor]) -> Any:
        outputs = run(in_order, given)
        first, second = given
        seen.append((second.data_ptr() - first.data_ptr(), second.tolist()))
        return outputs

    monkeypatch.setattr(InOrder, "__call__", watch)
    measure(module, tensors)
    assert set(map(str, seen)) == {str((4, [2.0, 2.0, 0.0]))}
    assert not memory.any()


def test_parameters_are_timed_without_autograd() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    module = trace(lambda weight: [weight.detach().mul_(2)], [weight])
    measure(module, [weight])
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_the_spans_are_of_the_median_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that shows what the test says: two tasks a run, each as long as the run's number says."""
    lengths_us = [1, 2, 50, 10, 40, 30, 20]  # the first two are not counted
    clock = iter([10**9 * run + 1000 * length * mark for run, length in enumerate(lengths_us) for mark in (0, 1, 1, 2)])
    tensors = inputs()
    module = traced([("add", 0, 1), ("matmul", 3, 3)])
    lowered = timed(module, one_stream(module))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    spans = measure_spans(module, lowered, tensors, new_pool())
    assert spans == ((0.0, 30.0), (30.0, 60.0))
    assert next(clock, None) is None


class Event:
    """Stands for a CUDA event; time passes at every record."""

    recorded: ClassVar[list[tuple[str, Event]]] = []

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "external": True}, "without, a replay does not record it"

    def record(self, stream: Stream) -> None:
        self.recorded.append((stream.name, self))
        self.time_ms = 0.5 * len(self.recorded)

    def elapsed_time(self, end: Event) -> float:
        return end.time_ms - self.time_ms


def test_cuda_events_are_recorded_on_the_streams_of_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(Event, "recorded", [])
    log: list[tuple[str, str, str]] = []
    made: list[TimedCudaLanes] = []

    def lanes() -> TimedCudaLanes:
        made.append(TimedCudaLanes([Stream("a", log), Stream("b", log)]))  # type: ignore[list-item]
        return made[-1]

    module = traced([("add", 0, 1), ("matmul", 0, 1), ("add", 3, 4)])
    schedule = Schedule("by hand", (0, 1, 2), (0, 1, 0), (Wait(2, 1),))
    InOrder(timed(module, schedule).module, lanes=lanes)(inputs())
    assert [name for name, _ in Event.recorded] == ["a", "a", "a", "b", "b", "a", "a"]
    assert made[0].spans_us() == ((500.0, 1000.0), (1500.0, 2000.0), (2500.0, 3000.0))
    assert [(name, action) for name, action, _ in log] == [
        ("a", "record"), ("b", "wait"), ("b", "record"), ("a", "wait"), ("a", "wait for"),
    ]  # fmt: skip


def test_an_end_before_its_start_is_moved_only_where_events_cannot_tell_them_apart() -> None:
    assert _from_first_start([(9.0, 8.75), (8.5, 8.5)]) == ((0.5, 0.5), (0.0, 0.0))
    assert _from_first_start([(9.0, 8.0)]) == ((0.0, -1.0),)
    assert _from_first_start([]) == ()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "too little device memory to time"),
        (RuntimeError("not permitted\nwhen a stream is capturing"), "failed: not permitted"),
    ],
)
def test_what_fails_is_refused_and_leaves_no_trace(error: RuntimeError, reason: str) -> None:
    def fail(x: Tensor) -> Tensor:
        raise error

    tensors = inputs()
    module = traced([("uniform_", 0, 0), ("add", 0, 1)])
    lowered = timed(module, one_stream(module))
    (node,) = lowered.module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    node.target, node.args = fail, node.args[:1]
    lowered.module.recompile()
    undisturbed = Undisturbed(tensors)
    with pytest.raises(RefusedError, match=reason) as caught:
        measure_spans(module, lowered, tensors, new_pool())
    assert "\n" not in caught.value.refusal.reason
    undisturbed.check()


@pytest.mark.gpu
@pytest.mark.parametrize("num_streams", [1, 2, 4, MAX_STREAMS])
@pytest.mark.parametrize("seed", range(3))
def test_replays_are_timed_on_any_number_of_streams(seed: int, num_streams: int) -> None:
    tensors = values()
    module = trace(function, tensors)
    graph = task_graph(module.graph)
    schedule = any_schedule(graph, seed, num_streams)
    undisturbed = Undisturbed(tensors)
    current = torch.cuda.current_stream()
    spans = measure_spans(module, timed(module, schedule), tensors, new_pool())
    check(graph, schedule, spans)
    undisturbed.check()
    assert torch.cuda.current_stream() == current
    assert max(end for _, end in spans) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_a_timed_graph_gives_the_same(seed: int) -> None:
    module, pool = trace(function, values()), new_pool()
    expected = InOrder(module)(values())
    lowered = timed(module, any_schedule(task_graph(module.graph), seed, 4))
    make = timed_lanes_for(lowered.num_streams, pool.streams, CUDA)
    made = []  # the graph needs their events
    run = InOrder(lowered.module, lanes=lambda: (made.append(make()), made[-1])[1])
    graph = CudaGraph(run, values(), copied={0, 1}, mutated={}, pool=pool)
    for _ in range(20):
        for one, other in zip(graph(values()), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_replay_that_writes_and_draws_random_numbers_leaves_no_trace() -> None:
    def draw(x: Tensor, total: Tensor) -> list[Tensor]:
        hidden = torch.nn.functional.dropout(x, 0.5)
        total.add_(hidden.sum())
        return [hidden @ hidden, torch.rand_like(x) + total]

    tensors = [torch.ones(64, 64, device=CUDA), torch.zeros((), device=CUDA)]
    module = trace(draw, tensors)
    graph = task_graph(module.graph)
    schedule, pool = any_schedule(graph, 0, 3), new_pool()
    lowered = timed(module, schedule)
    measure_spans(module, lowered, tensors, pool)
    held, undisturbed = at_rest(), Undisturbed(tensors)
    for _ in range(3):
        check(graph, schedule, measure_spans(module, lowered, tensors, pool))
    undisturbed.check()
    assert at_rest() == held


@pytest.mark.gpu
def test_a_recording_that_fails_is_refused_and_can_be_followed_by_another() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.nonzero.default, (x,))
    graph.output([graph.call_function(torch.ops.aten.relu.default, (x,))])
    lanes_first = fx.Graph()
    lanes_first.placeholder("lanes")
    lanes_first.output(lanes_first.graph_copy(graph, {}))
    tensors, pool = values(), new_pool()
    undisturbed, current = Undisturbed(tensors), torch.cuda.current_stream()
    unrecordable = Lowered(fx.GraphModule({}, lanes_first), 1)
    with pytest.raises(RefusedError, match="timing the tasks of the plan failed"):
        measure_spans(fx.GraphModule({}, graph), unrecordable, tensors[:1], pool)
    undisturbed.check()
    assert torch.cuda.current_stream() == current
    module = trace(function, tensors)
    schedule = one_stream(module)
    check(task_graph(module.graph), schedule, measure_spans(module, timed(module, schedule), tensors, pool))


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.names())
def test_replayed_steps_as_planned(name: str, tmp_path: Path) -> None:
    workload = models.build(name)
    x, y = (tensor.to(CUDA) for tensor in workload.batch(8))
    step = traced_step(workload.module.to(CUDA), workload.loss_fn, x, y)
    several = planning.challengers(step.module, step.inputs, 4)
    assert several
    pool = new_pool()
    for planned in (planning.in_order(step.module, CUDA), *several):
        plan = planned.plan
        arena = Block(torch.full((plan.memory.arena_bytes,), 0xFF, dtype=torch.uint8, device=CUDA))
        undisturbed = Undisturbed(step.inputs)
        spans = measure_spans(planned.module, planned.lowered(arena, timed=True), step.inputs, pool)
        undisturbed.check()
        check(plan.graph, plan.schedule, spans)
        dataclasses.replace(plan, measured_spans=spans).timeline(tmp_path / "trace.json")
