"""Ctrl-C waits for the end of a capture."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Within, SIGINT is only noted; who handles it is told at the end. The second one passes at once.

    While Python runs below an operator, as in a trace, torch's C++ takes an exception out of nowhere for an error of
    its own: it may drop it, tell it as another one, or end the process. In other threads than the main one, where
    Python handles no signals, nothing changes; nor where it is not Python that handles them.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Holding):
        yield
        return
    holding = _Holding(handler)
    signal.signal(signal.SIGINT, holding)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is holding:
            signal.signal(signal.SIGINT, handler)
        if holding.noted is not None:
            handler(*holding.noted)


class _Holding:
    """A handler of SIGINT, in place of another one."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self.noted: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.noted is None:
            self.noted = number, frame
        else:
            self._handler(number, frame)
