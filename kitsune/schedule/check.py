"""What a legal schedule is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from kitsune.plan import Schedule, TaskGraph


def check(graph: TaskGraph, schedule: Schedule) -> list[str]:
    """What is wrong with `schedule` for `graph`; empty if it is legal.

    Legal is: every task is issued once; streams are numbered from 0 without gaps; waits ascend. Then: every task is
    issued after those it depends on and those it waits for, which are on other streams. Then: every dependency is
    enforced by the order on the streams and the waits, and no wait is implied by the others. Where one of these
    three steps finds something, those behind it have no meaning and are left out.
    """
    for step in (_shape, _order, _waits):
        if violations := list(step(graph, schedule)):
            return violations
    return []


def _shape(graph: TaskGraph, schedule: Schedule) -> Iterator[str]:
    tasks = range(len(graph.tasks))
    if sorted(schedule.order) != list(tasks):
        yield f"the order does not name each of the {len(tasks)} tasks once"
    if len(schedule.streams) != len(tasks):
        yield f"{len(schedule.streams)} streams are named for {len(tasks)} tasks"
    if set(schedule.streams) != set(range(len(set(schedule.streams)))):
        yield f"the streams {sorted(set(schedule.streams))} are not numbered from 0 without gaps"
    for wait in schedule.waits:
        if wait.later not in tasks or wait.earlier not in tasks:
            yield f"{wait} names a task that does not exist"
    for first, second in pairwise(schedule.waits):
        if first >= second:
            yield f"{second} follows {first}, but waits ascend"


def _order(graph: TaskGraph, schedule: Schedule) -> Iterator[str]:
    issued = {task: place for place, task in enumerate(schedule.order)}
    for task in graph.tasks:
        for dependency in task.after:
            if issued[dependency.task] >= issued[task.index]:
                yield f"task {task.index} is issued before task {dependency.task}, on which it depends"
    for wait in schedule.waits:
        if issued[wait.earlier] >= issued[wait.later]:
            yield f"task {wait.later} is issued before task {wait.earlier}, for which it waits"
        if schedule.streams[wait.earlier] == schedule.streams[wait.later]:
            yield f"task {wait.later} waits for task {wait.earlier} of its own stream"


def _waits(graph: TaskGraph, schedule: Schedule) -> Iterator[str]:
    for task in graph.tasks:
        for dependency in task.after:
            if not schedule.happens_before(dependency.task, task.index):
                yield f"task {task.index} may start before task {dependency.task} has ended, on which it depends"
    queues: dict[int, list[int]] = {}
    for task_index in schedule.order:
        queues.setdefault(schedule.streams[task_index], []).append(task_index)
    for later, waits in groupby(schedule.waits, key=lambda wait: wait.later):
        awaited = [wait.earlier for wait in waits]
        place = schedule.positions[later] - 1
        others = [*awaited, *queues[schedule.streams[later]][max(place - 1, 0) : place]]
        for earlier in awaited:
            if any(other != earlier and schedule.happens_before(earlier, other) for other in others):
                yield f"the wait of task {later} for task {earlier} is implied by others"
