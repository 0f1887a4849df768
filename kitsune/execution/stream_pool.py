"""The CUDA streams of one loop."""

from __future__ import annotations

import torch

MAX_STREAMS = 8

# The first stream carries the critical path: where both have work, the device takes the first one's.
_FIRST_PRIORITY, _OTHER_PRIORITY = -1, 0


class StreamPool:
    """Streams that a loop's graphs are warmed up, recorded and run on, made once for each device.

    One pool for all graphs of a loop: cuBLAS keeps a workspace of tens of MiB for every stream that
    it has seen. One pool for each loop: graphs of different loops may run at the same time, and must
    not share streams.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    def on(self, device: torch.device, count: int = 1) -> tuple[torch.cuda.Stream, ...]:
        """The first `count` streams of `device`, at most `MAX_STREAMS`; the first one has a higher priority."""
        assert 1 <= count <= MAX_STREAMS
        streams = self._streams.setdefault(device, [])
        while len(streams) < count:
            priority = _OTHER_PRIORITY if streams else _FIRST_PRIORITY
            streams.append(torch.cuda.Stream(device, priority=priority))
        return tuple(streams[:count])
