"""Records graphs by their plans."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kitsune.errors import Refusal, RefusedError
from kitsune.execution.cuda_graph import free_caches
from kitsune.loop.planning import Planned
from kitsune.loop.recording import Recording
from kitsune.memory.pool import MemoryPool
from kitsune.schedule import peak_bytes


def record_planned(
    memory: MemoryPool, planned: Planned, inputs: Sequence[torch.Tensor], **conditions: Any
) -> Recording:
    """Records a plan in an arena of `memory`, which it shares with other plans that never run at the same time.

    Args:
        conditions: those of a `Recording`.

    Raises:
        RefusedError: it cannot be recorded, or there is too little memory.
    """
    try:
        arena = memory.arena(planned.plan.memory.arena_bytes, inputs[0].device)
    except torch.OutOfMemoryError as error:
        raise RefusedError(Refusal("there is too little device memory for a plan")) from error
    give_back = partial(memory.give, arena)
    live_bytes = partial(peak_bytes, planned.plan.graph, planned.plan.schedule)
    try:
        return Recording(
            planned.module,
            inputs,
            lowered=planned.lowered(arena),
            live_bytes=live_bytes,
            on_release=give_back,
            **conditions,
        )
    except BaseException:
        give_back()
        raise


def clear(memory: MemoryPool, device: torch.device) -> None:
    """Frees the memory that released recordings and eager steps have left."""
    gc.collect()  # of the graphs, which are cycles, and hold what their plans place
    memory.release()
    if device.type == "cuda":
        free_caches()
