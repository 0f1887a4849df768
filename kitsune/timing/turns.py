"""Turns on a device: what is timed must not meet other work.

In a process that trains, nothing else of it runs on the device while something is timed. A process beside it asks for a
turn before it times anything, which the training grants between two of its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Turn = Callable[[], AbstractContextManager[None]]
"""Within, the device is this process's alone."""

_ask: Turn = nullcontext
_depth = 0
_waited_seconds = 0.0


def ask_by(turn: Turn) -> None:
    """From now on turns of this process are asked for by `turn`, on the thread that times."""
    global _ask
    _ask = turn


@contextmanager
def turn() -> Iterator[None]:
    """Within, the device is this process's alone, also where it is already."""
    global _depth, _waited_seconds
    if _depth:
        yield
        return
    asked = time.monotonic()
    with _ask():
        _waited_seconds += time.monotonic() - asked
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


def clock() -> float:
    """Seconds, as by `time.monotonic`, but that it stands still while this process waits for a turn."""
    return time.monotonic() - _waited_seconds
