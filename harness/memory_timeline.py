"""How much of a GPU's memory is in use over one step, by what torch's allocator did in it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST_POINTS = 160
"""A timeline of more points is thinned out, so that results stay small: highest and last points of short stretches
stay."""

ON_THE_CPU = "measured on the CPU, where torch's allocator does not count"
NOT_RECORDED = "measured by a version of the harness that did not record it"

_ALLOCATED = {"alloc": 1, "free_requested": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_BLOCK_BYTES = 512
"""The allocator hands out multiples of this; an event has the bytes that were asked for."""
_DECIMALS = 1

Point = tuple[float, int, int]
"""Microseconds since the step began, and the bytes allocated and reserved from then on."""


@dataclass(frozen=True)
class MemoryTimeline:
    """One step in the steady state. Times are the host's, at which it asked for memory and gave it back."""

    step_us: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class RecordedStep:
    """What the allocator did in a step, event by event as torch tells it, and how things stood before.

    Times are microseconds since the epoch. ``allocated_bytes`` counts the memory at the addresses of ``graph_ranges``
    (begin and end) as a whole.
    """

    events: Sequence[Mapping[str, object]]
    begin_us: float
    end_us: float
    allocated_bytes: int
    reserved_bytes: int
    graph_ranges: Sequence[tuple[int, int]] = ()


def memory_timeline(step: RecordedStep) -> MemoryTimeline:
    """The bytes in use after each event; of those at the same time, after the last.

    Memory counts as given back when that is asked for, as in torch's statistics, not when the device is done with it.
    What is taken of and given back to a captured graph's pool, as its results are, counts in the pool already.
    """
    allocated, reserved = step.allocated_bytes, step.reserved_bytes
    points: list[Point] = [(0.0, allocated, reserved)]
    for event in step.events:
        action = str(event.get("action"))
        size, time = event.get("size"), event.get("time_us")
        if not isinstance(size, int) or not isinstance(time, (int, float)):
            continue
        if action in _ALLOCATED and _is_within(event.get("addr"), step.graph_ranges):
            continue
        if action in _ALLOCATED:
            allocated += _ALLOCATED[action] * -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        elif action in _RESERVED:
            reserved += _RESERVED[action] * size
        else:
            continue
        since = round(max(points[-1][0], time - step.begin_us), _DECIMALS)
        if points[-1][0] == since:
            points.pop()
        points.append((since, max(0, allocated), max(0, reserved)))
    step_us = round(max(step.end_us - step.begin_us, points[-1][0]), _DECIMALS)
    return MemoryTimeline(step_us, tuple(_thinned(points, step_us)))


def graph_split_bytes(segments: Iterable[Mapping[str, object]]) -> int:
    """Bytes in pieces that nothing uses at the moment, of blocks in the pools of captured graphs.

    The allocator counts them as inactive splits, but every replay writes there.

    Args:
        segments: as ``torch.cuda.memory_snapshot`` tells them.
    """
    total = 0
    for segment in segments:
        blocks = segment.get("blocks")
        if not _is_of_graph(segment) or not isinstance(blocks, list):
            continue
        idle = [block["size"] for block in blocks if block["state"] == "inactive"]
        total += sum(size for size in idle if size < _whole(segment, "total_size"))
    return total


def idle_graph_bytes(segments: Iterable[Mapping[str, object]]) -> int:
    """Bytes in the pools of captured graphs that hold no tensor at the moment, of such segments."""
    private = [segment for segment in segments if _is_of_graph(segment)]
    return sum(_whole(segment, "total_size") - _whole(segment, "allocated_size") for segment in private)


def graph_ranges(segments: Iterable[Mapping[str, object]]) -> tuple[tuple[int, int], ...]:
    """The addresses of the pools of captured graphs, beginning and end, of such segments."""
    private = [segment for segment in segments if _is_of_graph(segment)]
    return tuple(
        (_whole(segment, "address"), _whole(segment, "address") + _whole(segment, "total_size")) for segment in private
    )


def _is_within(address: object, ranges: Iterable[tuple[int, int]]) -> bool:
    return isinstance(address, int) and any(begin <= address < end for begin, end in ranges)


def _is_of_graph(segment: Mapping[str, object]) -> bool:
    pool = segment["segment_pool_id"]
    assert isinstance(pool, (tuple, list))
    return tuple(pool) != (0, 0)


def _whole(segment: Mapping[str, object], name: str) -> int:
    value = segment[name]
    assert isinstance(value, int)
    return value


def _thinned(points: Sequence[Point], step_us: float) -> list[Point]:
    """Of each of equal stretches of the step the highest and the last point, where there are too many."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stretches: dict[int, list[Point]] = {}
    for point in points[1:]:
        number = min(int(point[0] / step_us * (MOST_POINTS // 2 - 1)), MOST_POINTS // 2 - 2) if step_us else 0
        stretches.setdefault(number, []).append(point)
    kept = [points[0]]
    for members in stretches.values():
        highest = max(members, key=lambda point: point[1:])
        kept += [highest] if highest is members[-1] else [highest, members[-1]]
    return kept
