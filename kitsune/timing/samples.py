"""Times of the same work, and whether something else disturbed them."""

from __future__ import annotations

import statistics
import sys

if sys.platform == "linux":
    import resource

_SCATTER = 1.25
"""Half of the samples took so much longer than the shortest: it was not the work alone that took time."""

_SWITCHES_PER_SECOND = 20.0
"""So often nothing else takes the processor away, unless there are not enough processors for all who want one."""

_FEWEST_SWITCHES = 2


def involuntary_switches() -> int:
    """How often this thread was made to leave its processor to others so far; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Samples:
    """Times that the same work has taken, in seconds."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._num_switches = 0

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, num_switches: int = 0) -> None:
        """Adds one, and how often the thread lost its processor meanwhile."""
        self._seconds.append(seconds)
        self._num_switches += num_switches

    def median(self) -> float:
        return statistics.median(self._seconds)

    def were_disturbed(self) -> bool:
        """Whether they tell of something else than the work."""
        if not self._seconds:
            return False
        often = self._num_switches > _SWITCHES_PER_SECOND * sum(self._seconds)
        return (often and self._num_switches >= _FEWEST_SWITCHES) or self.median() > _SCATTER * min(self._seconds)
