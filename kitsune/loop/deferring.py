"""Calls that are put off until `backward()`, which replays them with the loss and the backward pass as one graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from kitsune.capture.ambient import autocast_dtype
from kitsune.capture.layout import TensorLayout, copied
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
        stable: positions of the inputs that are the same tensors at all calls.
    """

    def __init__(self, tail_step: TailStep, stable: Collection[int]) -> None:
        self.tail_step = tail_step
        self._stable = stable
        self._in_vain = 0  # calls that somebody asked for before `backward()`, since one was replayed with it
        self.inputs: list[Tensor] = []
        self.turn = 0  # how many calls have had their arguments here

    def may_begin(self, tails: Tails) -> bool:
        """Whether the next call may be put off: nothing but time tells when it runs, and the loop has a known tail."""
        is_known = bool(tails.known) and not tails.are_refused()
        return is_known and self._in_vain < _MOST_IN_VAIN and self.tail_step.is_repeatable

    def take(self, flat: Sequence[Tensor]) -> None:
        """Copies the arguments of a call, which may be edited or used for something else before it runs."""
        self.turn += 1
        if not self.inputs:
            self.inputs = [
                tensor.detach() if place in self._stable else TensorLayout.of(tensor).empty()
                for place, tensor in enumerate(flat)
            ]
        with torch.no_grad():
            for place, tensor in enumerate(flat):
                if place not in self._stable:
                    self.inputs[place].copy_(tensor, non_blocking=True)

    def arguments(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """`flat` with the arguments as they were when they were taken."""
        return [one if place in self._stable else copied(self.inputs[place]) for place, one in enumerate(flat)]

    def stable(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that are not copied."""
        return [flat[place] for place in self._stable]

    def have_moved(self, flat: Sequence[Tensor]) -> bool:
        """Whether inputs that are not copied have other memory than when the first arguments were taken."""
        return any(flat[place].data_ptr() != self.inputs[place].data_ptr() for place in self._stable)

    def was_in_vain(self) -> None:
        """A call that was put off had to run before `backward()`."""
        self._in_vain += 1

    def was_worthwhile(self) -> None:
        """A call that was put off was replayed with its backward pass."""
        self._in_vain = 0


class DeferredCall:
    """A call that is put off; see `kitsune.loop.following.FollowedCall`.

    Args:
        graphs: of the call.
        deferral: keeps its arguments, from now on until the next one takes the place.
        flat: its inputs.
    """

    def __init__(self, graphs: Graphs, deferral: Deferral, flat: Sequence[Tensor]) -> None:
        self._graphs, self._deferral, self._flat = graphs, deferral, flat
        self._stable = deferral.stable(flat)
        self._versions = [tensor._version for tensor in self._stable]
        self._trained = [tensor.requires_grad for tensor in self._stable]
        self._run: FollowedCall | None = None
        deferral.take(flat)
        self._turn = deferral.turn

    def outputs(self) -> Sequence[Tensor]:
        if self._run is None:
            self._refuse_edits()
            if self._deferral.have_moved(self._flat):
                raise EditedError(_EDITED)
            self._deferral.was_in_vain()
            with torch.enable_grad(), self._trained_as_then():
                self._run = self._graphs.call_now(self._deferral.arguments(self._flat))
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
        if autocast_dtype(self._flat[0].device.type) is not None:
            return None
        results = self._deferral.tail_step.replay(tail, self._deferral.inputs, wanted, whole=True)
        if results is not None:
            self._deferral.was_worthwhile()
            self._graphs.has_replayed_loss = True
        return results

    def _refuse_edits(self) -> None:
        if self._turn != self._deferral.turn or [tensor._version for tensor in self._stable] != self._versions:
            raise EditedError(_EDITED)

    @contextmanager
    def _trained_as_then(self) -> Iterator[None]:
        """Within, what required a gradient at the call does so: autograd's graph was to be made then."""
        now = [tensor.requires_grad for tensor in self._stable]
        try:
            for tensor, trained, then in zip(self._stable, now, self._trained, strict=True):
                if trained != then:
                    tensor.requires_grad_(then)
            yield
        finally:
            for tensor, trained in zip(self._stable, now, strict=True):
                if tensor.requires_grad != trained:
                    tensor.requires_grad_(trained)
