"""The signals that end a run, as an exception: whatever was begun is ended on the way out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from harness.supervisor import ENDING


class Interrupted(KeyboardInterrupt):
    """A key, a signal, or a terminal that was closed asks this process to end: ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Where one of these signals comes, raises :class:`Interrupted` once; later ones do not disturb the ending.

    Those that are ignored already, such as that of a closed terminal under ``nohup``, stay so.
    """
    heeded = {number: before for number in ENDING if (before := signal.getsignal(number)) is not signal.SIG_IGN}

    def interrupt(number: int, frame: object) -> None:
        for other in heeded:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, before in heeded.items():
            signal.signal(number, before)
