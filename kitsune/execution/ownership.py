"""Whether somebody still refers to memory that a graph is about to overwrite.

Tensors handed out alias the graph's memory. A weak reference to the handed-out tensor would miss
its views and detached aliases, so the references to the storage are counted; `torch` has no public
call for that (its own CUDA graph trees use this one). Of a storage everybody gets the same Python
object, whose references are counted by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch

MOST_ALIKE = 2
"""Graphs that do the same; see `free_place`."""


class HandedOut:
    """Tensors of a graph whose aliases are given to the user."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._places = [storage._cdata for storage in self._storages]
        self._own = self._counts()

    def in_use(self, besides: Collection[int] = ()) -> bool:
        """Whether any of them is referred to by more than when this object was made.

        Args:
            besides: addresses of storages to which one more reference is known.
        """
        counts = self._counts()
        if counts == self._own:
            return False
        known = [storage.data_ptr() in besides for storage in self._storages]
        more = [*known, *[False] * len(known)]
        return any(count > own + one for count, own, one in zip(counts, self._own, more, strict=True))

    def _counts(self) -> list[int]:
        """Of the storages, then of their Python objects."""
        return [*map(torch._C._storage_Use_Count, self._places), *map(sys.getrefcount, self._storages)]


def free_place(alternates: Sequence[HandedOut]) -> int | None:
    """Which of up to `MOST_ALIKE` graphs that do the same may be replayed, the first for choice; None if none may.

    The second lies in the memory of the first, but for what both hand out: it may have been recorded over what the
    first reads and writes meanwhile, so that neither is replayed while anything of the second is in use.
    """
    if len(alternates) > 1 and alternates[1].in_use():
        return None
    for place, one in enumerate(alternates):
        if not one.in_use():
            return place
    return None
