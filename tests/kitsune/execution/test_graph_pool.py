"""What a pool of CUDA graphs tells of its memory."""

from __future__ import annotations

import sys

import pytest
import torch

from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.stream_pool import StreamPool

MIB = 1 << 20


def test_without_a_graph_it_holds_nothing() -> None:
    assert GraphPool(StreamPool()).num_bytes() == 0


@pytest.mark.gpu
def test_the_memory_of_a_graph_counts_whether_values_lie_there_or_not() -> None:
    pool, graph = GraphPool(StreamPool()), torch.cuda.CUDAGraph()
    other = torch.ones(16 * MIB, device="cuda")
    with torch.cuda.graph(graph, pool=pool.enter()):
        values = torch.ones(16 * MIB, device="cuda") + other
    taken = pool.num_bytes()
    assert taken is not None
    assert 128 * MIB <= taken < 150 * MIB
    del values
    assert pool.num_bytes() == taken
    graph.reset()
    pool.leave()
    assert pool.num_bytes() == 0


@pytest.mark.gpu
def test_a_pool_may_be_asked_often() -> None:
    """Each time `torch.cuda.memory_snapshot` forgets that others refer to the handle's numbers."""
    pool, graph = GraphPool(StreamPool()), torch.cuda.CUDAGraph()
    while max(torch.cuda.graph_pool_handle()) <= 256:  # smaller numbers are shared by all of Python
        pass
    handle = pool.enter()
    with torch.cuda.graph(graph, pool=handle):
        values = torch.ones(MIB, device="cuda") + 1
    number = max(handle)
    before = sys.getrefcount(number)
    assert len({pool.num_bytes() for _ in range(10)}) == 1
    assert sys.getrefcount(number) >= before
    del values
    graph.reset()
    pool.leave()


@pytest.mark.gpu
def test_an_allocator_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *_, **__: pytest.fail("it raises an error"))
    pool = GraphPool(StreamPool())
    pool.enter()
    assert pool.num_bytes() is None
    pool.leave()
