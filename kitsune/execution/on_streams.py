"""Runs a plan on live CUDA streams: the host issues every operator at every call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kitsune.execution.in_order import InOrder, Outputs
from kitsune.execution.lanes import lanes_for
from kitsune.execution.lower import Lowered
from kitsune.execution.stream_pool import StreamPool


class OnStreams:
    """Executes a lowered graph on streams.

    The first of them waits for the caller's stream, and the caller's stream for all of them, so that
    to the caller the outputs are there as if the call had run on its own stream. The inputs are used
    as they are; the outputs are new tensors that belong to the caller.

    Args:
        lowered: the graph; on a device without streams it may use one.
        pool: the streams.
        device: the device of its tensors.
    """

    name = "streams"
    keeps_outputs = False

    def __init__(self, lowered: Lowered, pool: StreamPool, device: torch.device) -> None:
        self._streams = pool.on(device, lowered.num_streams)
        self._run = InOrder(lowered.module, lanes=lanes_for(lowered.num_streams, pool, device))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        first = self._streams[0]
        caller = torch.cuda.current_stream(first.device)
        first.wait_stream(caller)
        try:
            with torch.cuda.stream(first):
                outputs = self._run(inputs)
        finally:
            for stream in self._streams:
                caller.wait_stream(stream)
        for output in outputs:
            output.record_stream(caller)
        return outputs

    def static_outputs(self) -> list[torch.Tensor]:
        """None: every call returns new tensors."""
        return []

    def release(self) -> None:
        """Drops the graph."""
        self._run.release()
