"""What captures cost: the one place where they are timed, and where the time that they may take is bounded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from kitsune.config import Config
from kitsune.errors import Refusal

FIRST_CAPTURES = 4
"""So many wait for nothing but their share, where what they gain is measured: of calls of two shapes, and of their
updates."""

# What a capture is expected to take, before the loop has made one: torch loads and warms up its compiler for the first
# one of a process, and looks at every part of the model (measured on two cores of a server: 0.05 to 0.15 s for each).
_LOADING_SECONDS = 0.8
_SECONDS_PER_PART = 0.08

# Where no share was asked for: a short training waits a little for its first captures, and for later ones by a tenth.
_SHARE = 0.1
_FIRST_SHARE = 5.0  # the first begin after a fifth of what they are expected to take

_SPENT = Refusal("captures have had their share of the time for now: what is not captured runs as plain PyTorch")


class CaptureBudget:
    """Times the captures of one loop, and bounds the time that they take to a share of it, `config.setup_share`.

    Where gains are measured, the first captures wait until they have their share of the time since the loop was made,
    or, where no share was asked for, a fifth of what they are expected to take: a training that ends before has spent
    nothing on them. Elsewhere they are made as soon as they are wanted. After
    each later one nothing is captured until the training has gone on for so long that the capture has taken its share.
    So, beyond the first ones, captures take their share of any stretch of time, and one capture more, at most.

    Args:
        config: with `mode="auto"` the first ones are `FIRST_CAPTURES`; else as many as may be held, twice.

    Attributes:
        seconds: wall time spent on captures, and on what was recorded or planned anew.
        captures: how many there were.
        num_spells: how often any loop of the process has spent time. Whatever runs meanwhile takes longer.
        spent: wall time that all loops of the process have spent.
    """

    num_spells: ClassVar[int] = 0
    spent: ClassVar[float] = 0.0

    def __init__(self, config: Config) -> None:
        self.seconds = 0.0
        self.captures = 0
        asked = config.setup_share
        self._share, self._first_share = (_SHARE, _FIRST_SHARE) if asked is None else (asked, asked)
        self._waits = config.mode == "auto" and asked != 1.0
        self._num_first = FIRST_CAPTURES if config.mode == "auto" else 2 * config.max_graphs
        self._began, self._spent_before = time.perf_counter(), CaptureBudget.spent
        self._longest = 0.0  # of the captures
        self._resumes = -math.inf  # when the next capture may be made
        self._depth = 0

    def put_off_until(self, num_parts: int) -> float | None:
        """When one of the first captures may be made, of a model with so many parts; None for now.

        By `time.perf_counter()`.
        """
        if not self._waits or self.captures >= self._num_first:
            return None
        expected = self._longest
        if not self.captures:
            expected = num_parts * _SECONDS_PER_PART + (0.0 if CaptureBudget.num_spells else _LOADING_SECONDS)
        begins = self._began + (CaptureBudget.spent - self._spent_before + expected) / self._first_share
        return begins if time.perf_counter() < begins else None

    def put_off(self, begins: float) -> Refusal:
        """What the user is told until then."""
        seconds = math.ceil(begins - self._began)
        reason = f"captures begin after {seconds} s of training with this optimizer"
        if self._first_share < 1.0:
            reason += f": so far they would take more than {self._first_share:.0%} of it"
        return Refusal(reason, remedy="setup_share=1.0 lets them begin at once")

    def refuse(self) -> Refusal | None:
        """None if something may be captured now, as far as later captures have to wait."""
        return _SPENT if self.captures >= self._num_first and time.perf_counter() < self._resumes else None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within, something is captured."""
        self.captures += 1
        before = self.seconds
        try:
            with self.spending():
                yield
        finally:
            self._longest = max(self._longest, self.seconds - before)

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
        CaptureBudget.spent += seconds
        self.seconds += seconds
        if self.captures > self._num_first:
            self._resumes = max(self._resumes, time.perf_counter()) + (1.0 / self._share - 1.0) * seconds
