"""Who had each byte of a memory last."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

NOBODY = -1


class Extent(NamedTuple):
    """The bytes from `begin` up to `end`, and who had them last: the index of a value."""

    begin: int
    end: int
    owner: int


class Extents:
    """An endless memory, divided among its latest owners.

    An operation takes a time that grows with the extents in its range. `claim` adds two at the most and removes the
    others in its range, so that over many claims there are few of them on average.
    """

    def __init__(self) -> None:
        self._begins = [0]
        self._owners = [NOBODY]

    def overlapping(self, begin: int, end: int) -> list[Extent]:
        """What lies between `begin` and `end` and had an owner, ascending, cut to that range."""
        first = bisect_right(self._begins, begin) - 1
        last = bisect_left(self._begins, end)
        if last == first + 1:  # by far the most frequent case
            return [] if self._owners[first] == NOBODY else [Extent(begin, end, self._owners[first])]
        edges = [begin, *self._begins[first + 1 : last], end]
        owners = self._owners[first:last]
        return [Extent(*extent) for extent in zip(edges, edges[1:], owners, strict=False) if extent[2] != NOBODY]

    def claim(self, begin: int, end: int, owner: int) -> None:
        """Gives the bytes from `begin` up to `end` to `owner`; the range must not be empty."""
        first = bisect_left(self._begins, begin)
        last = bisect_right(self._begins, end)
        after = self._owners[last - 1]
        self._begins[first:last] = [begin, end]
        self._owners[first:last] = [owner, after]
