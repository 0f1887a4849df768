"""Calls that are put off until `backward()`, which replays them with the loss and the backward pass as one graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from kitsune.capture.layout import TensorLayout, copied
from kitsune.execution.copier import Copier
from kitsune.loop.following import EditedError, FollowedCall, Tail, Tails
from kitsune.loop.tail_step import TailStep

# A loop that looks at outputs before `backward()` does so at each iteration, or now and then.
_MOST_IN_VAIN = 3

_EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter or a "
    "buffer of the model was written to, or got other memory, between its call and backward() or a look at its output; "
    "with defer_loss the call had not run by then"
)


class Graphs(Protocol):
    """The graphs of a call.

    Attributes:
        has_replayed_loss: whether the backward pass of the latest call was replayed from a loss on.
    """

    has_replayed_loss: bool

    def call_now(self, flat: Sequence[Tensor]) -> FollowedCall:
        """Runs a call."""


class Deferral:
    """Decides whether calls are put off, and keeps the arguments of the one that is.

    Args:
        tail_step: replays what follows the calls.
        stable: positions of the inputs that are the same tensors at all calls, with gradients or without.

    Attributes:
        in_vain: calls that somebody asked for before `backward()`, since one was replayed with it.
        inputs: those of the latest call, always the same tensors.
        tensors: of these, the ones that are no copies, as autograd knows them.
        trained: whether each of these required a gradient at the calls.
        turn: how many calls have had their arguments here.
    """

    def __init__(self, tail_step: TailStep, stable: Collection[int]) -> None:
        self.tail_step = tail_step
        self.in_vain = 0
        self.inputs: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.trained: list[bool] = []
        self.turn = 0
        self._stable = stable
        self._copiers: list[tuple[int, Copier]] = []  # of arguments, by their places

    def may_begin(self, tails: Tails) -> bool:
        """Whether the next call may be put off: nothing but time tells when it runs, and the loop has a known tail."""
        return self.in_vain < _MOST_IN_VAIN and self.tail_step.is_repeatable and tails.are_usable()

    def take(self, flat: Sequence[Tensor]) -> None:
        """Copies the arguments of a call, which may be edited or used for something else before it runs."""
        self.turn += 1
        if not self.inputs:
            self._prepare(flat)
        for place, copy_in in self._copiers:
            copy_in(flat[place])

    def arguments(self) -> list[Tensor]:
        """The inputs as autograd knows them, with memory of their own for arguments."""
        tensors = iter(self.tensors)
        return [next(tensors) if place in self._stable else copied(memory) for place, memory in enumerate(self.inputs)]

    def versions(self) -> list[int]:
        """How often each of `tensors` has been written to."""
        return [tensor._version for tensor in self.tensors]

    def have_moved(self) -> bool:
        """Whether any of `tensors` has other memory than when the first arguments were taken."""
        stable = (one for place, one in enumerate(self.inputs) if place in self._stable)
        return any(one.data_ptr() != other.data_ptr() for one, other in zip(self.tensors, stable, strict=True))

    def _prepare(self, flat: Sequence[Tensor]) -> None:
        self.tensors = [tensor for place, tensor in enumerate(flat) if place in self._stable]
        self.trained = [tensor.requires_grad for tensor in self.tensors]
        self.inputs = [
            tensor.detach() if place in self._stable else TensorLayout.of(tensor).empty()
            for place, tensor in enumerate(flat)
        ]
        arguments = [(place, one) for place, one in enumerate(self.inputs) if place not in self._stable]
        self._copiers = [(place, Copier(memory)) for place, memory in arguments]


class DeferredCall:
    """A call that is put off; see `kitsune.loop.following.FollowedCall`.

    Args:
        graphs: of the call.
        deferral: keeps its arguments, from now on until the next one takes the place.
        flat: its inputs.
    """

    def __init__(self, graphs: Graphs, deferral: Deferral, flat: Sequence[Tensor]) -> None:
        self._graphs, self._deferral = graphs, deferral
        self._run: FollowedCall | None = None
        deferral.take(flat)
        self._turn = deferral.turn
        self._versions = deferral.versions()

    def outputs(self) -> Sequence[Tensor]:
        deferral = self._deferral
        if self._run is None:
            self._refuse_edits()
            if deferral.have_moved():
                raise EditedError(_EDITED)
            deferral.in_vain += 1
            with torch.enable_grad(), self._trained_as_then():
                self._run = self._graphs.call_now(deferral.arguments())
        return self._run.outputs()

    def keep(self) -> None:
        self.outputs()
        assert self._run is not None
        self._run.keep()

    def accepts(self, tail: Tail) -> bool:
        return self._deferral.tail_step.accepts(tail)

    def replay(self, tail: Tail, wanted: Sequence[int]) -> Mapping[int, Tensor] | None:
        if self._run is not None:
            return self._run.replay(tail, wanted)
        self._refuse_edits()
        deferral = self._deferral
        results = deferral.tail_step.replay(tail, deferral.inputs, wanted, whole=True)
        if results is not None:
            deferral.in_vain = 0
            self._graphs.has_replayed_loss = True
        return results

    def _refuse_edits(self) -> None:
        if self._turn != self._deferral.turn or self._deferral.versions() != self._versions:
            raise EditedError(_EDITED)

    @contextmanager
    def _trained_as_then(self) -> Iterator[None]:
        """Within, what required a gradient at the call does so: autograd's graph was to be made then."""
        tensors = self._deferral.tensors
        now = [tensor.requires_grad for tensor in tensors]
        try:
            for tensor, trained, then in zip(tensors, now, self._deferral.trained, strict=True):
                if trained != then:
                    tensor.requires_grad_(then)
            yield
        finally:
            for tensor, trained in zip(tensors, now, strict=True):
                if tensor.requires_grad != trained:
                    tensor.requires_grad_(trained)
