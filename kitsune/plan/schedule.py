"""When and where tasks run: an order in which they are issued, their streams, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, order=True)
class Wait:
    """`later` starts after `earlier`, a task of another stream, has finished. Indices of tasks."""

    later: int
    earlier: int


@dataclass(frozen=True)
class Schedule:
    """Tasks on streams. A task starts after the one before it on its stream, and after what it waits for.

    Attributes:
        strategy: what made it, for example `"in order"`, `"chains"`, `"list"`.
        order: the indices of all tasks in the order in which the host issues them.
        streams: by index of the task, its stream: a number from 0 up, without gaps.
        waits: ascending, and none of them implied by the others and the order on the streams.
    """

    strategy: str
    order: tuple[int, ...]
    streams: tuple[int, ...]
    waits: tuple[Wait, ...] = ()

    @property
    def num_streams(self) -> int:
        return max(self.streams, default=0) + 1

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """By index of the task, its place on its stream, counted from 1."""
        counts = [0] * self.num_streams
        positions = [0] * len(self.order)
        for task in self.order:
            stream = self.streams[task]
            counts[stream] += 1
            positions[task] = counts[stream]
        return tuple(positions)

    @cached_property
    def clocks(self) -> tuple[tuple[int, ...], ...]:
        """By index of the task, for each stream how many of its tasks have finished for sure when the task starts."""
        awaited: dict[int, list[int]] = {}
        for wait in self.waits:
            awaited.setdefault(wait.later, []).append(wait.earlier)
        finished = [(0,) * self.num_streams] * self.num_streams  # when the stream's latest task has finished
        after: list[tuple[int, ...]] = [()] * len(self.order)
        starts: list[tuple[int, ...]] = [()] * len(self.order)
        for task in self.order:
            stream = self.streams[task]
            clock = finished[stream]
            for earlier in awaited.get(task, ()):
                clock = tuple(map(max, clock, after[earlier]))
            starts[task] = clock
            clock = (*clock[:stream], self.positions[task], *clock[stream + 1 :])
            after[task] = finished[stream] = clock
        return tuple(starts)

    def happens_before(self, first: int, second: int) -> bool:
        """Whether task `first` has finished for sure when task `second` starts."""
        return self.clocks[second][self.streams[first]] >= self.positions[first]
