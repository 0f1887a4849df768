"""Captures one at a time, whichever threads make them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kitsune.capture.interrupts import held_interrupts
from kitsune.errors import Refusal, RefusedError

_capturing = threading.RLock()


@contextmanager
def sole_capture() -> Iterator[None]:
    """Within, no other thread captures anything, and Ctrl-C waits.

    Dynamo and `make_fx` replace functions of torch meanwhile, which each other would take for the user's, and which
    captures in several threads would restore in another order. None waits for another one: its call may be waiting for
    the other's, in a collective operation.

    Raises:
        RefusedError: another thread is in the midst of a capture.
    """
    with held_interrupts():
        if not _capturing.acquire(blocking=False):
            raise RefusedError(Refusal("another thread is in the midst of a capture"), passing=True)
        try:
            yield
        finally:
            _capturing.release()
