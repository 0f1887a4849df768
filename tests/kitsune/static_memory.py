"""An executor that keeps its outputs in static memory, as a CUDA graph does, on the CPU.

What a graph may not rely on is destroyed: its outputs before the first call; whenever it runs, those of all graphs of
its pool that were recorded later, for which its own values were no more; and those of a released graph if there are
others that were recorded before it. Without them its outputs are the memory of whoever still refers to them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kitsune.engine.recording import Recording
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.in_order import InOrder
from kitsune.graph import dataflow

_graphs: weakref.WeakKeyDictionary[GraphPool, weakref.WeakSet[StaticMemory]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


class StaticMemory(CudaGraph):
    """Stands in for `CudaGraph`; see there."""

    def __init__(
        self,
        run: InOrder,
        inputs: Sequence[Tensor],
        *,
        copied: Collection[int],
        mutated: Collection[int],
        pool: GraphPool,
        warm_up: Sequence[Tensor] | None = None,
        handout: None = None,
    ) -> None:
        self._run = run
        self._copied = sorted(copied)
        self._inputs = list(inputs)
        for position in self._copied:
            self._inputs[position] = _copy(inputs[position])
        rehearsal = list(self._inputs if warm_up is None else warm_up)
        for position in mutated:
            rehearsal[position] = _copy(rehearsal[position])
        with torch.random.fork_rng(devices=[]):
            self._warm_outputs = self._run(rehearsal)
            with _restored([self._inputs[position] for position in mutated]):
                self._outputs = self._run(self._inputs)
        self._static = [self._inputs[position] for position in self._copied]
        # Told now: a tensor that the graph was given may have other memory later, and its output with it.
        given = {tensor.untyped_storage().data_ptr() for tensor in self._inputs}
        self._are_own = [output.untyped_storage().data_ptr() not in given for output in self._outputs]
        self._destroy()
        self.pool = pool
        self._number = next(_numbers)
        self._neighbours = _graphs.setdefault(pool, weakref.WeakSet())
        self._neighbours.add(self)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            for position, static in zip(self._copied, self._static, strict=True):
                static.copy_(inputs[position])
        for neighbour in self._neighbours:
            if neighbour._number > self._number:
                neighbour._destroy()
        results = self._run(self._inputs)
        for static, result, is_own in zip(self._outputs, results, self._are_own, strict=True):
            if is_own:
                static.untyped_storage().copy_(result.untyped_storage())
        self._warm_outputs = ()
        return self._outputs

    def release(self) -> None:
        self._neighbours.discard(self)
        if any(neighbour._number < self._number for neighbour in self._neighbours):
            self._destroy()
        self._outputs = self._warm_outputs = ()
        self._static.clear()

    def _destroy(self) -> None:
        with torch.no_grad():
            for output, is_own in zip(self._outputs, self._are_own, strict=False):  # none are left after a release
                if is_own:
                    output.detach().fill_(float("nan") if output.is_floating_point() else 0)


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    with torch.no_grad():
        return copy.copy_(tensor)


@contextmanager
def _restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Leaves the tensors as they were, versions included as far as `.data` allows."""
    kept = [_copy(tensor) for tensor in tensors]
    yield
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.data.copy_(value)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every recording on the CPU keep its outputs in static memory."""
    record = Recording.__init__

    def record_statically(
        self: Recording, module: fx.GraphModule, inputs: Sequence[Tensor], *, stable: Collection[int], **more: Any
    ) -> None:
        record(self, module, inputs, stable=stable, **more)
        assert isinstance(self.executor, InOrder)
        self.executor = StaticMemory(
            self.executor,
            inputs,
            copied=[
                position
                for position in range(len(inputs))
                if position not in stable and position not in more.get("in_place", ())
            ],
            mutated=dataflow.written_inputs(module.graph),
            pool=more["pool"],
            warm_up=more.get("warm_up"),
        )

    monkeypatch.setattr(Recording, "__init__", record_statically)
