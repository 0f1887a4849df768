"""Whether the parts of a plan fit together: indices, lengths and ranges. Whether it is right is the tests' question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitsune.plan.plan import Plan, Span


def problem(plan: Plan) -> str | None:
    """The first way in which `plan` contradicts what its types promise; None if there is none."""
    checks = (_tasks, _values, _schedule, _waits, _memory, _costs, _times)
    return next((found for check in checks for found in check(plan)), None)


def _tasks(plan: Plan) -> Iterator[str]:
    names: set[str] = set()
    for position, task in enumerate(plan.graph.tasks):
        earlier = [dependency.task for dependency in task.after]
        if task.index != position:
            yield f"task {position} has the index {task.index}"
        if task.name in names:
            yield f"two tasks are called {task.name!r}"
        if earlier != sorted(set(earlier)):
            yield f"the dependencies of task {position} are not ascending"
        if earlier and not 0 <= earlier[0] <= earlier[-1] < position:
            yield f"task {position} depends on a task that is not before it"
        names.add(task.name)


def _values(plan: Plan) -> Iterator[str]:
    tasks = range(len(plan.graph.tasks))
    for position, value in enumerate(plan.graph.values):
        if value.index != position:
            yield f"value {position} has the index {value.index}"
        if value.num_bytes < 0:
            yield f"value {position} has {value.num_bytes} bytes"
        if not all(task in tasks for task in (value.producer, *value.users)):
            yield f"value {position} belongs to a task that does not exist"
        if value.producer in value.users or list(value.users) != sorted(set(value.users)):
            yield f"the users of value {position} are not ascending tasks other than its producer"


def _schedule(plan: Plan) -> Iterator[str]:
    schedule, num_tasks = plan.schedule, len(plan.graph.tasks)
    if sorted(schedule.order) != list(range(num_tasks)):
        yield f"the order does not name each of {num_tasks} tasks once"
    if len(schedule.streams) != num_tasks:
        yield f"{len(schedule.streams)} tasks have a stream, of {num_tasks}"
    if set(schedule.streams) != set(range(len(set(schedule.streams)))):
        yield f"the streams {sorted(set(schedule.streams))} are not numbered from 0 without gaps"


def _waits(plan: Plan) -> Iterator[str]:
    schedule = plan.schedule
    place = {task: index for index, task in enumerate(schedule.order)}
    if list(schedule.waits) != sorted(set(schedule.waits)):
        yield "the waits are not ascending"
    for wait in schedule.waits:
        if wait.later not in place or wait.earlier not in place:
            yield f"{wait} names a task that does not exist"
        elif schedule.streams[wait.later] == schedule.streams[wait.earlier]:
            yield f"{wait} is within one stream"
        elif place[wait.earlier] > place[wait.later]:
            yield f"{wait} is for a task that is issued later"


def _memory(plan: Plan) -> Iterator[str]:
    memory, values = plan.memory, plan.graph.values
    if memory.arena_bytes < 0 or memory.live_bytes < 0:
        yield "the arena has a negative size"
    if len(memory.offsets) != len(values):
        yield f"{len(memory.offsets)} values have a place, of {len(values)}"
    for value, offset in zip(values, memory.offsets, strict=False):
        if offset is not None and not 0 <= offset <= memory.arena_bytes - value.num_bytes:
            yield f"value {value.index} does not lie within the arena"


def _costs(plan: Plan) -> Iterator[str]:
    costs = plan.costs
    if len(costs.tasks) != len(plan.graph.tasks):
        yield f"{len(costs.tasks)} tasks have a cost, of {len(plan.graph.tasks)}"
    if costs.launch_us < 0 or costs.sync_us < 0:
        yield "launching or waiting takes negative time"
    for index, cost in enumerate(costs.tasks):
        if cost.us < 0 or not 0 <= cost.share <= 1:
            yield f"task {index} costs {cost.us} us of {cost.share} of the device"


def _times(plan: Plan) -> Iterator[str]:
    if plan.predicted_us < 0 or (plan.measured_us is not None and plan.measured_us < 0):
        yield "the whole takes negative time"
    yield from _spans(plan.predicted_spans, "predicted", len(plan.graph.tasks))
    yield from _spans(plan.measured_spans, "measured", len(plan.graph.tasks))


def _spans(spans: tuple[Span, ...] | None, kind: str, num_tasks: int) -> Iterator[str]:
    if spans is None:
        return
    if len(spans) != num_tasks:
        yield f"{len(spans)} tasks have {kind} times, of {num_tasks}"
    for index, (start, end) in enumerate(spans):
        if not start <= end:
            yield f"task {index} ends before it starts ({kind})"
