"""Maps a function over many items on all processors."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_CHUNKS = 8  # for each process: some items take longer than others


def mapped(function: Callable[[T], R], items: Sequence[T], *, is_long: bool) -> list[R]:
    """What the function returns for each item, in their order.

    Args:
        function: one of a module, whose results can be pickled, as the items can.
        is_long: whether it takes longer than to start processes. Where they cannot be forked, each of which would have
            to import everything anew, this process does it all.
    """
    processes = min(len(items), _processors())
    if not is_long or processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return list(map(function, items))
    chunk = max(1, len(items) // (_CHUNKS * processes))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(function, items, chunksize=chunk))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
