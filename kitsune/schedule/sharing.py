"""A device whose running tasks slow each other down."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from kitsune.plan import Cost


class SharedDevice:
    """Tasks that run at once, all at the same rate: 1, or 1 / s where their shares add up to s > 1.

    The ends are kept in a time of the tasks' own, which runs at that rate, so that an event costs O(log running).

    Attributes:
        now_us: up to when the device has run.
        load: the sum of the shares of the running tasks.
    """

    def __init__(self) -> None:
        self.now_us = 0.0
        self.load = 0.0
        self._own_us = 0.0
        self._running: list[tuple[float, int, float]] = []  # heap of: end in own time, task, share

    def start(self, task: int, cost: Cost) -> None:
        """Lets `task` run from now on."""
        heappush(self._running, (self._own_us + cost.us, task, cost.share))
        self.load += cost.share

    def next_end_us(self) -> float:
        """When the next task ends unless another one starts before; infinite if none runs."""
        return self._end_us(self._running[0][0]) if self._running else inf

    def end_us(self, task: int) -> float:
        """When `task`, which is running, ends if nothing starts or ends before."""
        return next(self._end_us(end) for end, running, _ in self._running if running == task)

    def run_until(self, time_us: float) -> None:
        """Runs to `time_us`, which is not after the next end."""
        self._own_us += (time_us - self.now_us) / max(1.0, self.load)
        self.now_us = time_us

    def end_next(self) -> int:
        """Runs until the next task ends, of several the one of the lowest index, and returns its index."""
        self.now_us = self.next_end_us()
        self._own_us, task, share = heappop(self._running)
        self.load = self.load - share if self._running else 0.0
        return task

    def _end_us(self, own_us: float) -> float:
        return self.now_us + (own_us - self._own_us) * max(1.0, self.load)
