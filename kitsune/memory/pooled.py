"""What values take of a caching allocator that has memory for each stream apart, as PyTorch's has."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from kitsune.memory.lifetimes import tasks_on_streams
from kitsune.plan.schedule import Schedule
from kitsune.plan.tasks import TaskGraph


def pooled_bytes(graph: TaskGraph, schedule: Schedule) -> int:
    """The most bytes that the values of `graph` take when its tasks are issued in the order of `schedule`.

    A value lies in the memory of its producer's stream, from there until it is released (see `releases`), an output
    for ever. What it leaves is used again on that stream only. The allocator's rounding is left out.
    """
    allocated, released = Counter[int](), Counter[int]()
    for value in graph.values:
        allocated[value.producer] += value.num_bytes
    freed = [value for value in graph.values if not value.is_output]
    places = releases(schedule, ((value.producer, *value.users) for value in freed))
    for value, task in zip(freed, places, strict=True):
        if task is not None:
            released[task] += value.num_bytes
    present, peaks = [0] * schedule.num_streams, [0] * schedule.num_streams
    for task in schedule.order:
        stream = schedule.streams[task]
        present[stream] += allocated[task] - released[task]
        peaks[stream] = max(peaks[stream], present[stream])
    return sum(peaks)


def releases(schedule: Schedule, accesses: Iterable[Sequence[int]]) -> list[int | None]:
    """By value, the task before which it is released; None: it is held to the end.

    The allocator gives what is released to later tasks of the producer's stream, at once. So a value is held until
    that stream comes to a task before which all that touch the value have finished for sure.

    Args:
        accesses: by value, the tasks that touch it, its producer first.
    """
    on_streams = tasks_on_streams(schedule)
    return [_release(schedule, touched, on_streams[schedule.streams[touched[0]]]) for touched in accesses]


def _release(schedule: Schedule, touched: Sequence[int], on_stream: Sequence[int]) -> int | None:
    """The first of `on_stream`, the tasks of the producer's stream, before which all of `touched` have finished."""
    needed = [0] * schedule.num_streams
    for task in touched:
        stream = schedule.streams[task]
        needed[stream] = max(needed[stream], schedule.positions[task])
    place = bisect_left(on_stream, True, key=lambda task: _covers(schedule.clocks[task], needed))
    return on_stream[place] if place < len(on_stream) else None


def _covers(clock: Sequence[int], needed: Sequence[int]) -> bool:
    return all(have >= want for have, want in zip(clock, needed, strict=True))
