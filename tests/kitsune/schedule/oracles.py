"""Slow, independent answers to what the scheduler computes, each written from the definition."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from kitsune.plan import Costs, Schedule, TaskGraph, Wait
from kitsune.schedule.simulate import simulate


def closure(num_tasks: int, pairs: set[tuple[int, int]]) -> list[list[bool]]:
    """Whether a path leads from the first task to the second (Warshall, on rows of bits)."""
    reached = [0] * num_tasks
    for first, second in pairs:
        reached[first] |= 1 << second
    for through in range(num_tasks):
        for first in range(num_tasks):
            if reached[first] >> through & 1:
                reached[first] |= reached[through]
    return [[bool(row >> second & 1) for second in range(num_tasks)] for row in reached]


def dependency_pairs(graph: TaskGraph) -> set[tuple[int, int]]:
    """Pairs of a task and one that depends on it."""
    return {(dependency.task, task.index) for task in graph.tasks for dependency in task.after}


def ordered(schedule: Schedule, waits: Sequence[Wait]) -> list[list[bool]]:
    """Whether the first task ends before the second starts, on the streams of `schedule` with `waits`."""
    return closure(len(schedule.order), _steps(schedule, waits))


def _steps(schedule: Schedule, waits: Sequence[Wait]) -> set[tuple[int, int]]:
    pairs = {(wait.earlier, wait.later) for wait in waits}
    for stream in set(schedule.streams):
        pairs.update(pairwise(task for task in schedule.order if schedule.streams[task] == stream))
    return pairs


def enforces(graph: TaskGraph, schedule: Schedule, waits: Sequence[Wait]) -> bool:
    """Whether all dependencies hold on the streams of `schedule` with `waits`, and nothing waits for itself."""
    before = ordered(schedule, waits)
    cyclic = any(before[task][task] for task in range(len(schedule.order)))
    return not cyclic and all(before[first][second] for first, second in dependency_pairs(graph))


def redundant(schedule: Schedule) -> list[Wait]:
    """The waits that a path of others and of the order on the streams implies, where nothing waits for itself."""
    before = ordered(schedule, schedule.waits)
    steps = _steps(schedule, schedule.waits)
    return [
        wait
        for wait in schedule.waits
        if any(second == wait.later and before[wait.earlier][first] for first, second in steps)
    ]


def reduction(num_tasks: int, pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs that no path of others connects."""
    return {pair for pair in pairs if not closure(num_tasks, pairs - {pair})[pair[0]][pair[1]]}


def largest_matching(pairs: set[tuple[int, int]]) -> int:
    """The size of a largest set of pairs, no two of which share a first or a second (by trying all)."""
    if not pairs:
        return 0
    pair = min(pairs)
    rest = {other for other in pairs if other[0] != pair[0] and other[1] != pair[1]}
    return max(1 + largest_matching(rest), largest_matching(pairs - {pair}))


def peak_on_any_interleaving(graph: TaskGraph, schedule: Schedule) -> int:
    """The most bytes that are alive at once, over all sets of finished and running tasks that may occur."""
    tasks = range(len(graph.tasks))
    before = ordered(schedule, schedule.waits)
    peak = 0
    for size in range(len(graph.tasks) + 1):
        for finished in map(set, combinations(tasks, size)):
            if any(before[first][second] and first not in finished for second in finished for first in tasks):
                continue
            able = {
                task
                for task in tasks
                if task not in finished and all(first in finished for first in tasks if before[first][task])
            }
            live = sum(
                value.num_bytes
                for value in graph.values
                if value.producer in finished | able
                and (value.is_output or not {value.producer, *value.users} <= finished)
            )
            peak = max(peak, live)
    return peak


def simulate_naively(graph: TaskGraph, costs: Costs, schedule: Schedule) -> tuple[list[float], list[float]]:
    """Starts and ends by task, found by looking at every task whenever anything happens."""
    num_tasks = len(graph.tasks)
    starts: list[float | None] = [None] * num_tasks
    ends: list[float | None] = [None] * num_tasks
    left = [cost.us for cost in costs.tasks]
    now = 0.0
    while None in ends:
        running = [task for task in range(num_tasks) if starts[task] is not None and ends[task] is None]
        done = [task for task in running if left[task] <= 1e-9]
        if done:
            ends[done[0]] = now
            continue
        waiting = [task for task in range(num_tasks) if starts[task] is None]
        due = {task: when for task in waiting if (when := _due(task, costs, schedule, ends)) is not None}
        begun = [task for task, when in due.items() if when <= now + 1e-9]
        if begun:
            starts[begun[0]] = now
            continue
        rate = 1 / max(1.0, math.fsum(costs.tasks[task].share for task in running))
        step = min([left[task] / rate for task in running] + [when - now for when in due.values()])
        now += step
        for task in running:
            left[task] -= step * rate
    return [start for start in starts if start is not None], [end for end in ends if end is not None]


def _due(task: int, costs: Costs, schedule: Schedule, ends: Sequence[float | None]) -> float | None:
    """When `task` may start; None while something before it has not ended."""
    place = schedule.order.index(task)
    same = [other for other in schedule.order[:place] if schedule.streams[other] == schedule.streams[task]]
    awaited = [wait.earlier for wait in schedule.waits if wait.later == task]
    times = [ends[other] for other in same[-1:] + awaited]
    if not times:
        return 0.0
    known = [time for time in times if time is not None]
    return max(known) + costs.launch_us + costs.sync_us * len(awaited) if len(known) == len(times) else None


def optimum_us(graph: TaskGraph, costs: Costs, num_streams: int) -> float:
    """The shortest simulated time over all legal schedules on at most `num_streams` streams."""
    after = [{dependency.task for dependency in task.after} for task in graph.tasks]
    schedules = (from_queues(graph, queues) for queues in _queues(after, num_streams))
    return min(simulate(graph, costs, schedule).total_us for schedule in schedules)


def from_queues(graph: TaskGraph, queues: Sequence[Sequence[int]]) -> Schedule:
    """The schedule that has these tasks in this order on its streams, with the waits that are needed."""
    used = [queue for queue in queues if queue]
    streams = [0] * len(graph.tasks)
    pairs: set[tuple[int, int]] = set()
    for stream, queue in enumerate(used):
        pairs.update(pairwise(queue))
        for task in queue:
            streams[task] = stream
    needed = reduction_on_streams(graph, streams, pairs)
    order: list[int] = []
    while len(order) < len(streams):
        blocked = {second for first, second in pairs | dependency_pairs(graph) if first not in order}
        order.append(next(task for task in range(len(streams)) if task not in order and task not in blocked))
    return Schedule("by hand", tuple(order), tuple(streams), tuple(sorted(needed)))


def reduction_on_streams(graph: TaskGraph, streams: Sequence[int], queued: set[tuple[int, int]]) -> list[Wait]:
    """The dependencies between streams that no path of others and of the pairs `queued` connects."""
    pairs = dependency_pairs(graph) | queued
    crossing = [pair for pair in dependency_pairs(graph) if streams[pair[0]] != streams[pair[1]]]
    following: dict[int, set[int]] = {}
    for first, second in pairs:
        following.setdefault(first, set()).add(second)
    return [Wait(second, first) for first, second in crossing if not _reaches(following, first, second)]


def _reaches(following: dict[int, set[int]], first: int, second: int) -> bool:
    """Whether a path of two or more steps leads from `first` to `second`."""
    frontier = following[first] - {second}
    seen = set(frontier)
    while frontier:
        frontier = {task for earlier in frontier for task in following.get(earlier, ())} - seen
        seen |= frontier
    return second in seen


def _queues(after: list[set[int]], num_streams: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to queue the tasks on streams in which they can run, each once."""
    stack: list[tuple[frozenset[int], tuple[tuple[int, ...], ...]]] = [(frozenset(), ((),) * num_streams)]
    seen = set()
    while stack:
        issued, queues = stack.pop()
        if len(issued) == len(after):
            yield queues
        for task in range(len(after)):
            if task in issued or not after[task] <= issued:
                continue
            for stream in range(num_streams):
                longer = (*queues[:stream], (*queues[stream], task), *queues[stream + 1 :])
                if longer not in seen:
                    seen.add(longer)
                    stack.append((issued | {task}, longer))
                if not queues[stream]:
                    break  # one empty stream is like another
