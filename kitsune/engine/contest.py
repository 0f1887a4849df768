"""Chooses between ways of replaying the same step, by timing them on the user's own steps."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from kitsune.background import is_quiet
from kitsune.errors import RefusedError
from kitsune.execution.in_order import Outputs
from kitsune.timing.stopwatch import Stopwatch

# The first replay of a graph uploads it to the device.
_UNTIMED = 2
_SAMPLES = 7
_TURN = _UNTIMED + _SAMPLES

# The fastest meets the best of the earlier ones again, in turns, so that a device that changes its pace favours none.
# Some replays of these turns run as any other: what passes between two of them is the pace of the loop, unless the
# device takes longer, of which so few do not tell: they wait for it in a queue.
_RUNOFF_TURNS = 4
_PACED = 12
_RUNOFF_TURN = _UNTIMED + _PACED + _SAMPLES

# What gains no more against an earlier entrant is noise, or is lost again where the time of a replay does not show it:
# with several streams a graph takes longer to launch, and the next one begins later (0.8 and 2 us seen on an H200).
_LEAST_GAIN = 0.01
_LEAST_GAIN_US = 1.5

# A plan slows a loop down by no more than its launch takes longer: where that is less than this share of what a replay
# gains, paces are not compared, of which other work on the host makes anything. What a launch takes is the least that
# was seen, for the same reason.
_LONGER_LAUNCH = 0.1

# One pace is slower than another if so many of the pairs say so; of 40 steps each, chance alone says so in one of 100.
_SLOWER = 0.65

_PROBE_EVERY = 5000
_DRIFT = 1.2
_SLOW_PROBES = 2  # in a row: one may have met other work on the device


class Entrant(Protocol):
    """A way of replaying a step."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs: ...

    @property
    def num_recordings(self) -> int:
        """How many it has made; a replay that makes another one tells nothing of the next."""

    def release(self) -> None:
        """Gives its memory back."""


E = TypeVar("E", bound=Entrant)

Maker = Callable[[Sequence[torch.Tensor]], E]


class Contest(Generic[E]):
    """Replays a step by the fastest of several entrants.

    Once opened, each in turn replays some of the user's own steps, and is timed; the best replays all later ones: the
    first one that none of the others is clearly faster than. A replay takes what the device takes for it, or what the
    host takes at least to launch it, if that is more. And where the loop as a whole leaves the device idle, none is
    chosen that slows the loop down: a graph on several streams takes longer to launch, which is lost if nothing waits
    for the device. The best is made anew, alone, so that no memory of the trials is kept; or if that fails, the next
    best. It is timed again now and then: when it has become much slower than it was, or slower than a step is
    without replaying, the trials are repeated, and from then on less often. While something is done in the background,
    nothing is timed, and the winner replays.

    Args:
        first: makes the first entrant, at once.
        inputs: of the present step.
        stopwatch: times replays.
        refused: told why an entrant could not be made.
        clear: frees what released entrants have left.
        limit_us: what a step takes without replaying; infinite where that is not known.

    Raises:
        RefusedError: by the constructor and by calls, if not even the first entrant can be made.

    Attributes:
        winner: what replays at present.
        trying: whether the trials go on.
        settled: how often it has settled on an entrant, or on looking for slowdowns of the only one in vain.
    """

    def __init__(
        self,
        first: Maker[E],
        inputs: Sequence[torch.Tensor],
        stopwatch: Stopwatch,
        refused: Callable[[RefusedError], None],
        clear: Callable[[], None],
        limit_us: Callable[[], float],
    ) -> None:
        self._stopwatch, self._refused, self._clear, self._limit_us = stopwatch, refused, clear, limit_us
        self._makers: tuple[Maker[E], ...] = (first,)
        self.winner = first(inputs)
        self._entrants: dict[int, E] = {0: self.winner}
        self._times_us: list[float | None] = [None]
        self._present = 0
        self._turns: deque[int] = deque()
        self._samples: dict[int, list[float]] = {}
        self._launches: dict[int, list[float]] = {}
        self._paces: dict[int, list[float]] = {}
        self._earlier_us: list[float] = []
        self._latest_start = 0.0
        self._slow_probes = 0
        self._unfit: set[int] = set()
        self._is_runoff = False
        self._replays = 0
        self._probe_every = _PROBE_EVERY
        self._making_seconds = 0.0
        self.trying = False
        self.settled = 0

    @property
    def place(self) -> int:
        """The place of `winner`: 0 is the first entrant."""
        return self._present

    @property
    def changes_next(self) -> bool:
        """Whether the next call may replay by another entrant."""
        return self._replays == self._end

    @property
    def times_us(self) -> tuple[float | None, ...]:
        """For each entrant the median time that a replay takes on the device; None where it was not timed."""
        return tuple(self._times_us)

    def open(self, others: Sequence[Maker[E]], inputs: Sequence[torch.Tensor]) -> None:
        """Begins the trials with the next call, once more where others have been tried; the first entrant begins.

        Args:
            others: each makes an entrant, given the inputs of a step; those to be preferred, if all else is equal,
                come first.
            inputs: of the present step.

        Raises:
            RefusedError: the first entrant cannot be made again.
        """
        self._makers = (self._makers[0], *others)
        if others:
            self._restart(inputs)

    def take_making_seconds(self) -> float:
        """Wall time that calls have spent on making entrants since this was last asked."""
        seconds, self._making_seconds = self._making_seconds, 0.0
        return seconds

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Replays a step. The outputs are the winner's: valid until the next call."""
        end = self._end
        if (self.trying or self._replays >= end - _SAMPLES) and not is_quiet():
            return self.winner(inputs)
        if self._replays == end:
            if self.trying:
                self._end_turn(inputs)
            else:
                self._examine(inputs)
        self._replays += 1
        if self._replays > self._end - _SAMPLES:
            return self._stopwatch.time(partial(self._launch, inputs))
        return self._warm_up(inputs) if self.trying else self.winner(inputs)

    def release(self) -> None:
        """Gives the memory of all entrants back."""
        self._keep()

    @property
    def _end(self) -> int:
        """How many replays this turn has, or lie between two looks at the winner."""
        if not self.trying:
            return self._probe_every
        return _RUNOFF_TURN if self._is_runoff else _TURN

    def _warm_up(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        """A replay of a turn that is not timed; the turn begins when all recordings are made."""
        if self._is_runoff:
            self._take_pace()
        before = self.winner.num_recordings
        outputs = self.winner(inputs)
        if self.winner.num_recordings != before:
            self._replays = 0
        return outputs

    def _take_pace(self) -> None:
        now = time.perf_counter()
        if self._replays > _UNTIMED + 1:
            self._paces.setdefault(self._present, []).append((now - self._latest_start) * 1e6)
        self._latest_start = now

    def _launch(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        started = time.perf_counter()
        outputs = self.winner(inputs)
        self._launches.setdefault(self._present, []).append((time.perf_counter() - started) * 1e6)
        return outputs

    def _begin(self) -> None:
        """Each entrant gets a turn, the first one first, which is present."""
        self.trying = True
        self._samples, self._launches, self._paces = {}, {}, {}
        self._earlier_us = [math.inf] * len(self._makers)
        self._turns = deque(place for place in range(1, len(self._makers)) if place not in self._unfit)
        self._replays = 0
        self._stopwatch.read()

    def _end_turn(self, inputs: Sequence[torch.Tensor]) -> None:
        self._samples.setdefault(self._present, []).extend(self._stopwatch.read())
        self._replays = 0
        leader, rival = self._finalists()
        if not self._is_runoff:
            self._keep(leader, rival)
        if self._next(inputs):
            return
        best = self._best()
        if best and not self._is_runoff:
            self._is_runoff = True
            self._times_us = self._medians(self._samples)
            times_us = self._replay_times()
            self._earlier_us = [
                math.inf if self._launches_longer(place, 0, times_us) else time_us
                for place, time_us in enumerate(times_us)
            ]
            self._samples, self._launches, self._paces = {}, {}, {}
            self._turns = deque([leader, rival] * _RUNOFF_TURNS)
            if self._next(inputs):
                return
        self._settle(best, inputs)

    def _next(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Gives the next entrant that can be made its turn, if there is one."""
        while self._turns:
            place = self._turns.popleft()
            try:
                self._make(place, inputs)
            except RefusedError as error:
                self._refused(error)
                continue
            self._put(place)
            return True
        return False

    def _settle(self, best: int, inputs: Sequence[torch.Tensor]) -> None:
        self.trying = self._is_runoff = False
        self.settled += 1
        latest = zip(self._medians(self._samples), self._times_us, strict=True)
        self._times_us = [earlier if median is None else median for median, earlier in latest]
        replays_us = self._ranking(best)
        while (error := self._refuse_alone(best, inputs)) is not None:
            if best == 0:  # it could be made before, so it may be again
                raise RefusedError(error.refusal, passing=True) from error
            self._refused(error)
            self._unfit.add(best)
            replays_us[best] = math.inf
            best = _first_of_the_fastest(replays_us)
        self._put(best)

    def _ranking(self, best: int) -> list[float]:
        """What a replay takes by each entrant's latest turns; infinite for those that slow the loop down, or may."""
        latest_us = self._replay_times()
        fastest = _first_of_the_fastest(latest_us)
        ranked_us = [
            earlier if math.isinf(latest) else latest
            for latest, earlier in zip(latest_us, self._earlier_us, strict=True)
        ]
        if fastest != best:
            ranked_us[fastest] = math.inf
        return ranked_us

    def _refuse_alone(self, place: int, inputs: Sequence[torch.Tensor]) -> RefusedError | None:
        """Makes an entrant when there is no other; returns why it cannot be made."""
        self._keep()
        self._clear()
        try:
            self._make(place, inputs)
        except RefusedError as error:
            return error
        return None

    def _put(self, place: int) -> None:
        self._present, self.winner = place, self._entrants[place]

    def _make(self, place: int, inputs: Sequence[torch.Tensor]) -> None:
        if place in self._entrants:
            return
        started = time.perf_counter()
        self._entrants[place] = self._makers[place](inputs)
        self._making_seconds += time.perf_counter() - started

    def _medians(self, samples: Mapping[int, Sequence[float]]) -> list[float | None]:
        return [statistics.median(samples[place]) if place in samples else None for place in range(len(self._makers))]

    def _best(self) -> int:
        """The place of the best of those that were timed; 0 if none was."""
        times_us = self._replay_times()
        best = _first_of_the_fastest(times_us)
        rival = min(self._paces, default=best)
        return rival if best != rival and self._slows_the_loop(best, rival, times_us) else best

    def _slows_the_loop(self, place: int, rival: int, times_us: Sequence[float]) -> bool:
        """Whether steps follow each other more slowly than with the rival, which takes longer for a replay."""
        if not self._launches_longer(place, rival, times_us):
            return False
        ours, theirs = ([max(pace_us, times_us[one]) for pace_us in self._paces[one]] for one in (place, rival))
        slower = sum(our_us > their_us for our_us in ours for their_us in theirs)
        return slower > _SLOWER * len(ours) * len(theirs)

    def _launches_longer(self, place: int, rival: int, times_us: Sequence[float]) -> bool:
        """Whether a launch takes so much longer than the rival's that it may matter to the loop."""
        if place not in self._launches or rival not in self._launches:
            return False
        longer_us = min(self._launches[place]) - min(self._launches[rival])
        return longer_us > _LONGER_LAUNCH * (times_us[rival] - times_us[place])

    def _finalists(self) -> tuple[int, int]:
        """The place of the fastest, and that of the best; if they are the same, of the best of those before it."""
        times_us = self._replay_times()
        leader, best = times_us.index(min(times_us)), _first_of_the_fastest(times_us)
        return leader, best if best != leader or not leader else _first_of_the_fastest(times_us[:leader])

    def _replay_times(self) -> list[float]:
        """For each entrant what a replay takes, as far as it was timed."""
        return [
            math.inf if device_us is None else max(device_us, min(self._launches[place]))
            for place, device_us in enumerate(self._medians(self._samples))
        ]

    def _keep(self, *places: int) -> None:
        """Releases all entrants but those in `places`."""
        for place in [place for place in self._entrants if place not in places]:
            self._entrants.pop(place).release()

    def _examine(self, inputs: Sequence[torch.Tensor]) -> None:
        """Tries all again if the winner has become slower than it was."""
        self._replays = 0
        self._launches.clear()
        times_us = self._stopwatch.read()
        time_us = statistics.median(times_us)
        expected_us = self._times_us[self._present]
        if expected_us is None:  # the only one, for the first time
            self._times_us[self._present] = time_us
        if expected_us is None or min(times_us) <= min(_DRIFT * expected_us, max(expected_us, self._limit_us())):
            self._slow_probes = 0
            return
        self._slow_probes += 1
        if self._slow_probes < _SLOW_PROBES:
            return
        self._slow_probes = 0
        self._probe_every *= 2
        if len(self._makers) == 1:
            self._times_us = [time_us]
            self.settled += 1
            return
        try:
            self._restart(inputs)
        except RefusedError as error:  # there is no room for trials at present
            self._refused(error)

    def _restart(self, inputs: Sequence[torch.Tensor]) -> None:
        """Begins trials of all entrants, whichever replays at present."""
        self._make(0, inputs)
        self._keep(0)
        self._put(0)
        self._times_us = [None] * len(self._makers)
        self._begin()


def _first_of_the_fastest(times_us: Sequence[float]) -> int:
    """The first place that none undercuts clearly."""
    fastest_us = min(times_us)
    limit_us = max(fastest_us / (1 - _LEAST_GAIN), fastest_us + _LEAST_GAIN_US)
    return next(place for place, time_us in enumerate(times_us) if time_us <= limit_us)
