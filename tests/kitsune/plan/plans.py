"""Plans for tests: a small one made by hand, and random ones of every shape that the types allow."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from kitsune.plan import Cost, Costs, Dependency, Fusion, MemoryPlan, Plan, Schedule, Task, TaskGraph, Value, Wait
from kitsune.plan.plan import Span


def small() -> Plan:
    """A linear layer's step: the two gradients run on two streams, the update waits for one of them."""
    tasks = (
        Task(0, "addmm", "aten.addmm.default", ("addmm",)),
        Task(1, "mse_loss_backward", "aten.mse_loss_backward.default", ("mse_loss_backward",), (Dependency(0),)),
        Task(2, "mm", "aten.mm.default", ("permute", "mm"), (Dependency(1),)),
        Task(3, "sum_1", "aten.sum.dim_IntList", ("sum_1", "view"), (Dependency(1),)),
        Task(
            4, "_fused_adam_", "aten._fused_adam_.tensor_lr", ("_fused_adam_",),
            (Dependency(0, "anti"), Dependency(2), Dependency(3)),
        ),
    )  # fmt: skip
    values = (
        Value(0, "addmm", 4096, 0, (1,)),
        Value(1, "mse_loss_backward", 4096, 1, (2, 3)),
        Value(2, "mm", 16384, 2, (4,)),
        Value(3, "sum_1", 64, 3, (4,), is_output=True),
    )
    costs = (Cost(3.5, 0.5, "compute"), Cost(2.0, 0.25, "memory"), Cost(4.25), Cost(3.0, 0.125), Cost(5.0, 1.0))
    return Plan(
        graph=TaskGraph(tasks, values),
        schedule=Schedule("list", (0, 1, 3, 2, 4), (0, 0, 0, 1, 0), (Wait(3, 1), Wait(4, 3))),
        memory=MemoryPlan((0, 4096, 8192, 0), 24576, 20544),
        costs=Costs(costs, launch_us=0.5, sync_us=1.0, source="measured"),
        predicted_us=16.25,
        measured_us=17.5,
        predicted_spans=((0.0, 3.5), (4.0, 6.0), (6.5, 10.75), (7.0, 10.0), (11.25, 16.25)),
        measured_spans=((0.0, 3.75), (4.25, 6.5), (7.0, 11.5), (8.0, 11.0), (12.25, 17.5)),
    )


def changed(path: str, value: object) -> str:
    """The JSON text of the small plan with another `value` at `path`: names and places, joined by dots."""
    document = json.loads(small().to_json())
    target: Any = document["plan"]
    *parents, last = path.split(".")
    for name in parents:
        target = target[int(name) if isinstance(target, list) else name]
    target[int(last) if isinstance(target, list) else last] = value
    return json.dumps(document)


_texts = st.text(max_size=12)
_us = st.floats(0, 1e6, allow_subnormal=True)
_names = st.lists(_texts, max_size=3).map(tuple)
_fusions = st.builds(Fusion, _texts, _names, st.none() | _us, st.none() | _us, st.none() | _texts)


@st.composite
def plans(draw: st.DrawFn, *, max_tasks: int = 8) -> Plan:
    """Any plan whose parts fit together, with times that its schedule allows."""
    num_tasks = draw(st.integers(0, max_tasks))
    indices = range(num_tasks)
    schedule = _schedule(draw, num_tasks)
    costs = tuple(
        Cost(draw(_us), draw(st.floats(0, 1)), draw(st.sampled_from(["memory", "compute", "latency"]))) for _ in indices
    )
    values, offsets = [], []
    for index in range(draw(st.integers(0, 6)) if num_tasks else 0):
        producer = draw(st.sampled_from(indices))
        users = tuple(sorted(draw(st.sets(st.sampled_from(indices))) - {producer}))
        values.append(Value(index, draw(_texts), draw(st.integers(0, 2**40)), producer, users, draw(st.booleans())))
        offsets.append(draw(st.integers(0, 2**50)) if values[-1].num_bytes else None)
    ends = [(offset or 0) + value.num_bytes for value, offset in zip(values, offsets, strict=True)]
    return Plan(
        graph=TaskGraph(tuple(_task(draw, index) for index in indices), tuple(values)),
        schedule=schedule,
        memory=MemoryPlan(tuple(offsets), max(ends, default=0), draw(st.integers(0, 2**50))),
        costs=Costs(costs, draw(_us), draw(_us), draw(st.sampled_from(["measured", "analytic"]))),
        predicted_us=draw(_us),
        measured_us=draw(st.none() | _us),
        predicted_spans=draw(st.none() | st.builds(spans, st.just(schedule), st.lists(_us, min_size=16, max_size=16))),
        measured_spans=draw(st.none() | st.builds(spans, st.just(schedule), st.lists(_us, min_size=16, max_size=16))),
        fusions=tuple(draw(st.lists(_fusions, max_size=3))),
    )


def spans(schedule: Schedule, numbers: list[float]) -> tuple[Span, ...]:
    """Spans that `schedule` allows: task i starts `numbers[2 * i]` after all that precede it, and runs as many more."""
    ends: dict[int, float] = {}
    found: dict[int, Span] = {}
    for task in schedule.order:
        before = [end for other, end in ends.items() if schedule.streams[other] == schedule.streams[task]]
        before += [ends[wait.earlier] for wait in schedule.waits if wait.later == task]
        start = max(before, default=0.0) + numbers[2 * task]
        found[task] = (start, start + numbers[2 * task + 1])
        ends[task] = found[task][1]
    return tuple(found[task] for task in range(len(schedule.order)))


def _task(draw: st.DrawFn, index: int) -> Task:
    earlier = sorted(draw(st.sets(st.sampled_from(range(index))))) if index else []
    kinds = st.sampled_from(["true", "anti", "output", "order"])
    nodes = tuple(draw(st.lists(_texts, max_size=3)))
    after = tuple(Dependency(task, draw(kinds)) for task in earlier)
    return Task(index, f"{draw(_texts)}_{index}", draw(_texts), nodes, after)


def _schedule(draw: st.DrawFn, num_tasks: int) -> Schedule:
    order = draw(st.permutations(range(num_tasks)))
    num_streams = draw(st.integers(1, max(1, min(4, num_tasks))))
    streams = [index % num_streams for index in draw(st.permutations(range(num_tasks)))]
    crossing = [
        Wait(later, earlier)
        for place, later in enumerate(order)
        for earlier in order[:place]
        if streams[earlier] != streams[later]
    ]
    waits = sorted(draw(st.sets(st.sampled_from(crossing)))) if crossing else []
    return Schedule(draw(_texts), tuple(order), tuple(streams), tuple(waits))
