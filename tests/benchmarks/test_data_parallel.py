"""Loops of two processes run, by gloo, and are timed; what they take is measured on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from torch import multiprocessing

from tests.benchmarks import data_parallel


def few_blocks(rank: int, folder: str) -> None:
    """In a process of its own, which has its own values of these."""
    data_parallel._BLOCKS, data_parallel._BLOCK, data_parallel._SETTLED_STEPS = 2, 2, 3
    data_parallel._MODE = "replay"  # whatever is faster
    data_parallel._rank(rank, 2, "mlp", 4, "amp", "cpu", folder)
    assert not dist.is_initialized()


def test_all_loops_are_timed(tmp_path: Path) -> None:
    multiprocessing.start_processes(few_blocks, (str(tmp_path),), nprocs=2, start_method="spawn")
    found = json.loads((tmp_path / "times").read_text(encoding="utf-8"))
    assert {name: len(times) for name, times in found.items()} == {"eager": 2, "replayed": 2, "deferred": 2}
    assert min(map(min, found.values())) > 0
