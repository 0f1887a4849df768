"""The captured backward pass of a part of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kitsune.capture.layout import TensorLayout
from kitsune.capture.partition import BackwardPart
from kitsune.execution.in_order import InOrder
from kitsune.execution.ownership import HandedOut
from kitsune.loop.recording import Recording

# Which roots have no gradient hardly ever changes.
_MOST_RECORDINGS = 4


class BackwardGraph:
    """Goes back from some of a call's roots; see `BackwardPart`.

    There is a graph for the case that all of them have a gradient, and one for each other case that was met.

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
        self._layouts, self._gradients = layouts, gradients
        self._records = recording is not None
        self._cases = {frozenset[int](): _Case(InOrder(part.backward), recording)}
        self._wanted: list[frozenset[int]] = []  # have been met, and are not recorded
        self._note_gradients()

    def __call__(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], *, have_moved: bool
    ) -> list[torch.Tensor | None]:
        """Gradients at `part.gradient_places`; None for those that depend on roots without a gradient only.

        Args:
            have_moved: whether `saved` lie elsewhere than in the forward pass's memory, where the graph reads them.
        """
        if all(tangent is None for tangent in tangents):
            return [None for _ in self.part.depends]
        pairs = zip(tangents, self._layouts, strict=True)
        inputs = [*saved, *(layout.fit(tangent) for tangent, layout in pairs if tangent is not None)]
        missing = frozenset(index for index, tangent in enumerate(tangents) if tangent is None)
        if missing not in self._cases:
            self._cases[missing] = _Case(InOrder(self.part.without(missing)), None)
            if self._records:
                self._wanted.append(missing)
        case = self._cases[missing]
        if case.recording is not None and not have_moved and not case.handed_out.in_use():
            grads = case.recording(inputs)
        else:
            if self._records:
                self.num_partial += case.recording is None
                self.num_copied += case.recording is not None and not have_moved
            grads = case.in_order(inputs)
        return [None if grad is None else grad.detach() for grad in self.part.spread(missing, grads)]

    @property
    def has_new_cases(self) -> bool:
        """Whether there are cases to be recorded, whose gradients will lie elsewhere then."""
        return bool(self._wanted)

    def record_cases(self, record: Callable[[BackwardPart, frozenset[int]], Recording | None]) -> None:
        """Records the cases that were met for the first time. To be called while all that was saved is there.

        Args:
            record: records `part.without(missing)`, if that can be.
        """
        while self._wanted:
            missing = self._wanted[0]
            if sum(case.recording is not None for case in self._cases.values()) < _MOST_RECORDINGS:
                self._cases[missing] = _Case(self._cases[missing].in_order, record(self.part, missing))
                self._note_gradients()
            self._wanted.pop(0)

    def drop_recording(self) -> None:
        """Gives the graphs up, unless their gradients are in use: something else takes their place."""
        if self._records and not any(case.handed_out.in_use() for case in self._cases.values()):
            self.release()

    def forget_gradients(self) -> None:
        """Takes the static gradients out of `gradients`."""
        for case in self._cases.values():
            for tensor in case.static:
                self._gradients.pop(tensor.data_ptr(), None)

    def release(self) -> None:
        """Gives the graphs and their memory back."""
        self.forget_gradients()
        self._records, self._wanted = False, []
        for missing, case in self._cases.items():
            if case.recording is not None:
                case.recording.release()
                self._cases[missing] = _Case(case.in_order, None)

    def _note_gradients(self) -> None:
        for case in self._cases.values():
            self._gradients.update((tensor.data_ptr(), tensor) for tensor in case.static)


class _Case:
    """What goes back where certain roots have no gradient: operator by operator, and recorded if there is a recording.

    Attributes:
        static: the gradients that the recording gives.
        handed_out: the same, to know whether somebody still refers to them.
    """

    def __init__(self, in_order: InOrder, recording: Recording | None) -> None:
        self.in_order = in_order
        self.recording = recording
        self.static = recording.executor.static_outputs() if recording is not None else []
        self.handed_out = HandedOut(self.static)
