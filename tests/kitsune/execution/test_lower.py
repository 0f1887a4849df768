"""Plans as code: the same results in every legal schedule, and no value's memory given back too early."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from kitsune.execution.in_order import InOrder
from kitsune.execution.lower import lower
from kitsune.graph import dataflow
from kitsune.plan import Schedule, TaskGraph, Wait, task_graph
from tests.kitsune.graph.programs import WIDER_OPERATORS, Program, inputs, programs_of, traced

PROGRAMS = programs_of(WIDER_OPERATORS)


def any_schedule(graph: TaskGraph, seed: int, num_streams: int) -> Schedule:
    """A random legal one: tasks in any order that keeps the dependencies, on any streams, with all waits."""
    choose = random.Random(seed)
    waiting = {task.index: {dependency.task for dependency in task.after} for task in graph.tasks}
    order: list[int] = []
    while waiting:
        index = choose.choice(sorted(task for task, after in waiting.items() if not after & waiting.keys()))
        order.append(index)
        del waiting[index]
    streams = [choose.randrange(num_streams) for _ in order]
    names = {stream: number for number, stream in enumerate(dict.fromkeys(streams[index] for index in order))}
    numbered = [names[stream] for stream in streams]
    waits = {
        Wait(task.index, dependency.task)
        for task in graph.tasks
        for dependency in task.after
        if numbered[task.index] != numbered[dependency.task]
    }
    return Schedule("any", tuple(order), tuple(numbered), tuple(sorted(waits)))


class Witness:
    """Lanes on the CPU: notes what it is told, and that it makes sense."""

    def __init__(self) -> None:
        self.stream = 0
        self.begun = {0}
        self.ended: set[int] = set()
        self.joined = False
        self.present: int | None = None
        self.timed: list[int] = []

    def to(self, stream: int) -> None:
        assert self.present is None
        self.stream = stream

    def begin(self) -> None:
        assert self.stream not in self.begun
        self.begun.add(self.stream)

    def record(self, task: int) -> None:
        assert self.stream in self.begun
        assert self.present is None
        self.ended.add(task)

    def wait(self, task: int) -> None:
        assert task in self.ended
        assert self.stream in self.begun
        assert self.present is None

    def start(self, task: int) -> None:
        assert self.stream in self.begun
        assert self.present is None
        self.present = task

    def end(self, task: int) -> None:
        assert self.present == task
        self.present = None
        self.timed.append(task)

    def join(self) -> None:
        assert self.stream == 0
        self.joined = True

    def hold(self, *values: Any) -> None:
        assert values


def run(module: fx.GraphModule, schedule: Schedule, values: list[torch.Tensor], *, timed: bool) -> list[torch.Tensor]:
    """The results of the lowered graph; it writes to `values` as the graph does."""
    witnesses: list[Witness] = []

    def lanes() -> Witness:
        witnesses.append(Witness())
        return witnesses[-1]

    lowered = lower(module, task_graph(module.graph), schedule, timed=timed)
    assert lowered.num_streams == schedule.num_streams
    results = InOrder(lowered.module, lanes=lanes if timed or schedule.num_streams > 1 else None)(values)
    for witness in witnesses:
        assert witness.joined
        assert len(witness.begun) == schedule.num_streams
        assert witness.timed == (list(schedule.order) if timed else [])
    return list(results)


@given(PROGRAMS, st.integers(0, 2**20), st.integers(1, 4), st.booleans())
def test_every_legal_schedule_gives_the_same_to_the_bit(
    program: Program, seed: int, num_streams: int, timed: bool
) -> None:
    module = traced(program)
    expected_values, values = inputs(), inputs()
    torch.manual_seed(seed)
    expected = InOrder(module)(expected_values)
    schedule = any_schedule(task_graph(module.graph), seed, num_streams)
    torch.manual_seed(seed)
    found = run(module, schedule, values, timed=timed)
    for one, other in zip((*found, *values), (*expected, *expected_values), strict=True):
        assert torch.equal(one, other)


def finished_before(schedule: Schedule) -> dict[int, set[int]]:
    """For each task those that have finished for sure when it starts: a search over the edges, without clocks."""
    result: dict[int, set[int]] = {}
    latest: dict[int, int] = {}
    for task in schedule.order:
        direct = [wait.earlier for wait in schedule.waits if wait.later == task]
        if schedule.streams[task] in latest:
            direct.append(latest[schedule.streams[task]])
        latest[schedule.streams[task]] = task
        result[task] = {*direct, *(before for earlier in direct for before in result[earlier])}
    return result


def released_before(module: fx.GraphModule, lowered: fx.GraphModule, tasks: dict[str, int]) -> dict[int, list[int]]:
    """By storage, the tasks that are issued when no variable of the lowered code refers to it any more."""
    nodes = list(lowered.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    last: dict[int, int] = {}
    for node in nodes:
        for storage in dataflow.storages(node):
            last[storage] = max([last.get(storage, 0), place[node], *(place[user] for user in node.users)])
    given = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    kept = {s for node in given for s in dataflow.storages(node)}
    kept |= {s for node in dataflow.outputs(module.graph) if node is not None for s in dataflow.storages(node)}
    issued: dict[int, int] = {}
    for node in nodes:
        if node.name in tasks:
            issued.setdefault(tasks[node.name], place[node])
    return {
        storage: sorted(task for task, where in issued.items() if where > end)
        for storage, end in last.items()
        if storage not in kept
    }


def check_releases(module: fx.GraphModule, schedule: Schedule, lowered: fx.GraphModule) -> None:
    """Memory goes back to a stream's allocator as soon as its next tasks come after all readers, and no sooner."""
    graph = task_graph(module.graph)
    tasks = {name: task.index for task in graph.tasks for name in task.nodes}
    before = finished_before(schedule)
    issued = {task: place for place, task in enumerate(schedule.order)}
    touched: dict[int, set[int]] = {}
    producer: dict[int, int] = {}
    for node in module.graph.nodes:
        if node.name in tasks:
            for storage in dataflow.storages(node):
                producer.setdefault(storage, tasks[node.name])
                users = {tasks[user.name] for user in node.users if user.name in tasks}
                touched.setdefault(storage, set()).update(users, {tasks[node.name]})
    for storage, later in released_before(module, lowered, tasks).items():
        stream = schedule.streams[producer[storage]]
        on_stream = [task for task in later if schedule.streams[task] == stream]
        for task in on_stream:
            assert touched[storage] <= before[task], "memory was given back while a reader may still run"
        could = [
            task
            for task in schedule.order
            if schedule.streams[task] == stream
            and touched[storage] <= before[task]
            and issued[task] > max(issued[user] for user in touched[storage])
        ]
        assert len(on_stream) >= len(could) - 1, "memory was held longer than needed"


@given(PROGRAMS, st.integers(0, 2**20), st.integers(1, 4))
def test_memory_is_held_until_all_readers_are_through(program: Program, seed: int, num_streams: int) -> None:
    module = traced(program)
    graph = task_graph(module.graph)
    schedule = any_schedule(graph, seed, num_streams)
    check_releases(module, schedule, lower(module, graph, schedule).module)


@given(PROGRAMS, st.integers(0, 2**20), st.integers(1, 4))
def test_a_timed_task_lies_between_its_start_and_its_end(program: Program, seed: int, num_streams: int) -> None:
    module = traced(program)
    graph = task_graph(module.graph)
    schedule = any_schedule(graph, seed, num_streams)
    nodes = list(lower(module, graph, schedule, timed=True).module.graph.nodes)
    names = [node.name for node in nodes]
    told = [(node.target, *node.args[1:]) if node.op == "call_method" else None for node in nodes]
    for task in graph.tasks:
        start, end = told.index(("start", task.index)), told.index(("end", task.index))
        assert names[start + 1 : end] == list(task.nodes)
        waits = [("wait", wait.earlier) for wait in schedule.waits if wait.later == task.index]
        assert all(wait in told[:start] for wait in waits)
        if any(wait.earlier == task.index for wait in schedule.waits):
            assert told[end + 1] == ("record", task.index)


def test_a_value_dropped_too_early_is_noticed() -> None:
    """The check itself: without the instructions to hold, a value that another stream reads is given back."""
    module = traced([("add", 0, 1), ("matmul", 3, 3), ("add", 0, 2), ("matmul", 5, 5), ("add", 4, 6)])
    graph = task_graph(module.graph)
    schedule = Schedule("by hand", (0, 1, 2, 3, 4), (0, 1, 0, 0, 0), (Wait(1, 0), Wait(4, 1)))
    lowered = lower(module, graph, schedule).module
    check_releases(module, schedule, lowered)
    for node in lowered.graph.find_nodes(op="call_method", target="hold"):
        lowered.graph.erase_node(node)
    with pytest.raises(AssertionError, match="given back"):
        check_releases(module, schedule, lowered)
