"""Maps a function over many items on all processors."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_CHUNKS = 8  # for each process: some items take longer than others


def mapped(function: Callable[[T], R], items: Sequence[T], *, is_long: bool) -> list[R]:
    """What the function returns for each item, in their order.

    Args:
        function: its results can be pickled, as the items can.
        is_long: whether it takes longer than to start processes. Where they cannot be forked, each of which would have
            to import everything anew, or other threads are at work, whose locks a fork would hold for ever, this
            process does it all.
    """
    processes = min(len(items), _processors())
    if not is_long or processes < 2 or not _can_fork():
        return list(map(function, items))
    chunk = max(1, len(items) // (_CHUNKS * processes))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(function,)) as pool:
        return list(pool.map(_applied, items, chunksize=chunk))


_function: Callable[[Any], Any]
"""Of a process that was forked for it: what it applies. It came along with the fork, so it need not be pickled."""


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function


def _applied(item: object) -> Any:
    return _function(item)


def _can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
