"""What a lowered graph tells of its streams while it runs, and who listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kitsune.execution.stream_pool import StreamPool
from kitsune.plan.plan import Span


class Lanes(Protocol):
    """What a lowered graph tells of its streams, numbered from 0, on which it begins and ends."""

    def to(self, stream: int) -> None:
        """What follows is issued to that stream."""

    def begin(self) -> None:
        """The present stream, used for the first time, waits for what came before the graph."""

    def record(self, task: int) -> None:
        """Marks the end of a task on the present stream."""

    def wait(self, task: int) -> None:
        """The present stream waits for the end of that task."""

    def join(self) -> None:
        """The present stream waits for all others."""

    def hold(self, *values: Any) -> None:
        """Does nothing with the values that were held until here."""


class TimedLanes(Lanes, Protocol):
    """What a graph that was lowered with `timed` tells, besides, of its tasks."""

    def start(self, task: int) -> None:
        """What follows on the present stream are the operators of that task."""

    def end(self, task: int) -> None:
        """What follows on the present stream are no longer the operators of that task."""

    def spans_us(self) -> tuple[Span, ...]:
        """By index of the task, its start and end in the latest run, which is over: microseconds since any moment."""


def lanes_for(num_streams: int, pool: StreamPool, device: torch.device) -> Callable[[], Lanes] | None:
    """What makes the lanes of a run of a lowered graph on `device`; None for one that uses a single stream."""
    if num_streams == 1:
        return None
    return partial(CudaLanes, pool.on(device, num_streams)) if device.type == "cuda" else HostLanes


def timed_lanes_for(num_streams: int, pool: StreamPool, device: torch.device) -> Callable[[], TimedLanes]:
    """What makes the lanes of a run on `device` of a graph that was lowered with `timed`."""
    return partial(TimedCudaLanes, pool.on(device, num_streams)) if device.type == "cuda" else TimedHostLanes


class HostLanes:
    """No streams: the host runs one operator after the other, in an order in which all waits are met."""

    def to(self, _stream: int) -> None:
        return

    def begin(self) -> None:
        return

    def record(self, _task: int) -> None:
        return

    def wait(self, _task: int) -> None:
        return

    def join(self) -> None:
        return

    def hold(self, *_values: Any) -> None:
        return


class CudaLanes:
    """CUDA streams, for one run."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._current = streams[0]
        self._begin = streams[0].record_event()
        self._ends: dict[int, torch.cuda.Event] = {}
        self._used: list[torch.cuda.Stream] = []

    def to(self, stream: int) -> None:
        self._current = self._streams[stream]
        torch.cuda.set_stream(self._current)

    def begin(self) -> None:
        self._current.wait_event(self._begin)
        self._used.append(self._current)

    def record(self, task: int) -> None:
        self._ends[task] = self._current.record_event()

    def wait(self, task: int) -> None:
        self._current.wait_event(self._ends[task])

    def join(self) -> None:
        for stream in self._used:
            self._current.wait_stream(stream)

    def hold(self, *_values: Any) -> None:
        return


class TimedHostLanes(HostLanes):
    """The host, with its clock."""

    def __init__(self) -> None:
        self._starts_ns: dict[int, int] = {}
        self._ends_ns: dict[int, int] = {}

    def start(self, task: int) -> None:
        self._starts_ns[task] = time.perf_counter_ns()

    def end(self, task: int) -> None:
        self._ends_ns[task] = time.perf_counter_ns()

    def spans_us(self) -> tuple[Span, ...]:
        return tuple((start / 1e3, self._ends_ns[task] / 1e3) for task, start in sorted(self._starts_ns.items()))


class TimedCudaLanes(CudaLanes):
    """CUDA streams with timing events, which a recording makes nodes of its graph: each replay sets them anew.

    The first stream is the current one.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._origin = _timing_event(streams[0])  # on every path to a task
        super().__init__(streams)
        self._started: dict[int, torch.cuda.Event] = {}
        self._ended: dict[int, torch.cuda.Event] = {}

    def start(self, task: int) -> None:
        self._started[task] = _timing_event(self._current)

    def end(self, task: int) -> None:
        self._ended[task] = _timing_event(self._current)

    def spans_us(self) -> tuple[Span, ...]:
        return tuple((self._us(self._started[task]), self._us(self._ended[task])) for task in sorted(self._started))

    def _us(self, event: torch.cuda.Event) -> float:
        milliseconds: float = self._origin.elapsed_time(event)
        return milliseconds * 1e3


def _timing_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that is recorded on `stream`, the current one: torch asks the current one whether it is recording."""
    event = torch.cuda.Event(enable_timing=True, external=True)
    event.record(stream)
    return event
