"""The mean gradient of several calls."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable

import torch

from kitsune.capture.step_program import Phase, StepSpec
from kitsune.capture.trace import same_layout


class Accumulators:
    """Sums of gradients between updates, for steps with `accumulate` above 1.

    Eager and replayed calls add to the same tensors, so that they can alternate.
    """

    def __init__(self, spec: StepSpec) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        self._spec = spec
        self._calls = 0
        self._with_gradient: set[int] = set()
        self._num_references: dict[int, tuple[int, int]] = {}  # to the sums, while an eager call runs
        self._kept: set[int] = set()  # the sums that somebody has kept since

    def phase(self) -> Phase:
        """What the coming call is."""
        if self._spec.accumulate == 1:
            return "whole"
        for param in self._spec.params():
            total = self.sums.get(id(param))
            if total is None or total.shape != param.shape:
                self.sums[id(param)] = torch.zeros_like(param, requires_grad=False)
                self._with_gradient.discard(id(param))
            elif not _alike(total, param):
                self.sums[id(param)] = torch.empty_like(param, requires_grad=False).copy_(total)
        return "last" if self._calls == self._spec.accumulate - 1 else "accumulate"

    def advance(self) -> None:
        """Counts a call."""
        self._calls = (self._calls + 1) % self._spec.accumulate
        if self._calls == 0:
            self._with_gradient.clear()

    def covered_by(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Whether every parameter with a gradient so far is among `params`."""
        return not self._with_gradient or self._with_gradient <= set(map(id, params))

    def added(self, params: Iterable[torch.nn.Parameter]) -> None:
        """A replay has added gradients of `params` to the sums."""
        self._with_gradient.update(map(id, params))

    def begin(self, phase: Phase) -> None:
        """Leaves in `.grad` what an eager call finds there: the model and the loss may look at it."""
        if phase != "whole":
            self.attach()
            return
        for param in self._spec.owned():
            if param.grad is not None:
                param.grad = None

    def attach(self) -> None:
        """Lets autograd add to the sums: `.grad` becomes the sum, or None where there is none yet.

        Parameters that were frozen since keep what they have.
        """
        for param in self._spec.owned():
            param.grad = self.sums[id(param)] if id(param) in self._with_gradient else None

    def attach_and_watch(self) -> None:
        """As `attach`, for an eager call, whose code may keep one of the sums."""
        self._num_references.update((key, _num_references(total)) for key, total in self.sums.items())
        self.attach()

    def detach(self) -> None:
        """Takes from `.grad` what autograd has added."""
        for param in self._spec.owned():
            if param.grad is None:
                continue
            if param.grad is not self.sums[id(param)]:
                self.sums[id(param)].copy_(param.grad)
                self._with_gradient.add(id(param))
            param.grad = None
        self._note_kept()

    def mark(self) -> frozenset[int]:
        """Which sums hold gradients, to be told to `return_to`. (What they hold is for the caller to keep.)"""
        return frozenset(self._with_gradient)

    def return_to(self, mark: frozenset[int]) -> None:
        """Undoes what calls since `mark` have told."""
        self._with_gradient = set(mark)

    def clear(self) -> None:
        """Sets the sums to zero, after an update that ran eagerly. One that somebody has kept gives way to another.

        They must not be in `.grad` any more.
        """
        self._note_kept()
        for key, total in self.sums.items():
            if key in self._kept:
                self.sums[key] = torch.zeros_like(total)
            else:
                total.zero_()
        self._kept.clear()

    def _note_kept(self) -> None:
        """Notes the sums that the call which has ended has left in other hands."""
        for key, total in self.sums.items():
            before = self._num_references.get(key)
            if before is not None and any(map(operator.gt, _num_references(total), before)):
                self._kept.add(key)
        self._num_references.clear()


def _num_references(tensor: torch.Tensor) -> tuple[int, int]:
    """To the object, and to its memory: views have that alone."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata)


def _alike(total: torch.Tensor, param: torch.nn.Parameter) -> bool:
    return total.dtype == param.dtype and total.device == param.device and same_layout(total, param)
