"""Memory plans: places of values in one arena, so that none overwrites another on any timing of the streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kitsune.memory.by_size import by_size
from kitsune.memory.lifetimes import Lifetimes, lifetimes, live_bytes
from kitsune.memory.sweep import backwards, events, sweep
from kitsune.plan.memory import MemoryPlan
from kitsune.plan.schedule import Schedule
from kitsune.plan.tasks import TaskGraph

ALIGNMENT = 512
"""Bytes. Where CUDA's own allocators begin blocks; kernels read such memory in their widest loads."""

_FEW = 1000  # values, for which a method that takes the square of their number is quick


def plan_memory(graph: TaskGraph, schedule: Schedule, *, alignment: int = ALIGNMENT) -> MemoryPlan:
    """Places the values of `graph` in one arena.

    A value is alive from the start of its producer to the end of the last of its users, an output for ever. Two
    values share bytes only if the schedule orders the producer and all users of one before the producer of the other.
    So a task's results never overlap what it reads.

    No known quick method is best for every graph: each of several places all values, and the smallest arena is kept,
    of equals the first. In order of issue and, for one stream, against it, each value goes into the smallest hole;
    once as low as possible, once with short-lived values at the hole's upper end, so that they leave no holes among
    those that stay. Up to 1,000 values are also placed by decreasing size, and by decreasing size times lifetime. For
    more than that, an arena within a hundredth of the bytes alive is good enough, and no other method is tried.

    Args:
        alignment: places are multiples of so many bytes, a power of two; sizes are rounded up to it. The plan's
            `live_bytes` counts rounded sizes; with several streams it is an upper bound (see `live_bytes` in
            `kitsune.memory.lifetimes`), which the arena may well be below.

    Raises:
        ValueError: `alignment` is not a power of two.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two, not {alignment}")
    sizes = [-(-value.num_bytes // alignment) for value in graph.values]
    lives = lifetimes(graph, schedule)
    least = live_bytes(lives, sizes)
    enough = _enough(least, len(sizes), schedule.num_streams)
    best: list[int] = []
    arena = sum(sizes) + 1
    for offsets in _candidates(graph, lives, sizes):
        end = max((begin + size for begin, size in zip(offsets, sizes, strict=True)), default=0)
        if end < arena:
            best, arena = offsets, end
        if arena <= enough:
            break
    places = [begin * alignment if size else None for begin, size in zip(best, sizes, strict=True)]
    return MemoryPlan(tuple(places), arena * alignment, least * alignment)


def _enough(least: int, num_values: int, num_streams: int) -> float:
    """The arena for which the search ends. On several streams `least` is no least arena, so that few values go on."""
    if num_values > _FEW:
        return least * 1.01
    return least if num_streams == 1 else 0


def _candidates(graph: TaskGraph, lives: Lifetimes, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Where the values begin, by each method."""
    num_streams = lives.schedule.num_streams
    spans = _spans(graph, lives.schedule)
    short = frozenset(index for index, span in enumerate(spans) if span <= len(graph.tasks) // 10)
    happened = events(lives)
    orders = [happened, backwards(happened)] if num_streams == 1 else [happened]
    for order in orders:
        for high in (frozenset[int](), short):
            yield sweep(order, sizes, num_streams, high)
    if len(sizes) > _FEW:
        return
    indices = range(len(sizes))
    yield by_size(lives, sizes, sorted(indices, key=lambda index: -sizes[index]))
    yield by_size(lives, sizes, sorted(indices, key=lambda index: -sizes[index] * spans[index]))


def _spans(graph: TaskGraph, schedule: Schedule) -> list[int]:
    """By value, how many tasks are issued from its producer to the last of its users, to the end for an output."""
    places = [0] * len(schedule.order)
    for place, task in enumerate(schedule.order):
        places[task] = place
    return [
        (len(places) if value.is_output else 1 + max(places[task] for task in (value.producer, *value.users)))
        - places[value.producer]
        for value in graph.values
    ]
