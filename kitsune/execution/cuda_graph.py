"""Replays a captured graph as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from kitsune.execution.in_order import InOrder, Outputs

_WARM_UP_RUNS = 2


class CudaGraph:
    """Records the operators of a graph into a CUDA graph once, and replays it.

    The outputs are the same tensors at every call, in memory of the graph: the next call
    overwrites them.

    Args:
        module: a graph of ATen operators over flat tensors of one CUDA device.
        inputs: the tensors of the call for which it is recorded.
        copied: positions of inputs whose values are copied in at each call; the others are used in
            place and must be the same tensors, at the same addresses, at every call.
        mutated: positions of inputs that the graph writes. Warming up runs on copies of them.
        pool: the memory pool, shared by all graphs that never run at the same time and hold
            nothing for each other.
        compile: record what Inductor makes of the graph.

    Recording disturbs nothing of the user's: it runs on a side stream, on copies of whatever is
    written, restores the random state, and does not react to other threads' CUDA calls.
    """

    name = "cuda graph"
    keeps_outputs = True

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        *,
        copied: Collection[int],
        mutated: Collection[int],
        pool: tuple[int, int],
        compile: bool = False,
    ) -> None:
        run = InOrder(module, compile=compile)
        self._copied = sorted(copied)
        self._inputs = list(inputs)
        for position in self._copied:
            self._inputs[position] = _static_copy(inputs[position])
        device = inputs[0].device
        self._warm_up(run, mutated, device)
        self._graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.device(device):
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._outputs = run(self._inputs)
        self._static = [self._inputs[position] for position in self._copied]
        self._inputs.clear()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        for position, static in zip(self._copied, self._static, strict=True):
            static.copy_(inputs[position], non_blocking=True)
        self._graph.replay()
        return self._outputs

    def release(self) -> None:
        """Gives the graph and its memory back; the object cannot be called afterwards."""
        self._graph.reset()
        self._outputs = ()
        self._static.clear()

    def _warm_up(self, run: InOrder, mutated: Collection[int], device: torch.device) -> None:
        """Lets libraries create handles, choose algorithms and load kernels, which a recording must not see."""
        scratch = list(self._inputs)
        for position in mutated:
            scratch[position] = _static_copy(self._inputs[position])
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.random.fork_rng(devices=[device], device_type="cuda"), torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                run(scratch)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)


def _static_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and strides with memory of its own."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return copy.copy_(tensor)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection during the recording could free CUDA memory or graphs, which would break it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
