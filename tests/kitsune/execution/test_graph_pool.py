"""What a pool of CUDA graphs tells of its memory."""

from __future__ import annotations

import pytest
import torch

from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.stream_pool import StreamPool

MIB = 1 << 20


def test_without_a_graph_no_memory_is_told() -> None:
    assert GraphPool(StreamPool()).num_bytes() is None


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
    pool.enter()
    assert pool.num_bytes() is None, "of two graphs"
    pool.leave()
    graph.reset()
    pool.leave()
    assert pool.num_bytes() is None
