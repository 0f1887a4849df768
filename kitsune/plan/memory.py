"""What lies where: places of values in one block of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Places of values in an arena that all replays of a plan use.

    Attributes:
        offsets: by index of the value, the byte at which it begins; None for a value of no
            bytes, and for one that is left to the allocator.
        arena_bytes: the size of the arena.
        live_bytes: the most bytes that values alive together need, however they are placed and whoever places
            them; with several streams an upper bound.
    """

    offsets: tuple[int | None, ...]
    arena_bytes: int
    live_bytes: int
