"""How many bytes a schedule may need at once."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from kitsune.plan import Schedule, TaskGraph, Value


def peak_bytes(graph: TaskGraph, schedule: Schedule) -> int:
    """The most bytes of values that may be alive while any one task runs.

    While a task runs, a value may be alive unless its producer and all its users have finished before for sure, or
    its producer starts after for sure; a value that the graph returns never dies. That bounds the need of every
    interleaving that `schedule` allows; with one stream it is that need. Takes O(values * streams² * log tasks).
    """
    columns = _clock_columns(schedule)
    changes = [[0] * (len(column[0]) + 1) for column in columns]
    for value in graph.values:
        last = None if value.is_output else _last_positions(value, schedule)
        born = schedule.clocks[value.producer]
        for stream, column in enumerate(columns):
            changes[stream][born[stream]] += value.num_bytes
            if last is not None:
                dead = max([bisect_left(column[other], position) for other, position in last.items()])
                changes[stream][dead] -= value.num_bytes
    return max((max(accumulate(change[:-1]), default=0) for change in changes), default=0)


def _clock_columns(schedule: Schedule) -> list[list[list[int]]]:
    """By stream, by other stream: how many tasks of the other have finished when each task of the first starts."""
    columns: list[list[list[int]]] = [[[] for _ in range(schedule.num_streams)] for _ in range(schedule.num_streams)]
    for task in schedule.order:
        for column, count in zip(columns[schedule.streams[task]], schedule.clocks[task], strict=True):
            column.append(count)
    return columns


def _last_positions(value: Value, schedule: Schedule) -> dict[int, int]:
    """By stream, the place of the last task that touches `value`."""
    last = {schedule.streams[value.producer]: schedule.positions[value.producer]}
    for task in value.users:
        stream = schedule.streams[task]
        last[stream] = max(last.get(stream, 0), schedule.positions[task])
    return last


class IssuedBytes:
    """The bytes that values hold while tasks run strictly in the order in which they are issued.

    Attributes:
        held: after the latest task.
        peak: the most so far, while a task ran.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.held = 0
        self.peak = 0
        self._values = graph.values
        self._touched: list[list[int]] = [[] for _ in graph.tasks]
        self._allocated = [0] * len(graph.tasks)
        self._left = [1 + len(value.users) + value.is_output for value in graph.values]  # tasks to come
        for value in graph.values:
            self._allocated[value.producer] += value.num_bytes
            for task in (value.producer, *value.users):
                self._touched[task].append(value.index)

    def allocated(self, task: int) -> int:
        """The bytes that `task` allocates."""
        return self._allocated[task]

    def issue(self, task: int) -> None:
        """Runs `task`: what it allocates is added, and what no task to come touches is dropped."""
        self.held += self._allocated[task]
        self.peak = max(self.peak, self.held)
        for index in self._touched[task]:
            self._left[index] -= 1
            if not self._left[index]:
                self.held -= self._values[index].num_bytes
