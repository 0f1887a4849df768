"""The timer: one block of steps, on the wall clock and by the device's own events."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockTime:
    """Seconds per step of one block. ``device_s`` is None on the CPU, which has no events."""

    wall_s: float
    device_s: float | None


def time_block(run: Callable[[int], object], steps: int, device: torch.device) -> BlockTime:
    """Times ``run(steps)`` from an idle device to an idle device.

    The garbage collector waits meanwhile: where its pauses fall depends on all the other variants in the process.
    """
    if device.type != "cuda":
        with _no_garbage_collection():
            begin = time.perf_counter()
            run(steps)
            end = time.perf_counter()
        return BlockTime((end - begin) / steps, None)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    with _no_garbage_collection():
        begin = time.perf_counter()
        first.record()
        run(steps)
        last.record()
        torch.cuda.synchronize(device)
        end = time.perf_counter()
    return BlockTime((end - begin) / steps, first.elapsed_time(last) / 1e3 / steps)


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
