"""Chooses between ways of replaying the same step, by timing them on the user's own steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from kitsune.errors import RefusedError
from kitsune.execution.in_order import Outputs
from kitsune.timing.stopwatch import Stopwatch

# The first replay of a graph uploads it to the device.
_UNTIMED = 2
_SAMPLES = 7

# What is no faster than this against the first entrant, which is the simplest, is noise.
_MARGIN = 0.99

_PROBE_EVERY = 1000
_DRIFT = 1.2


class Entrant(Protocol):
    """A way of replaying a step."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs: ...

    def release(self) -> None:
        """Gives its memory back."""


E = TypeVar("E", bound=Entrant)

Maker = Callable[[Sequence[torch.Tensor]], E]


class Contest(Generic[E]):
    """Replays a step by the fastest of several entrants.

    Once opened, each in turn replays some of the user's own steps and is timed; from then on the
    fastest replays all, and the others are released. It is timed again now and then: when it has
    become much slower than it was, the trials are repeated.

    Args:
        first: an entrant that is ready; it stays where no other is clearly faster.
        stopwatch: times the replays.
        refused: told why an entrant could not be made.
    """

    def __init__(
        self,
        first: E,
        stopwatch: Stopwatch,
        refused: Callable[[RefusedError], None],
    ) -> None:
        self._stopwatch, self._refused = stopwatch, refused
        self._others: tuple[Maker[E], ...] = ()
        self._entrants: list[E | None] = [first]
        self._times_us: list[float | None] = [None]
        self._present = 0
        self._replays = 0
        self.trying = False

    @property
    def winner(self) -> E:
        """What replays at present."""
        entrant = self._entrants[self._present]
        assert entrant is not None
        return entrant

    @property
    def place(self) -> int:
        """The place of `winner`: 0 is the first entrant."""
        return self._present

    @property
    def times_us(self) -> tuple[float | None, ...]:
        """For each entrant the median time of a replay; None where it was not timed."""
        return tuple(self._times_us)

    def open(self, others: Sequence[Maker[E]]) -> None:
        """Begins the trials; until then the first entrant replays.

        Args:
            others: each makes an entrant, given the inputs of a step.
        """
        self._others = tuple(others)
        self._entrants = [self._entrants[0], *(None for _ in others)]
        self._begin()

    def _begin(self) -> None:
        self.trying = bool(self._others)
        self._replays = 0
        self._times_us = [None] * len(self._entrants)
        self._stopwatch.read()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Replays a step. The outputs are the winner's: valid until the next call."""
        if self.trying and self._replays == _UNTIMED + _SAMPLES:
            self._advance(inputs)
        elif not self.trying and self._replays == _PROBE_EVERY:
            self._examine()
        self._replays += 1
        if not self._others or not _UNTIMED < self._replays <= _UNTIMED + _SAMPLES:
            return self.winner(inputs)
        self._stopwatch.start()
        outputs = self.winner(inputs)
        self._stopwatch.stop()
        return outputs

    def release(self) -> None:
        """Gives the memory of all entrants back."""
        for entrant in self._entrants:
            if entrant is not None:
                entrant.release()

    def _advance(self, inputs: Sequence[torch.Tensor]) -> None:
        """Ends the trial of the present entrant, and begins that of the next, or settles."""
        self._times_us[self._present] = statistics.median(self._stopwatch.read())
        self._replays = 0
        best = self._best()
        self._keep(best)
        for place in range(self._present + 1, len(self._entrants)):
            try:
                self._entrants[place] = self._others[place - 1](inputs)
            except RefusedError as error:
                self._refused(error)
                continue
            self._present = place
            return
        self.trying = False
        self._present = best

    def _best(self) -> int:
        """The place of the fastest so far."""
        times = [math.inf if time is None else time for time in self._times_us]
        times[0] *= _MARGIN
        return times.index(min(times))

    def _keep(self, best: int) -> None:
        """Releases all entrants but the best and the first."""
        for place, entrant in enumerate(self._entrants):
            if entrant is not None and 0 != place != best:
                entrant.release()
                self._entrants[place] = None

    def _examine(self) -> None:
        """Tries all again if the winner has become slower than it was."""
        self._replays = 0
        spans = self._stopwatch.read()
        expected = self._times_us[self._present]
        if expected is None or not spans or statistics.median(spans) <= _DRIFT * expected:
            return
        self._keep(0)
        self._present = 0
        self._begin()
