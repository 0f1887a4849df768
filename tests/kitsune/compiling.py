"""Compilers whose pace the test sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

from kitsune.background import Background, wait_until_quiet


class Compiling:
    """Stands in for `compile_ahead`: so many parts at a time, which take until the test lets them end.

    Args:
        num_parts: of what is compiled first, next, and so on.

    Attributes:
        ends: of each of these the event that ends it, which is set also where nobody waits for it any more.
    """

    def __init__(self, *num_parts: int) -> None:
        self.ends = [threading.Event() for _ in num_parts]
        self._num_parts = num_parts

    def __call__(self, *_: object, limit_s: float) -> Iterator[Background[bool | None]]:
        for num_parts, end in zip(self._num_parts, self.ends, strict=True):
            try:
                yield Background([partial(end.wait, 60.0)] * num_parts, num_parts, end.set)
            finally:
                end.set()

    def finish(self, place: int) -> None:
        """Returns when that is compiled."""
        self.ends[place].set()
        wait_until_quiet()
