"""Peak memory of this process from a moment on: device memory by torch's allocator, host memory by the kernel."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_SHARED_POOL = (0, 0)
_RESET_PEAK = "5"  # proc(5), clear_refs: resets the peak resident set size to the current one


@dataclass(frozen=True)
class Peak:
    """Peaks in bytes. The first two are None on the CPU, where torch's allocator does not count.

    ``allocated_bytes`` counts the private memory of captured CUDA graphs as a whole: the allocator takes most of it for
    free once it is captured, but every replay writes there, and nothing else may.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int


def reset_peak(device: torch.device) -> None:
    """Peaks read from now on are peaks since now. Where the kernel cannot reset the host's, it stays the process's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def peak(device: torch.device) -> Peak:
    """The peaks since :func:`reset_peak`."""
    if device.type != "cuda":
        return Peak(None, None, _peak_rss_bytes())
    allocated = torch.cuda.max_memory_allocated(device) + _idle_graph_bytes()
    return Peak(allocated, torch.cuda.max_memory_reserved(device), _peak_rss_bytes())


def _idle_graph_bytes() -> int:
    """Bytes in the pools of captured graphs that hold no tensor at the moment."""
    segments = torch.cuda.memory_snapshot()
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != _SHARED_POOL]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _peak_rss_bytes() -> int:
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
