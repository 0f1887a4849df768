"""Times work on a device in passing, without making the host wait for it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from kitsune.timing.busy import keep_busy

# By then the host has enqueued a replay.
_HEAD_START_US = 200.0


class Stopwatch(Protocol):
    """Times spans of the caller's work on a device."""

    def start(self) -> None:
        """What is enqueued from here on is timed. A GPU waits a little first, so that the host's pace is no part."""

    def stop(self) -> None:
        """The end of what is timed."""

    def read(self) -> list[float]:
        """Microseconds of all spans since the last reading; waits for the end of the last one."""


def stopwatch(device: torch.device) -> Stopwatch:
    """One for `device`."""
    return _Events(device) if device.type == "cuda" else _Clock()


class _Clock:
    def __init__(self) -> None:
        self._started = 0.0
        self._spans: list[float] = []

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._spans.append((time.perf_counter() - self._started) * 1e6)

    def read(self) -> list[float]:
        spans, self._spans = self._spans, []
        return spans


class _Events:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = self._now()
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        keep_busy(_HEAD_START_US, self._device)
        self._started = self._now()

    def stop(self) -> None:
        self._spans.append((self._started, self._now()))

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self) -> list[float]:
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in spans]
