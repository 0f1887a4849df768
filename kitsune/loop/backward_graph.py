"""The captured backward pass of a part of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kitsune.capture.layout import TensorLayout
from kitsune.capture.partition import BackwardPart, without_tangents
from kitsune.execution.in_order import InOrder
from kitsune.execution.ownership import HandedOut
from kitsune.loop.recording import Recording


class BackwardGraph:
    """Goes back from some of a call's roots; see `BackwardPart`.

    Gradients alias the graph's memory where the graph keeps its outputs; while any of them is still referred to, the
    backward pass runs operator by operator into new memory instead.

    Args:
        part: what it does.
        layouts: of the gradients of its roots.
        recording: of the part; there is none where a recording keeps no memory.
        gradients: static gradients by address; entries are added here.

    Attributes:
        num_copied: how often it ran into new memory, to spare gradients still in use.
        num_partial: how often it ran operator by operator, as some of its roots had no gradient.
    """

    def __init__(
        self,
        part: BackwardPart,
        layouts: Sequence[TensorLayout],
        recording: Recording | None,
        gradients: dict[int, torch.Tensor],
    ) -> None:
        self.part = part
        self.num_copied = self.num_partial = 0
        self._layouts, self._recording, self._gradients = layouts, recording, gradients
        self._in_order = {frozenset[int](): InOrder(part.backward)}
        self._static = recording.executor.static_outputs() if recording is not None else []
        gradients.update((tensor.data_ptr(), tensor) for tensor in self._static)
        self._handed_out = HandedOut(self._static)

    def __call__(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], *, have_moved: bool
    ) -> list[torch.Tensor | None]:
        """Gradients at `part.gradient_places`; None for those that depend on roots without a gradient only.

        Args:
            have_moved: whether `saved` lie elsewhere than in the forward pass's memory, where the graph reads them.
        """
        pairs = zip(tangents, self._layouts, strict=True)
        inputs = [*saved, *(layout.empty().zero_() if one is None else layout.fit(one) for one, layout in pairs)]
        missing = frozenset(index for index, tangent in enumerate(tangents) if tangent is None)
        if self._recording is not None and not missing and not have_moved and not self._handed_out.in_use():
            grads = self._recording(inputs)
        else:
            if self._recording is not None:
                self.num_partial += bool(missing)
                self.num_copied += not missing and not have_moved
            grads = self._without(missing)(inputs)
        return [
            None if needs and needs <= missing else grad.detach()
            for grad, needs in zip(grads, self.part.depends, strict=True)
        ]

    def drop_recording(self) -> None:
        """Gives the graph up, unless its gradients are in use: something else takes its place."""
        if self._recording is not None and not self._handed_out.in_use():
            self.release()
            self._static, self._handed_out = [], HandedOut([])

    def forget_gradients(self) -> None:
        """Takes the static gradients out of `gradients`."""
        for tensor in self._static:
            self._gradients.pop(tensor.data_ptr(), None)

    def release(self) -> None:
        """Gives the graph and its memory back."""
        self.forget_gradients()
        if self._recording is not None:
            self._recording.release()
            self._recording = None

    def _without(self, missing: frozenset[int]) -> InOrder:
        if missing not in self._in_order:
            self._in_order[missing] = InOrder(without_tangents(self.part.backward, missing))
        return self._in_order[missing]
