"""The device timer."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable

import torch

from kitsune.background import wait_until_quiet
from kitsune.collection import no_garbage_collection
from kitsune.device import synchronize
from kitsune.timing.busy import keep_busy
from kitsune.timing.turns import turn

_BLOCK_US = 200.0  # CUDA events are 0.5 to 1 us wide: half a percent of a block
_MOST_CALLS = 32  # enqueuing them takes the host much longer than a short kernel takes the device
_NUM_BLOCKS = 5
_REPEATS = 128  # in a graph
_FIRST_PACE_US = 30.0
_HEAD_START = 1.5  # of what the host is expected to take
_TRIES = 3

# What takes so many times as long as a rival is not timed any further; of one call alone the events' width counts.
_CLEARLY_SLOWER = 1.25
_WIDTH_US = 4.0


def device_us(
    run: Callable[[], object], device: torch.device, *, limit_s: float = 1.0, rival_us: float = math.inf
) -> float:
    """Microseconds of `device` for one call of `run` among many back to back: of several blocks the median.

    Caches are warm, as inside a step. The gap to the next kernel is part of it: who wants the kernels
    alone subtracts the time of the smallest one, measured in the same way.

    On a GPU the calls of a block are enqueued while the device is kept busy, so that the host's pace
    does not count, and CUDA events around them give the time. They run live on the current stream, not
    in a CUDA graph: a recording may fail, and even if not, it would take hold of the user's generators
    and of memory, for gaps between kernels that are about the same. Kitsune's own kernels, launched as
    dependents, leave smaller gaps among themselves, as they do in a step that consists of them; beside a
    library's they leave the usual ones. An operator that makes the host
    wait cannot be enqueued ahead: its time includes the host's. On the CPU it is wall time, and of
    several blocks the fastest: what else runs there can only add to it. What is done in the background
    is waited for.

    Args:
        run: called often; whatever it writes, it writes again and again.
        limit_s: no further block is begun after this many seconds. One is always timed.
        rival_us: what something else takes that does the same. What is clearly slower is timed less exactly.
    """
    wait_until_quiet()
    with turn():
        return _device_us(run, device, limit_s, rival_us)


def _device_us(run: Callable[[], object], device: torch.device, limit_s: float, rival_us: float) -> float:
    deadline = time.perf_counter() + limit_s
    block = _CudaBlocks(run, device) if device.type == "cuda" else functools.partial(_cpu_block, run)
    run()  # loads kernels, chooses algorithms, fills caches
    num_calls, us = 1, block(1)
    if us > _CLEARLY_SLOWER * rival_us + _WIDTH_US:
        return us
    while us < _BLOCK_US and num_calls < _MOST_CALLS:
        num_calls = min(_MOST_CALLS, max(2 * num_calls, math.ceil(num_calls * _BLOCK_US / max(us, 1.0))))
        us = block(num_calls)
    if us / num_calls > _CLEARLY_SLOWER * rival_us:
        return us / num_calls
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
    wait_until_quiet()
    graph = torch.cuda.CUDAGraph()
    with turn(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        synchronize(device)
        run()
        synchronize(device)
        with no_garbage_collection():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(_REPEATS):
                    run()
            finally:
                graph.capture_end()
        us = device_us(graph.replay, device) / _REPEATS
        synchronize(device)
        graph.reset()
    return us


def _cpu_block(run: Callable[[], object], num_calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_calls):
        run()
    return (time.perf_counter() - begin) * 1e6


class _CudaBlocks:
    """Blocks of calls. The device gets something to wait for first: for as long as the host takes to get ahead."""

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self._run, self._device = run, device
        self._pace_us = _FIRST_PACE_US  # of the host, for a call

    def __call__(self, num_calls: int) -> float:
        us, pace_us = 0.0, self._pace_us
        for _ in range(_TRIES):
            head_start_us = 100.0 + _HEAD_START * pace_us * num_calls
            us, host_us, was_ahead = _cuda_block_after(self._run, self._device, num_calls, head_start_us)
            if was_ahead:
                self._pace_us = host_us / num_calls
                break
            pace_us = max(2 * pace_us, host_us / num_calls)
        return us


def _cuda_block_after(
    run: Callable[[], object], device: torch.device, num_calls: int, head_start_us: float
) -> tuple[float, float, bool]:
    """Device time of the block, what the host took to enqueue it, and whether it had before the device began."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        synchronize(device)
        keep_busy(head_start_us, device)
        start.record()
        begin = time.perf_counter()
        for _ in range(num_calls):
            run()
        host_us = (time.perf_counter() - begin) * 1e6
        end.record()
        was_ahead = not start.query()
        end.synchronize()
    return start.elapsed_time(end) * 1e3, host_us, was_ahead
