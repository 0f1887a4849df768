"""Keeps a GPU waiting, so that the host gets ahead of it."""

from __future__ import annotations

import torch

_CYCLES_PER_US = 2_000  # of the fastest clocks; slower ones only make the device wait longer


def keep_busy(us: float, device: torch.device) -> None:
    """Enqueues a kernel that does nothing for at least `us` microseconds, on the current stream of a CUDA device.

    `torch.cuda._sleep` is private; PyTorch's own tests use it for this.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(int(us * _CYCLES_PER_US))
