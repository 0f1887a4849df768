"""Times a loop in passing, without making the host wait for the device."""

from __future__ import annotations

import itertools
import time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Times the rounds of a loop that runs on, by its slower part: the host or the device."""

    def lap(self) -> None:
        """A round begins here, and the one before it ends."""

    def read(self) -> list[float]:
        """Microseconds of all rounds since the last reading, on a GPU by its own clock; waits for the last lap."""


def stopwatch(device: torch.device) -> Stopwatch:
    """One for `device`."""
    return _Events(device) if device.type == "cuda" else _Clock()


class _Clock:
    def __init__(self) -> None:
        self._laps: list[float] = []

    def lap(self) -> None:
        self._laps.append(time.perf_counter())

    def read(self) -> list[float]:
        laps, self._laps = self._laps, []
        return [(end - start) * 1e6 for start, end in itertools.pairwise(laps)]


class _Events:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[torch.cuda.Event] = []

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._laps.append(event)

    def read(self) -> list[float]:
        laps, self._laps = self._laps, []
        if laps:
            laps[-1].synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(laps)]
