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
    """Seconds per step of one block. ``device_s`` is None on the CPU, which has no events.

    On a GPU ``wall_s`` runs from an idle device to an idle device, the lead-in included; ``device_s`` between two
    events of the stream, behind the lead-in: in a loop that runs on, the host is ahead of the device.
    """

    wall_s: float
    device_s: float | None

    @property
    def seconds(self) -> float:
        """The time of a step in a loop that runs on: by the device's events where there are any."""
        return self.wall_s if self.device_s is None else self.device_s


def time_block(run: Callable[[int], object], steps: int, device: torch.device, *, lead_in: int = 0) -> BlockTime:
    """Times ``run(steps)`` behind ``lead_in`` steps, which on a GPU are not waited for.

    The garbage collector waits meanwhile: where its pauses fall depends on all the other variants in the process.
    """
    if device.type != "cuda":
        with _no_garbage_collection():
            _lead_in(run, lead_in)
            begin = time.perf_counter()
            run(steps)
            end = time.perf_counter()
        return BlockTime((end - begin) / steps, None)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    with _no_garbage_collection():
        begin = time.perf_counter()
        _lead_in(run, lead_in)
        first.record()
        run(steps)
        last.record()
        torch.cuda.synchronize(device)
        end = time.perf_counter()
    return BlockTime((end - begin) / (lead_in + steps), first.elapsed_time(last) / 1e3 / steps)


def _lead_in(run: Callable[[int], object], steps: int) -> None:
    if steps:
        run(steps)


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
