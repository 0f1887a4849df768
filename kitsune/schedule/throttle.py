"""Keeping a schedule within a bound of memory, by waits."""

from __future__ import annotations

from dataclasses import replace

from kitsune.plan import Schedule, TaskGraph
from kitsune.schedule.edges import dependencies
from kitsune.schedule.live_bytes import IssuedBytes, peak_bytes
from kitsune.schedule.reduce import reduce_waits


def throttle(graph: TaskGraph, schedule: Schedule, max_bytes: int) -> Schedule | None:
    """`schedule` with waits added so that its `peak_bytes` do not exceed `max_bytes`; None if no waits can do that.

    They can if the tasks, run strictly in the order in which they are issued, need no more. That is one of the
    interleavings, and waits can come as close to it as needed: here a run of tasks that may need too much together is
    cut, and what lies behind the cut awaits all before it.
    """
    issued = IssuedBytes(graph)
    for task in schedule.order:
        issued.issue(task)
    if issued.peak > max_bytes:
        return None
    if peak_bytes(graph, schedule) <= max_bytes:
        return schedule
    after = [[*earlier] for earlier in dependencies(graph)]
    latest: dict[int, int] = {}  # of each stream, its latest task
    for segment in segments(graph, schedule, max_bytes):
        for task in {schedule.streams[task]: task for task in reversed(segment)}.values():  # the first of each stream
            after[task] += latest.values()
        latest |= {schedule.streams[task]: task for task in segment}
    return replace(schedule, waits=reduce_waits(after, schedule.order, schedule.streams))


def segments(graph: TaskGraph, schedule: Schedule, max_bytes: int) -> list[list[int]]:
    """Cuts the order of `schedule` into the longest runs of tasks, greedily, that fit if each awaits the one before.

    A run on several streams fits if all that is alive at its start and all that it allocates do: nothing is known of
    what dies within. On one stream, the tasks follow each other, and what dies is known.
    """
    issued = IssuedBytes(graph)
    streams = schedule.streams
    result: list[list[int]] = []
    together = 0  # alive at the start of the run, and allocated in it
    alone = True  # whether the run is on one stream
    for task in schedule.order:
        allocated = issued.allocated(task)
        alone = alone and bool(result) and streams[task] == streams[result[-1][0]]
        if not result or (not alone and together + allocated > max_bytes):
            result.append([])
            together, alone = issued.held, True
        result[-1].append(task)
        together += allocated
        issued.issue(task)
    return result
