"""What an allocator with memory for each stream needs: lowered code that runs, and all that may be alive at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.execution.in_order import InOrder
from kitsune.execution.lanes import HostLanes
from kitsune.execution.lower import lower
from kitsune.graph.dataflow import storage_of
from kitsune.memory.planner import plan_memory
from kitsune.memory.pooled import pooled_bytes, releases
from kitsune.plan import Schedule, TaskGraph, Wait, task_graph
from kitsune.schedule import DataflowScheduler
from tests.kitsune.graph.programs import WIDER_OPERATORS, Program, inputs, programs_of, traced
from tests.kitsune.memory.graphs import (
    GraphWriter,
    in_order,
    random_graph,
    random_schedule,
    scheduled_graphs,
    training_step,
)
from tests.kitsune.memory.interleavings import is_alive, states
from tests.kitsune.schedule.graphs import make_costs
from tests.kitsune.steps import model_step

Case = tuple[TaskGraph, Schedule]

PROGRAMS = programs_of(WIDER_OPERATORS)


class FakeAllocator(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate while a graph runs on the CPU, for each stream apart.

    Memory belongs to the stream on which it was allocated, and is given back once nothing refers to it any more.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.stream = 0
        self.peaks: dict[int, int] = {}
        self._present: dict[int, int] = {}
        self._given = {storage_of(tensor) for tensor in given}
        self._allocated: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._take_back()
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in self._allocated.keys() | self._given:
                self._give(tensor.untyped_storage())
        return result

    def _give(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self._allocated[reference.cdata] = reference, self.stream, storage.nbytes()
        self._present[self.stream] = self._present.get(self.stream, 0) + storage.nbytes()
        self.peaks[self.stream] = max(self.peaks.get(self.stream, 0), self._present[self.stream])

    def _take_back(self) -> None:
        expired = [name for name, (reference, _, _) in self._allocated.items() if reference.expired()]
        for name in expired:
            _, stream, num_bytes = self._allocated.pop(name)
            self._present[stream] -= num_bytes


class FakeLanes(HostLanes):
    """Tells the allocator of the stream."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self._allocator = allocator

    def to(self, stream: int) -> None:
        self._allocator.stream = stream


def held_bytes(module: fx.GraphModule, graph: TaskGraph, schedule: Schedule, values: Sequence[torch.Tensor]) -> int:
    """What a fake allocator holds after a run of the lowered graph on `values`."""
    lowered = lower(module, graph, schedule)
    constants = [getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
    allocator = FakeAllocator([*values, *constants])
    lanes = (lambda: FakeLanes(allocator)) if schedule.num_streams > 1 else None
    run = InOrder(lowered.module, lanes=lanes)
    with allocator:
        run(values)
    return sum(allocator.peaks.values())


@given(PROGRAMS, st.integers(1, 4), st.integers(0, 2**20))
def test_it_is_what_lowered_code_takes(program: Program, num_streams: int, seed: int) -> None:
    module = traced(program)
    graph = task_graph(module.graph)
    schedule = random_schedule(graph, num_streams, seed)
    assert pooled_bytes(graph, schedule) == held_bytes(module, graph, schedule, inputs())


@pytest.mark.parametrize("strategy", ["in order", "chains", "list"])
def test_it_is_what_a_step_takes(strategy: Any) -> None:
    step = model_step("lenet")
    graph = task_graph(step.module.graph)
    costs = make_costs([10.0] * len(graph.tasks), 0.3)
    schedule = DataflowScheduler(4, strategy).schedule(graph, costs)
    assert (schedule.num_streams == 1) == (strategy == "in order")
    assert pooled_bytes(graph, schedule) == held_bytes(step.module, graph, schedule, step.fresh_inputs())


@given(st.integers(1, 10), st.integers(2, 3), st.integers(0, 2**20))
def test_it_is_the_most_that_values_of_each_stream_need_in_any_interleaving(
    num_tasks: int, num_streams: int, seed: int
) -> None:
    graph = random_graph(num_tasks, seed)
    schedule = random_schedule(graph, num_streams, seed)
    most = [0] * schedule.num_streams
    for started, ended in states(schedule):
        alive = [0] * schedule.num_streams
        for value in graph.values:
            alive[schedule.streams[value.producer]] += value.num_bytes * is_alive(value, started, ended)
        most = list(map(max, most, alive))
    assert pooled_bytes(graph, schedule) == sum(most)


@given(scheduled_graphs(max_tasks=12, max_streams=1))
def test_on_one_stream_it_is_what_is_alive(case: Case) -> None:
    graph, schedule = case
    assert pooled_bytes(graph, schedule) == plan_memory(graph, schedule, alignment=1).live_bytes


def test_of_a_step_in_order_it_is_what_is_alive() -> None:
    graph = training_step(4)
    schedule = in_order(graph)
    assert pooled_bytes(graph, schedule) == plan_memory(graph, schedule, alignment=1).live_bytes


def test_what_another_stream_reads_is_held_until_it_is_awaited() -> None:
    writer = GraphWriter()
    read = writer.value(1000)
    reader = writer.task([read])
    for _ in range(3):
        writer.value(100)
    graph = writer.graph()
    streams = (0, 1, 0, 0, 0)
    waits = (Wait(reader, 0),)
    never = Schedule("by hand", (0, 1, 2, 3, 4), streams, waits)
    assert releases(never, [(0, reader), (2,), (4,)]) == [None, 3, None]
    assert pooled_bytes(graph, never) == 1100
    awaited = Schedule("by hand", (0, 1, 2, 3, 4), streams, (*waits, Wait(3, reader)))
    assert releases(awaited, [(0, reader), (2,), (4,)]) == [3, 3, None]
    assert pooled_bytes(graph, awaited) == 1100
    at_once = Schedule("by hand", (0, 1, 2, 3, 4), streams, (*waits, Wait(2, reader)))
    assert releases(at_once, [(0, reader), (2,), (4,)]) == [2, 3, None]
    assert pooled_bytes(graph, at_once) == 1000


def test_a_graph_without_tasks_takes_nothing() -> None:
    assert pooled_bytes(TaskGraph(()), Schedule("in order", (), ())) == 0
