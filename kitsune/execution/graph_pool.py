"""The memory that several CUDA graphs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kitsune.execution.stream_pool import StreamPool

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class GraphPool:
    """A CUDA memory pool for graphs that never run at the same time and leave nothing for each other.

    A graph's intermediate values may lie where another graph of the pool keeps its own. So whatever
    must outlive a replay (saved values of a forward pass, gradients) needs a graph with a pool of
    its own. PyTorch's allocator does not let a pool be entered again once its last graph is gone, so
    the handle changes then.

    Args:
        streams: on which the graphs are warmed up and recorded.
    """

    def __init__(self, streams: StreamPool) -> None:
        self.streams = streams
        self._handle: _POOL_HANDLE | None = None
        self._graphs = 0

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
        segments = torch.cuda.memory_snapshot(self._handle, include_traces=False)
        return sum(int(one["total_size"]) for one in segments)

    def leave(self) -> None:
        """One graph less."""
        self._graphs -= 1
        if self._graphs == 0:
            self._handle = None
