"""Records graphs by their plans."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from kitsune.execution.cuda_graph import free_caches
from kitsune.execution.graph_pool import GraphPool
from kitsune.memory.pool import MemoryPool
from kitsune.schedule import peak_bytes

# What a plan on several streams may take, as a multiple of what the step captured by hand would take, which is what it
# takes in order and the gradients, which stay; or more than in order by what libraries work in on a few more streams. A
# plan bounds what is alive at once (`planning.MEMORY_FACTOR`), or is made to fit in here as far as that can be told
# (`room_on_streams`). What the allocator rounds up, and what libraries work in, is seen only in a recording.
_MOST = 1.05
_MORE_AT_LEAST = 64 << 20


def most_on_streams(in_order_bytes: int, inputs: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> int:
    """How many bytes a graph on several streams may take.

    Args:
        in_order_bytes: what that of the step in order takes.
        inputs: what the step reads beside, its state included.
        trained: the parameters.
    """
    beside = sum(tensor.nbytes for tensor in inputs)
    by_hand = beside + in_order_bytes + sum(tensor.nbytes for tensor in trained)
    return max(int(_MOST * by_hand) - beside, in_order_bytes + _MORE_AT_LEAST)


def room_on_streams(most_bytes: int, in_order_bytes: int, live_bytes: int) -> int:
    """How many of `most_bytes` the values of a plan on several streams may take.

    Args:
        most_bytes: what its graph may take.
        in_order_bytes: what that of the step in order takes.
        live_bytes: what its values need. The rest is taken to be as much on several streams.
    """
    return most_bytes - max(0, in_order_bytes - live_bytes)


def record_planned(
    memory: MemoryPool,
    planned: Planned,
    inputs: Sequence[torch.Tensor],
    *,
    most_bytes: int | None = None,
    **conditions: Any,
) -> Recording:
    """Records a plan in an arena of `memory`, which it shares with other plans that never run at the same time.

    Args:
        most_bytes: by how much the pools of graphs and arenas may grow for a plan on several streams, which is by all
            that it takes where it is the only one; None for any number.
        conditions: those of a `Recording`.

    Raises:
        RefusedError: it cannot be recorded, or there is too little memory.
    """
    pool: GraphPool = conditions["pool"]
    before = _taken_bytes(memory, pool)
    try:
        arena = memory.arena(planned.plan.memory.arena_bytes, inputs[0].device)
    except torch.OutOfMemoryError as error:
        raise RefusedError(Refusal("there is too little device memory for a plan")) from error
    give_back = partial(memory.give, arena)
    live_bytes = partial(peak_bytes, planned.plan.graph, planned.plan.schedule)
    try:
        recording = Recording(
            planned.module,
            inputs,
            lowered=planned.lowered(arena),
            live_bytes=live_bytes,
            on_release=give_back,
            pieces=planned.pieces() if pool.is_empty else (),  # else it has what others have taken
            **conditions,
        )
    except BaseException:
        give_back()
        raise
    num_streams = planned.plan.schedule.num_streams
    if most_bytes is None or num_streams == 1:
        return recording
    try:
        taken = _taken_bytes(memory, pool) - before
        if taken > most_bytes:
            sizes = f"{taken / 2**20:.0f} MiB of memory, of {most_bytes / 2**20:.0f} that it may"
            raise RefusedError(Refusal(f"a plan on {num_streams} streams takes {sizes}"))
    except BaseException:
        recording.release()
        raise
    return recording


def _taken_bytes(memory: MemoryPool, pool: GraphPool) -> int:
    return (pool.num_bytes() or 0) + memory.statistics().used_bytes


def clear(memory: MemoryPool, device: torch.device) -> None:
    """Frees the memory that released recordings and eager steps have left."""
    gc.collect()  # of the graphs, which are cycles, and hold what their plans place
    memory.release()
    if device.type == "cuda":
        free_caches()
