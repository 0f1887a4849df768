"""Transitive reductions: the fewest waits that enforce all dependencies, and the fewest dependencies."""

from __future__ import annotations

from collections.abc import Sequence

from kitsune.plan import Schedule, Wait
from kitsune.schedule.edges import Edges, dependents

Clock = tuple[int, ...]
"""For each stream, how many of its tasks have finished."""


class Issuing:
    """A schedule in the making: tasks are issued one by one, each with the fewest waits.

    It keeps vector clocks (Fidge, 1988; Mattern, 1989).
    """

    def __init__(self, after: Edges, num_streams: int) -> None:
        self._after = after
        self._order: list[int] = []
        self._waits: list[Wait] = []
        self._streams = [0] * len(after)
        self._positions = [0] * len(after)  # on its stream, counted from 1
        self._known: list[Clock] = [(0,) * num_streams] * num_streams  # when the latest task of a stream has finished
        self._finished: list[Clock] = [()] * len(after)  # when the task has finished

    def waits(self, task: int, stream: int) -> list[int]:
        """The tasks that `task` must wait for if it is issued next, on `stream`; those it depends on must be issued.

        They are as few as can be: of each other stream at most its latest, none that the stream knows of already, and
        none that another of them implies.
        """
        streams, positions, known = self._streams, self._positions, self._known[stream]
        latest: dict[int, int] = {}
        for earlier in self._after[task]:
            other, position = streams[earlier], positions[earlier]
            if position > known[other] and (other not in latest or position > positions[latest[other]]):
                latest[other] = earlier
        waits = list(latest.values())
        if len(waits) < 2:
            return waits
        return [wait for wait in waits if not any(self._implies(other, wait) for other in waits if other != wait)]

    def issue(self, task: int, stream: int) -> None:
        """Puts `task` on `stream`, behind what it must wait for."""
        clock = self._known[stream]
        position = clock[stream] + 1
        for earlier in self.waits(task, stream):
            clock = tuple(map(max, clock, self._finished[earlier]))
            self._waits.append(Wait(task, earlier))
        clock = (*clock[:stream], position, *clock[stream + 1 :])
        self._order.append(task)
        self._streams[task], self._positions[task] = stream, position
        self._known[stream] = self._finished[task] = clock

    def schedule(self, strategy: str) -> Schedule:
        """All that was issued, once that is every task, as made by `strategy`."""
        return Schedule(strategy, tuple(self._order), tuple(self._streams), tuple(sorted(self._waits)))

    def _implies(self, task: int, earlier: int) -> bool:
        return self._finished[task][self._streams[earlier]] >= self._positions[earlier]


def reduce_waits(after: Edges, order: Sequence[int], streams: Sequence[int]) -> tuple[Wait, ...]:
    """The waits that enforce the dependencies `after`, ascending; without any one of them a dependency is lost.

    A dependency between streams becomes a wait unless a path of other dependencies and of the order on the streams
    leads from one task to the other. So these are the waits in the transitive reduction of both together, which is
    unique. Takes O(tasks * streams² + dependencies).

    Args:
        after: by index of the task, the tasks that must have finished before it starts.
        order: the indices of all tasks as they are issued, every one after those it depends on.
        streams: by index of the task, its stream.
    """
    issuing = Issuing(after, max(streams, default=0) + 1)
    for task in order:
        issuing.issue(task, streams[task])
    return issuing.schedule("").waits


def reduce_edges(after: Edges) -> list[list[int]]:
    """The transitive reduction of the dependencies `after`: those that no path of others implies.

    Every task must have a higher index than those it depends on. Ancestors are sets of bits in integers, which takes
    O(tasks * dependencies) in theory; in practice it is linear up to some 100,000 tasks, for only a task with several
    dependents can be the start of a dependency that is implied, so only those have a bit, and a set is dropped once
    nothing reads it any more.
    """
    before = dependents(after)
    bits = [0] * len(after)
    num_bits = 0
    for task, later in enumerate(before):
        if len(later) > 1:
            bits[task] = 1 << num_bits
            num_bits += 1
    ancestors = [0] * len(after)
    result = []
    for task, earlier_tasks in enumerate(after):
        implied = 0
        for earlier in earlier_tasks:
            implied |= ancestors[earlier]
        kept = [earlier for earlier in earlier_tasks if not implied & bits[earlier]]
        for earlier in kept:
            implied |= bits[earlier]
        ancestors[task] = implied if before[task] else 0
        for earlier in earlier_tasks:
            if before[earlier][-1] == task:
                ancestors[earlier] = 0
        result.append(kept)
    return result
