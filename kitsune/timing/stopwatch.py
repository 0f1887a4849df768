"""Times a loop in passing, without making the host wait for the device."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from kitsune.timing.busy import keep_busy


class Stopwatch(Protocol):
    """Times the rounds of a loop that runs on, by its slower part: the host or the device."""

    def get_ahead(self, us: float) -> None:
        """Gives the host so many microseconds of its time to get ahead of the device, where the two are not one."""

    def lap(self, *, follows: bool) -> None:
        """A round begins here.

        Args:
            follows: whether the latest round ends here. Else the loop has done other things since, and that round
                ends where it was left.
        """

    def leave(self) -> None:
        """What is to be timed of a round is done, if the loop does other things now."""

    def read(self) -> list[float]:
        """Microseconds of all rounds since the last reading, on a GPU by its own clock; waits for the last one."""


def stopwatch(device: torch.device) -> Stopwatch:
    """One for `device`."""
    return _Events(device) if device.type == "cuda" else _Clock()


M = TypeVar("M")


class _Rounds(ABC, Generic[M]):
    """Marks of the beginnings and the ends of rounds."""

    def __init__(self) -> None:
        self._marks: list[tuple[M, M]] = []
        self._began: M | None = None

    @abstractmethod
    def get_ahead(self, us: float) -> None: ...

    def lap(self, *, follows: bool) -> None:
        mark = self._now()
        if follows and self._marks:
            self._marks[-1] = (self._marks[-1][0], mark)
        self._began = mark

    def leave(self) -> None:
        assert self._began is not None
        self._marks.append((self._began, self._now()))

    def read(self) -> list[float]:
        marks, self._marks = self._marks, []
        return self._spans_us(marks)

    @abstractmethod
    def _now(self) -> M: ...

    @abstractmethod
    def _spans_us(self, marks: Sequence[tuple[M, M]]) -> list[float]: ...


class _Clock(_Rounds[float]):
    def get_ahead(self, us: float) -> None:
        """The host is the device."""

    def _now(self) -> float:
        return time.perf_counter()

    def _spans_us(self, marks: Sequence[tuple[float, float]]) -> list[float]:
        return [(end - start) * 1e6 for start, end in marks]


class _Events(_Rounds[torch.cuda.Event]):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def get_ahead(self, us: float) -> None:
        keep_busy(us, self._device)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _spans_us(self, marks: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        if marks:
            marks[-1][1].synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in marks]
