"""What several CUDA graphs share: the stream they are recorded on, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class CaptureStream:
    """The side stream on which the graphs of one loop are warmed up and recorded.

    One for all of them: cuBLAS keeps a workspace of tens of MiB for every stream that it has seen.
    One for each loop: graphs of different loops may run at the same time, and must not share it.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def on(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of `device`."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class GraphPool:
    """A CUDA memory pool for graphs that never run at the same time and leave nothing for each other.

    A graph's intermediate values may lie where another graph of the pool keeps its own. So whatever
    must outlive a replay (saved values of a forward pass, gradients) needs a graph with a pool of
    its own. PyTorch's allocator does not let a pool be entered again once its last graph is gone, so
    the handle changes then.
    """

    def __init__(self, stream: CaptureStream) -> None:
        self.stream = stream
        self._handle: _POOL_HANDLE | None = None
        self._graphs = 0

    def enter(self) -> _POOL_HANDLE:
        """The handle, for one more graph."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs += 1
        return self._handle

    def leave(self) -> None:
        """One graph less."""
        self._graphs -= 1
        if self._graphs == 0:
            self._handle = None
