"""The memory that several CUDA graphs share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kitsune.execution.stream_pool import StreamPool

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class GraphPool:
    """A CUDA memory pool for graphs that never run at the same time and leave nothing for each other.

    A graph's intermediate values may lie where another graph of the pool keeps its own, or its outputs if
    it was recorded later. So what must outlive replays of others (saved values of a forward pass,
    gradients) needs a graph with a pool of its own, or the first of it. PyTorch's allocator does not let a
    pool be entered again once its last graph is gone, so the handle changes then.

    Args:
        streams: on which the graphs are warmed up and recorded.
    """

    def __init__(self, streams: StreamPool) -> None:
        self.streams = streams
        self._handle: _POOL_HANDLE | None = None
        self._graphs = 0

    @property
    def is_empty(self) -> bool:
        """Whether no graph uses it."""
        return self._graphs == 0

    def enter(self) -> _POOL_HANDLE:
        """The handle, for one more graph."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs += 1
        return self._handle

    def num_bytes(self) -> int | None:
        """The device memory that it holds, whether values lie there or not; None if the allocator does not tell."""
        if self._handle is None:
            return 0
        if torch.cuda.get_allocator_backend() != "native":
            return None
        return sum(int(one["total_size"]) for one in _segments(self._handle))

    def leave(self) -> None:
        """One graph less."""
        self._graphs -= 1
        if self._graphs == 0:
            self._handle = None


def _segments(handle: _POOL_HANDLE) -> Sequence[dict[str, Any]]:
    """What the pool with that handle has taken from the device.

    `torch.cuda.memory_snapshot` gives back a reference of each of its arguments that it never took (in torch 2.11,
    `THCPModule_memorySnapshot` owns what `PyTuple_GetItem` lends it). A handle's number over 256 is an object of its
    own, which would be gone while the handle still held it: so each gets one reference more.
    """
    for argument in (*handle, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
    return torch.cuda.memory_snapshot(handle, include_traces=False)  # type: ignore[no-any-return]
