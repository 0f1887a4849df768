"""Placing values one after the other, in an order of time, each into a hole that is free then."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from kitsune.memory.extents import Extents
from kitsune.memory.lifetimes import Lifetimes

_ENDLESS = 1 << 50  # more than any memory has bytes

Event = tuple[int, int, bool]
"""A stream, a value, and what happens: True: the value is placed for a task of that stream; False: the stream learns
of its death."""


def events(lives: Lifetimes) -> list[Event]:
    """What happens to values, in the order in which tasks are issued: for each, first what is dead when it starts."""
    happened: list[Event] = []
    for task in lives.schedule.order:
        stream = lives.schedule.streams[task]
        happened += [(stream, value, False) for value in lives.dead[task]]
        happened += [(stream, value, True) for value in lives.born[task]]
    return happened


def backwards(happened: Sequence[Event]) -> list[Event]:
    """The events of one stream with time reversed, where deaths are births: as good an order to place values in."""
    dead = {value for _, value, is_birth in happened if not is_birth}
    undying = [(stream, value, False) for stream, value, is_birth in happened if is_birth and value not in dead]
    return [(stream, value, not is_birth) for stream, value, is_birth in reversed([*happened, *undying])]


def sweep(happened: Sequence[Event], sizes: Sequence[int], num_streams: int, high: frozenset[int]) -> list[int]:
    """By index of the value, where it begins: in the smallest hole that is large enough, of these the lowest.

    A stream may place a value only where, as far as it knows, everything is dead that was placed there before; so
    each stream has its own view of the holes. Whoever is placed over an older value is ordered after its death: a
    stream that knows the newer one as dead knows the same of the older one. So only the latest value of each byte
    matters, whose death makes a hole.

    Args:
        sizes: by index of the value; values of size 0 are placed at 0.
        high: the values that are placed at the upper end of their hole instead of the lower one.
    """
    offsets = [0] * len(sizes)
    latest = Extents()
    views = [_Holes() for _ in range(num_streams)]
    for view, value, is_birth in happened:
        size = sizes[value]
        if size == 0:
            continue
        if is_birth:
            begin = offsets[value] = views[view].find(size, value in high)
            latest.claim(begin, begin + size, value)
            for holes in views:
                holes.remove(begin, begin + size)
            continue
        begin = offsets[value]
        for first, end, owner in latest.overlapping(begin, begin + size):
            if owner == value:
                views[view].add(first, end)
    return offsets


class _Holes:
    """Free ranges of an endless memory, none of which touch each other."""

    def __init__(self) -> None:
        self._begins = [0]
        self._ends = [_ENDLESS]
        self._by_size = [_key(0, _ENDLESS)]

    def find(self, size: int, is_high: bool) -> int:
        """Where to place `size` bytes: in the smallest hole that has them, at its upper end if `is_high`."""
        hole_size, begin = divmod(self._by_size[bisect_left(self._by_size, _key(0, size))], _ENDLESS)
        is_last = begin + hole_size == _ENDLESS
        return begin + hole_size - size if is_high and not is_last else begin

    def add(self, begin: int, end: int) -> None:
        """Makes the range, nothing of which is free, a hole, and one with those that it touches."""
        first = last = bisect_left(self._begins, begin)
        if first > 0 and self._ends[first - 1] == begin:
            first -= 1
            begin = self._begins[first]
        if last < len(self._begins) and self._begins[last] == end:
            end = self._ends[last]
            last += 1
        self._forget(first, last)
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        insort(self._by_size, _key(begin, end))

    def remove(self, begin: int, end: int) -> None:
        """Takes the range, as far as it is free, out of the holes."""
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._begins, end)
        if first >= last:
            return
        self._forget(first, last)
        rest = [(self._begins[first], begin), (end, self._ends[last - 1])]
        rest = [hole for hole in rest if hole[0] < hole[1]]
        self._begins[first:last] = [hole[0] for hole in rest]
        self._ends[first:last] = [hole[1] for hole in rest]
        for hole in rest:
            insort(self._by_size, _key(*hole))

    def _forget(self, first: int, last: int) -> None:
        for place in range(first, last):
            del self._by_size[bisect_left(self._by_size, _key(self._begins[place], self._ends[place]))]


def _key(begin: int, end: int) -> int:
    """Orders holes by size, then by place; one number, because comparing tuples takes most of a sweep's time."""
    return (end - begin) * _ENDLESS + begin
