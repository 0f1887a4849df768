"""Replays a captured graph as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kitsune.background import wait_until_quiet
from kitsune.collection import no_garbage_collection, spare_garbage_in_forks
from kitsune.execution.copier import Copier
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import Handout
from kitsune.execution.in_order import InOrder, Outputs

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class CudaGraph:
    """Records the operators of a graph into a CUDA graph once, and replays it.

    The outputs are the same tensors at every call, in memory of the graph: the next call
    overwrites them. With a `handout` the first ones are the caller's own.

    Args:
        run: runs a graph of ATen operators over flat tensors of one CUDA device, on the first stream
            of the pool, and ends there if it uses others.
        inputs: the tensors of the call for which it is recorded.
        copied: positions of inputs whose values are copied in at each call; the others are used in
            place and must be the same tensors, at the same addresses, at every call.
        mutated: positions of inputs that the graph writes. Warming up runs on copies of them.
        warm_up: inputs to warm up on in place of `inputs`, where those hold no valid values yet.
        handout: gives the first outputs away.
        pool: the memory pool that it records into.
        pieces: by stream of the pool, how many bytes it is to have in one piece; see `kitsune.memory.segments.pieces`.

    Attributes:
        pool: as above.

    Recording disturbs nothing of the user's: it runs on a side stream, on copies of whatever is
    written, restores the random state, and does not react to other threads' CUDA calls. It waits
    for what is done in the background.
    """

    name = "cuda graph"
    keeps_outputs = True

    def __init__(
        self,
        run: InOrder,
        inputs: Sequence[torch.Tensor],
        *,
        copied: Collection[int],
        mutated: Collection[int],
        pool: GraphPool,
        warm_up: Sequence[torch.Tensor] | None = None,
        handout: Handout | None = None,
        pieces: Sequence[int] = (),
    ) -> None:
        wait_until_quiet()
        self._copied = sorted(copied)
        self._inputs = list(inputs)
        for position in self._copied:
            self._inputs[position] = _static_copy(inputs[position])
        device = inputs[0].device
        (stream,) = pool.streams.on(device)
        self._warm_outputs = _warm_up(run, list(self._inputs if warm_up is None else warm_up), mutated, stream)
        if handout is not None:
            with torch.cuda.device(device):
                handout.prepare(self._warm_outputs[: handout.count])
        if warm_up is not None:  # on what another recording has left: no third one begins with what this one gives
            self._warm_outputs = ()
        spare_garbage_in_forks()
        self._graph = torch.cuda.CUDAGraph()
        self.pool = pool
        handle = pool.enter()
        recording = torch.cuda.graph(self._graph, pool=handle, stream=stream, capture_error_mode="thread_local")
        current = torch.cuda.current_stream(device)
        try:
            with torch.cuda.device(device), no_garbage_collection(), _own_workspaces(), recording:
                _take_memory(pieces, pool, device)
                self._outputs = run(self._inputs)
                self._give = None if handout is None else handout.record(self._outputs[: handout.count])
        except BaseException:
            pool.leave()
            _mend(self._graph, handle, current)
            raise
        self._copiers = [(place, Copier(self._inputs[place])) for place in self._copied]
        self._inputs.clear()
        self._replay = self._graph.replay

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        for position, copy_in in self._copiers:
            copy_in(inputs[position])
        if self._give is None:
            self._replay()
            outputs = self._outputs
        else:
            given = self._give(self._replay)
            outputs = [*given, *self._outputs[len(given) :]]
        self._warm_outputs = ()
        return outputs

    def static_outputs(self) -> list[torch.Tensor]:
        """The tensors that every call returns, in the graph's memory."""
        return list(self._outputs)

    def warm_outputs(self) -> list[torch.Tensor]:
        """The outputs of the last warm-up run, computed on valid values; held until the first call."""
        return list(self._warm_outputs)

    def release(self) -> None:
        """Gives the graph and its memory back; the object cannot be called afterwards."""
        self._graph.reset()
        self.pool.leave()
        self._give = None
        self._outputs = ()
        self._warm_outputs = ()
        self._copiers.clear()


def _warm_up(run: InOrder, inputs: list[torch.Tensor], mutated: Collection[int], stream: torch.cuda.Stream) -> Outputs:
    """Lets libraries create handles, choose algorithms and load kernels, which a recording must not see."""
    device = inputs[0].device
    for position in mutated:
        inputs[position] = _static_copy(inputs[position])
    stream.wait_stream(torch.cuda.current_stream(device))
    with _own_workspaces(), torch.random.fork_rng(devices=[device], device_type="cuda"), torch.cuda.stream(stream):
        try:
            run(inputs)
            return _rehearse(run, inputs)
        finally:
            torch.cuda.synchronize(device)


def _rehearse(run: InOrder, inputs: list[torch.Tensor]) -> Outputs:
    """Runs with host synchronization forbidden, as in a recording; there it would leave torch in disorder."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _take_memory(pieces: Sequence[int], pool: GraphPool, device: torch.device) -> None:
    """Lets the pool that is being recorded into have so many bytes for each stream, which the allocator divides.

    No tensors: where torch is to be deterministic it would fill them, at each replay.
    """
    streams = pool.streams.on(device, max(1, len(pieces)))
    for stream, num_bytes in zip(streams, pieces, strict=False):
        if num_bytes:
            if stream is not streams[0]:
                stream.wait_stream(streams[0])  # so that it is recorded, too
            torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(num_bytes, device, stream))


def _mend(graph: torch.cuda.CUDAGraph, handle: _POOL_HANDLE, current: torch.cuda.Stream) -> None:
    """Undoes what a recording leaves behind where CUDA cannot end it: torch then skips its own clearing up."""
    device = current.device
    with torch.cuda.device(device):
        torch.cuda.set_stream(current)
    try:
        graph.pool()
    except RuntimeError:  # the recording did not end, so the allocator still serves it, and keeps all that it freed
        torch._C._cuda_endAllocateToPool(device.index, handle)
        torch._C._cuda_releasePool(device.index, handle)
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:  # it is in its recording state, where every eager use raises
        generator.graphsafe_set_state(generator.clone_state())
    generator.set_offset(offset)


def _static_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and strides with memory of its own."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return copy.copy_(tensor)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Lets cuBLAS allocate its workspaces anew, in the graph's own memory while recording, and keep none.

    A workspace from before the recording may be freed by others (torch.compile's reduce-overhead
    mode clears them all) while the graph still writes to it; one from warming up takes memory for
    nothing. The call is private; torch's own CUDA graph trees do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def free_caches() -> None:
    """Gives back the memory that torch's allocator and cuBLAS keep for later use by eager operators.

    It waits for what is done in the background, which may be about to use it.
    """
    wait_until_quiet()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
