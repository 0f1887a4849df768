"""Peak memory since a moment."""

import torch

from harness import memory

CPU = torch.device("cpu")
_SIZE = 2**27


def test_a_peak_is_seen_and_then_forgotten() -> None:
    memory.reset_peak(CPU)
    before = memory.peak(CPU)
    block = torch.ones(_SIZE, dtype=torch.uint8)
    held = memory.peak(CPU)
    assert held.rss_bytes >= before.rss_bytes + _SIZE // 2
    del block
    assert memory.peak(CPU).rss_bytes > held.rss_bytes - _SIZE // 2
    memory.reset_peak(CPU)
    assert memory.peak(CPU).rss_bytes < held.rss_bytes - _SIZE // 2
    assert held.allocated_bytes is held.reserved_bytes is None
