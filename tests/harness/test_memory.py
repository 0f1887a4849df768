"""Peak memory since a moment."""

import mmap

import pytest
import torch

from harness import memory

CPU = torch.device("cpu")
_SIZE = 2**27


def test_a_peak_is_seen_and_then_forgotten() -> None:
    memory.reset_peak(CPU)
    before = memory.peak(CPU)
    with mmap.mmap(-1, _SIZE) as block:  # given back to the system at once, however malloc is set
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
        held = memory.peak(CPU)
    assert held.rss_bytes >= before.rss_bytes + _SIZE // 2
    assert memory.peak(CPU).rss_bytes > held.rss_bytes - _SIZE // 2
    memory.reset_peak(CPU)
    assert memory.peak(CPU).rss_bytes < held.rss_bytes - _SIZE // 2
    assert held.allocated_bytes is held.reserved_bytes is None


@pytest.mark.gpu
def test_a_captured_graph_s_memory_counts_as_allocated() -> None:
    device = torch.device("cuda")
    x = torch.ones(_SIZE // 4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x + 1).exp().sum()
    memory.reset_peak(device)
    without_graphs = torch.cuda.max_memory_allocated(device)
    graph.replay()
    peak = memory.peak(device)
    assert peak.allocated_bytes is not None
    assert peak.reserved_bytes is not None
    assert without_graphs + _SIZE <= peak.allocated_bytes <= peak.reserved_bytes
    del y
