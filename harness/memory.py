"""Peak memory of this process from a moment on: device memory by torch's allocator, host memory by the kernel."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.memory_timeline import graph_split_bytes, idle_graph_bytes

_RESET_PEAK = "5"  # proc(5), clear_refs: resets the peak resident set size to the current one


@dataclass(frozen=True)
class Peak:
    """Peaks in bytes. All but the last are None on the CPU, where torch's allocator does not count.

    ``allocated_bytes`` counts the private memory of captured CUDA graphs as a whole: the allocator takes most of it for
    free once it is captured, but every replay writes there, and nothing else may. For the same reason it is no part of
    ``inactive_split_bytes``: pieces of blocks of which other pieces are in use, so that they cannot be returned to the
    device.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int
    inactive_split_bytes: int | None = None


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
    segments = torch.cuda.memory_snapshot()
    statistics = torch.cuda.memory_stats(device)
    return Peak(
        allocated_bytes=statistics["allocated_bytes.all.peak"] + idle_graph_bytes(segments),
        reserved_bytes=statistics["reserved_bytes.all.peak"],
        rss_bytes=_peak_rss_bytes(),
        inactive_split_bytes=max(0, statistics["inactive_split_bytes.all.peak"] - graph_split_bytes(segments)),
    )


def in_use(device: torch.device) -> tuple[int, int]:
    """Bytes allocated and reserved on a GPU at the moment, counted as in :class:`Peak`."""
    allocated = torch.cuda.memory_allocated(device) + idle_graph_bytes(torch.cuda.memory_snapshot())
    return allocated, torch.cuda.memory_reserved(device)


def _peak_rss_bytes() -> int:
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
