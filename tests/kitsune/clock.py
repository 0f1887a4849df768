"""The time that the choice between eager steps and replays goes by, as tests set it."""

from __future__ import annotations


class Clock:
    """Stands in for the module `time`. Every synchronization takes `cost` seconds.

    Attributes:
        switches: how often the thread has lost its processor.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.cost = 0.0
        self.waits = 0
        self.switches = 0

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self, *_: object) -> None:
        self.waits += 1
        self.now += self.cost
