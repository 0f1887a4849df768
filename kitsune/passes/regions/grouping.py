"""Which operations become one region."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Item:
    """An operation, as far as grouping is concerned.

    Attributes:
        fusible: whether it may be in a region.
        after: positions of earlier items that it must follow, for whatever reason.
        producers: of these, the ones whose values it reads.
        num_elements: over how many elements it iterates: those of its largest argument or result.
        reads: what identifies the values with that many elements that it reads.
    """

    fusible: bool
    after: tuple[int, ...]
    producers: tuple[int, ...]
    num_elements: int
    reads: tuple[object, ...]


def grouped(items: Sequence[Item]) -> list[tuple[int, ...]]:
    """Disjoint groups of fusible items, each ascending, those of one item included; in the order of their first items.

    Two groups become one

    - if one reads a value of the other, or if an item of each reads the same value and iterates over as many elements
      as that has. Otherwise one kernel could do nothing for both but hide a launch.
    - if no item outside lies between them: all items can still run, the group as one.
    - if no item outside then waits for longer. A group runs when all that its items must follow is done; so each of
      its items that one outside must follow has to be one that waits for as long anyway. How long an item waits is
      the number of items that are not fusible on the longest way to it: library calls are what takes time. Values
      that only the caller gets may wait.

    Which groups are tried first follows from the order of the items: reading before sharing, until nothing changes.
    """
    groups = _Groups(items)
    pairs = [*_reading(items), *_sharing(items)]
    while sum(groups.join(first, second) for first, second in pairs):
        continue
    return groups.listed()


def _reading(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    for place, item in enumerate(items):
        for producer in sorted(item.producers, reverse=True):
            if item.fusible and items[producer].fusible:
                yield producer, place


def _sharing(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    readers: dict[tuple[object, int], list[int]] = {}
    for place, item in enumerate(items):
        for value in item.reads if item.fusible else ():
            readers.setdefault((value, item.num_elements), []).append(place)
    for places in readers.values():
        yield from combinations(places, 2)


class _Groups:
    """Groups of items that grow, and what is before them. Sets of items are the bits of numbers."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._waits = _waits(items)
        self._group = list(range(len(items)))
        self._members = [1 << place for place in range(len(items))]
        self._before = _closure([item.after for item in items])
        self._followers = [0] * len(items)
        for place, item in enumerate(items):
            for earlier in item.after:
                self._followers[earlier] |= 1 << place

    def join(self, first: int, second: int) -> bool:
        """Makes one group of those of two items; whether they were two, and might become one."""
        one, two = sorted((self._group[first], self._group[second]))
        members = self._members[one] | self._members[two]
        if one == two or not self._is_convex(members) or not self._is_in_time(members):
            return False
        before = (self._before[one] | self._before[two]) & ~members
        self._members[one], self._before[one] = members, before
        self._members[two] = self._before[two] = 0
        for place in _bits(members):
            self._group[place] = one
        for group, others in enumerate(self._before):
            if others & members:
                self._before[group] |= members | before
        return True

    def listed(self) -> list[tuple[int, ...]]:
        found = [members for members, item in zip(self._members, self._items, strict=True) if members and item.fusible]
        return [tuple(_bits(members)) for members in found]

    def _is_convex(self, members: int) -> bool:
        """Whether nothing else that follows one of them is before another one."""
        before = following = 0
        for place in _bits(members):
            before |= self._before[self._group[place]]
            following |= self._followers[place]
        return not before & following & ~members

    def _is_in_time(self, members: int) -> bool:
        latest = max(self._waits[place] for place in _bits(members))
        return all(self._waits[place] == latest for place in _bits(members) if self._followers[place] & ~members)


def _waits(items: Sequence[Item]) -> list[int]:
    """For each item, how many items that are not fusible lie on the longest way to its end."""
    waits: list[int] = []
    for item in items:
        waits.append(max((waits[earlier] for earlier in item.after), default=0) + (not item.fusible))
    return waits


def _closure(after: Iterable[Sequence[int]]) -> list[int]:
    closure: list[int] = []
    for places in after:
        bits = 0
        for earlier in places:
            bits |= closure[earlier] | 1 << earlier
        closure.append(bits)
    return closure


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
