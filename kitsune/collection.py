"""Keeps Python's garbage collector out of the way for a while."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No collection takes place inside, in whichever thread.

    While a CUDA graph is recorded, one could free CUDA memory or graphs, which would break the
    recording. Planning makes no cycles, but so many values that collections over all else in memory
    would take half of its time.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


class _Pauses:
    """Those that several threads may ask for at the same time: the last one to end lets the collector go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()


_pauses = _Pauses()


@functools.cache
def spare_garbage_in_forks() -> None:
    """Processes forked from this one leave alone what is garbage here when they begin, from now on.

    Parts of it may be CUDA's graphs and events. A forked process, as the worker of a data loader is, cannot use CUDA:
    it would not survive an attempt to destroy them.
    """
    if hasattr(os, "register_at_fork"):  # else there are no forks
        os.register_at_fork(after_in_child=gc.freeze)
