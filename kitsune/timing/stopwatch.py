"""Times work that a loop does anyway, without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from kitsune.collection import spare_garbage_in_forks
from kitsune.timing.busy import keep_busy

T = TypeVar("T")

# The device gets so many times to wait for what the host took for the latest work: enough for the first of several
# pieces that follow each other, or for each by itself where the loop waits for it; but no more than that.
_FIRST_HEAD_START = 16.0
_HEAD_START = 2.0
_LONGEST_HEAD_START_US = 20_000.0
_FIRST_LAUNCH_US = 60.0


class Stopwatch(Protocol):
    """Times pieces of work by the clock of the device that does them."""

    def time(self, work: Callable[[], T]) -> T:
        """Runs `work`, and times what it does on the device."""

    def read(self) -> list[float]:
        """Microseconds of all work since the last reading; waits for the last piece."""


def stopwatch(device: torch.device) -> Stopwatch:
    """One for `device`."""
    return _Events(device) if device.type == "cuda" else _Clock()


class _Clock:
    def __init__(self) -> None:
        self._times_us: list[float] = []

    def time(self, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        self._times_us.append((time.perf_counter() - started) * 1e6)
        return result

    def read(self) -> list[float]:
        times_us, self._times_us = self._times_us, []
        return times_us


class _Events:
    """Before a piece of work the device gets something to wait for, unless it is at the last piece still.

    So the host gets ahead of it, and what the host takes to launch the work is not counted, not even in a loop that
    waits for each step. In other loops pieces are timed in the queue in which they will run, where each begins when
    all streams of the last one have ended.
    """

    def __init__(self, device: torch.device) -> None:
        spare_garbage_in_forks()
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launch_us = _FIRST_LAUNCH_US

    def time(self, work: Callable[[], T]) -> T:
        if not self._events or self._events[-1][1].query():
            launches = _HEAD_START if self._events else _FIRST_HEAD_START
            keep_busy(min(launches * self._launch_us, _LONGEST_HEAD_START_US), self._device)
        started = time.perf_counter()
        begin = self._now()
        result = work()
        self._events.append((begin, self._now()))
        self._launch_us = (time.perf_counter() - started) * 1e6
        return result

    def read(self) -> list[float]:
        events, self._events = self._events, []
        if events:
            events[-1][1].synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
