"""Keeps Python's garbage collector out of the way for a while."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No collection takes place inside.

    While a CUDA graph is recorded, one could free CUDA memory or graphs, which would break the
    recording. Planning makes no cycles, but so many values that collections over all else in memory
    would take half of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def spare_garbage_in_forks() -> None:
    """Processes forked from this one leave alone what is garbage here when they begin, from now on.

    Parts of it may be CUDA's graphs and events. A forked process, as the worker of a data loader is, cannot use CUDA:
    it would not survive an attempt to destroy them.
    """
    if hasattr(os, "register_at_fork"):  # else there are no forks
        os.register_at_fork(after_in_child=gc.freeze)
