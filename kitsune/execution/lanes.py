"""What a lowered graph tells of its streams while it runs, and who listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kitsune.execution.stream_pool import StreamPool


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


def lanes_for(num_streams: int, pool: StreamPool, device: torch.device) -> Callable[[], Lanes] | None:
    """What makes the lanes of a run of a lowered graph on `device`; None for one that uses a single stream."""
    if num_streams == 1:
        return None
    return partial(CudaLanes, pool.on(device, num_streams)) if device.type == "cuda" else HostLanes


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
