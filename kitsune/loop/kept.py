"""What a replayed call keeps for backward passes that come in parts, as autograd's own nodes would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kitsune.loop.following import SPENT

_EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input of the "
    "model was written to between its call and the backward pass"
)


def can_go_back(context: Any) -> bool:
    """Whether a backward pass through `context` of an `autograd.Function` would find all that was saved, unedited."""
    try:
        _ = context.saved_tensors
    except RuntimeError:
        return False
    return True


def is_freed(context: Any) -> bool:
    """Whether autograd has let go of what `context` of an `autograd.Function` has saved."""
    try:
        _ = context.saved_tensors
    except RuntimeError as error:
        return "second time" in str(error)  # else an input was edited: there is no other way to learn which it was
    return False


class Kept:
    """Saved tensors of a call whose outputs have backward passes apart.

    Autograd lets go of all that a node has saved after its first backward pass, and checks all of it before each.
    Without Kitsune each of the outputs had nodes of its own.

    Args:
        groups: for each differentiable output, the number of its group.
        tensors: what is saved.
        readers: for each tensor, the indices of the differentiable outputs whose backward passes read it.
    """

    def __init__(
        self, groups: Sequence[int], tensors: Sequence[torch.Tensor], readers: Sequence[frozenset[int]]
    ) -> None:
        # Outputs may be among them; as they are they would keep their own node alive.
        self._tensors = [(tensor.detach(), tensor._version) for tensor in tensors]
        self._groups, self._readers = groups, readers
        self._done, self._latest = set[int](), set[int]()
        self._is_freed = False

    def take(self, context: Any, given: set[int]) -> list[torch.Tensor]:
        """The tensors, for a backward pass from the outputs `given`, by index.

        Raises:
            RuntimeError: one like it ran already, or something that it reads was edited in place.
        """
        self._is_freed = self._is_freed or is_freed(context)
        if self._is_freed:
            self._done |= self._latest
        self._latest = {self._groups[index] for index in given}
        if self._latest & self._done:
            raise RuntimeError(SPENT)
        pairs = zip(self._tensors, self._readers, strict=True)
        if any(tensor._version != version for (tensor, version), readers in pairs if readers & given):
            raise RuntimeError(_EDITED)
        return [tensor for tensor, _ in self._tensors]

    def is_over(self) -> bool:
        """Whether every part has run."""
        return self._done | self._latest >= set(self._groups)
