"""Keeps Python's garbage collector out of the way for a while."""

from __future__ import annotations

import gc
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
