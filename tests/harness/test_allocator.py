"""Freed memory stays with the process."""

import resource

import pytest
import torch

from harness import allocator
from harness.processes import Launcher, Note

_ROUNDS = 50


def faults_per_round(keep: bool, note: Note) -> float | None:
    """Page faults of allocating, filling and freeing some large tensors; None where the setting does not exist."""
    if keep and not allocator.keep_freed_memory():
        return None
    _allocate_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_ROUNDS):
        _allocate_and_free()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / _ROUNDS


def _allocate_and_free() -> None:
    tensors = [torch.ones(megabytes * 2**20, dtype=torch.uint8) for megabytes in (1, 40, 3)]
    del tensors


@pytest.mark.slow
def test_memory_that_was_freed_is_used_again() -> None:
    launcher = Launcher()
    kept = launcher.run(faults_per_round, True, timeout_s=60)
    if kept is None:
        pytest.skip("this C library cannot be told")
    returned = launcher.run(faults_per_round, False, timeout_s=60)
    assert returned is not None
    assert returned > 10 * kept
