"""What captures cost: the one place where they are timed, and where the time that they may take is bounded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from kitsune.config import Config
from kitsune.errors import Refusal

TRAINED_PER_CAPTURE = 9.0
"""The training goes on for so many times as long as a capture has taken before the next one."""

FREE_CAPTURES = 4
"""So many are made without waiting, where what they gain is measured: of calls of two shapes, and of their updates."""

_SPENT = Refusal("captures have had their tenth of the time for now: what is not captured runs as plain PyTorch")


class CaptureBudget:
    """Times the captures of one loop, and bounds the time that they take.

    The first captures are made as soon as they are wanted. After each later one nothing is captured until the training
    has gone on for `TRAINED_PER_CAPTURE` times as long as that took. So, beyond the first ones, captures take a tenth
    of any stretch of time, and one capture more, at most.

    Args:
        config: with `mode="auto"` the first ones are `FREE_CAPTURES`; else as many as may be held, twice.

    Attributes:
        seconds: wall time spent on captures, and on what was recorded or planned anew.
        captures: how many there were.
        num_spells: how often any loop of the process has spent time. Whatever runs meanwhile takes longer.
    """

    num_spells: ClassVar[int] = 0

    def __init__(self, config: Config) -> None:
        self.seconds = 0.0
        self.captures = 0
        self._free = FREE_CAPTURES if config.mode == "auto" else 2 * config.max_graphs
        self._resumes = -math.inf  # when the next capture may be made
        self._depth = 0

    def refuse(self) -> Refusal | None:
        """None if something may be captured now."""
        return _SPENT if self.captures >= self._free and time.perf_counter() < self._resumes else None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within, something is captured."""
        self.captures += 1
        with self.spending():
            yield

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Within, time is spent. What is spent within that counts once."""
        started = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.charge(time.perf_counter() - started)

    def charge(self, seconds: float) -> None:
        """Counts time that has just been spent, if any was, outside of what counts as a whole."""
        if not seconds or self._depth:
            return
        CaptureBudget.num_spells += 1
        self.seconds += seconds
        if self.captures > self._free:
            self._resumes = max(self._resumes, time.perf_counter()) + TRAINED_PER_CAPTURE * seconds
