"""The device timer."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable

import torch

from kitsune.collection import no_garbage_collection
from kitsune.device import synchronize
from kitsune.timing.busy import keep_busy

_BLOCK_US = 400.0  # CUDA events are 0.5 to 1 us wide and a replay starts in about 5 us: 1% of a block
_MOST_CALLS = 128
_NUM_BLOCKS = 5
_HEAD_STARTS = (1, 4, 16, 64)


def device_us(run: Callable[[], object], device: torch.device, *, limit_s: float = 1.0) -> float:
    """Microseconds of `device` for one call of `run` among many back to back: of several blocks the median.

    Caches are warm, as inside a step. The gap to the next kernel is part of it: who wants the kernels
    alone subtracts the time of the smallest one, measured in the same way.

    On a GPU the calls of a block are enqueued while the device is kept busy, so that the host's pace
    does not count, and CUDA events around them give the time. They run live on the current stream, not
    in a CUDA graph: a recording may fail, and even if not, it would take hold of the user's generators
    and of memory, for gaps between kernels that are about the same. An operator that makes the host
    wait cannot be enqueued ahead: its time includes the host's. On the CPU it is wall time, and of
    several blocks the fastest: what else runs there can only add to it.

    Args:
        run: called often; whatever it writes, it writes again and again.
        limit_s: no further block is begun after this many seconds. One is always timed.
    """
    deadline = time.perf_counter() + limit_s
    block = functools.partial(_cuda_block if device.type == "cuda" else _cpu_block, run, device)
    block(1)  # loads kernels, chooses algorithms, fills caches
    num_calls, us = 1, block(1)
    while us < _BLOCK_US and num_calls < _MOST_CALLS:
        num_calls = min(_MOST_CALLS, max(2 * num_calls, math.ceil(num_calls * _BLOCK_US / max(us, 1.0))))
        us = block(num_calls)
    blocks = [us]
    while len(blocks) < _NUM_BLOCKS and time.perf_counter() < deadline:
        blocks.append(block(num_calls))
    us = statistics.median_low(blocks) if device.type == "cuda" else min(blocks)
    return us / num_calls


def replayed_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a CUDA device for one call of `run` inside a CUDA graph that repeats it.

    `run` must be safe to record: it neither allocates, nor draws random numbers, nor makes the host
    wait. It may use other streams if it joins them again.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        synchronize(device)
        run()
        synchronize(device)
        with no_garbage_collection():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(_MOST_CALLS):
                    run()
            finally:
                graph.capture_end()
        us = device_us(graph.replay, device) / _MOST_CALLS
        synchronize(device)
        graph.reset()
    return us


def _cpu_block(run: Callable[[], object], device: torch.device, num_calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_calls):
        run()
    return (time.perf_counter() - begin) * 1e6


def _cuda_block(run: Callable[[], object], device: torch.device, num_calls: int) -> float:
    """The device gets something to wait for first, and a longer wait if the host did not keep ahead."""
    us = 0.0
    for factor in _HEAD_STARTS:
        us, was_ahead = _cuda_block_after(run, device, num_calls, factor * (100.0 + 20.0 * num_calls))
        if was_ahead:
            break
    return us


def _cuda_block_after(
    run: Callable[[], object], device: torch.device, num_calls: int, head_start_us: float
) -> tuple[float, bool]:
    """Device time of the block, and whether the host had enqueued all of it before the device began."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        synchronize(device)
        keep_busy(head_start_us, device)
        start.record()
        for _ in range(num_calls):
            run()
        end.record()
        was_ahead = not start.query()
        end.synchronize()
    return start.elapsed_time(end) * 1e3, was_ahead
