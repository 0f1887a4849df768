"""The captured backward pass of a part of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kitsune.capture.layout import TensorLayout
from kitsune.capture.partition import BackwardPart
from kitsune.engine.recording import Recording
from kitsune.execution.in_order import InOrder
from kitsune.execution.ownership import MOST_ALIKE, HandedOut, free_place

# Which roots have no gradient hardly ever changes.
_MOST_CASES = 4

Record = Callable[[BackwardPart, frozenset[int], Recording | None], Recording | None]
"""Records `part.without(missing)`, if that can be; beside a recording of it, where there is one: see `free_place`."""


class BackwardGraph:
    """Goes back from some of a call's roots; see `BackwardPart`.

    There is a graph for the case that all of them have a gradient, and one for each other case that was met.

    Gradients alias the graph's memory where the graph keeps its outputs. While any of them is still referred to, as
    where those of several backward passes are added up, a second graph is replayed, with gradients of its own; while
    those are, too, and until there is one, the backward pass runs operator by operator into new memory.

    Args:
        part: what it does.
        layouts: of the gradients of its roots.
        recording: of the part; there is none where a recording keeps no memory.
        gradients: static gradients by address; entries are added here.

    Attributes:
        num_copied: how often it ran into new memory, to spare gradients still in use.
        num_kept: of these, how often there was no other graph to come.
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
        self.num_copied = self.num_kept = self.num_partial = 0
        self._layouts, self._gradients = layouts, gradients
        self._records = recording is not None
        self._cases = {frozenset[int](): _Case(InOrder(part.backward))}
        self._wanted: list[frozenset[int]] = []  # a recording of these, or another one, would have been of use
        if recording is not None:
            self._keep(frozenset(), recording)

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
        case = self._cases.get(missing)
        if case is None:
            case = self._cases[missing] = _Case(InOrder(self.part.without(missing)))
        recording = None if have_moved else case.free()
        if recording is not None:
            grads = recording(inputs)
        else:
            if self._records:
                self.num_partial += not case.recordings
                is_copied = bool(case.recordings) and not have_moved
                self.num_copied += is_copied
                self.num_kept += is_copied and not case.may_record
                if not have_moved and case.may_record and missing not in self._wanted:
                    self._wanted.append(missing)
            grads = case.in_order(inputs)
        found = [None if grad is None else grad.detach() for grad in self.part.spread(missing, grads)]
        for sparse, place in zip(self.part.sparse, self.part.coordinates, strict=True):
            values = found[sparse.place]
            if values is not None:
                found[sparse.place] = sparse.made(values, saved[place])
        return found

    @property
    def has_new_cases(self) -> bool:
        """Whether a case is to be recorded for the first time: its gradients will lie elsewhere then."""
        return any(not self._cases[missing].recordings for missing in self._wanted)

    @property
    def wants_recordings(self) -> bool:
        """Whether there is anything to be recorded."""
        return bool(self._wanted)

    def record_cases(self, record: Record) -> None:
        """Records what would have been of use. To be called while all that was saved is there."""
        while self._wanted:
            missing = self._wanted[0]
            case = self._cases[missing]
            recording = None
            if case.recordings or sum(bool(one.recordings) for one in self._cases.values()) < _MOST_CASES:
                recording = record(self.part, missing, case.recordings[0] if case.recordings else None)
            if recording is None:
                case.may_record = False
            else:
                self._keep(missing, recording)
            self._wanted.pop(0)

    def drop_recording(self) -> None:
        """Gives the graphs up, unless their gradients are in use: something else takes their place."""
        if self._records and not any(case.in_use() for case in self._cases.values()):
            self.release()

    def forget_gradients(self) -> None:
        """Takes the static gradients out of `gradients`."""
        for case in self._cases.values():
            for tensor in case.static():
                self._gradients.pop(tensor.data_ptr(), None)

    def release(self) -> None:
        """Gives the graphs and their memory back."""
        self.forget_gradients()
        self._records, self._wanted = False, []
        for case in self._cases.values():
            case.release()

    def _keep(self, missing: frozenset[int], recording: Recording) -> None:
        static = self._cases[missing].add(recording)
        self._gradients.update((tensor.data_ptr(), tensor) for tensor in static)


class _Case:
    """What goes back where certain roots have no gradient: operator by operator, and recorded.

    Attributes:
        may_record: whether another recording may be of use.
    """

    def __init__(self, in_order: InOrder) -> None:
        self.in_order = in_order
        self.recordings: list[Recording] = []
        self.may_record = True
        self._static: list[list[torch.Tensor]] = []
        self._handed_out: list[HandedOut] = []

    def add(self, recording: Recording) -> list[torch.Tensor]:
        """Returns the gradients that it will give, for as long as it keeps them."""
        static = recording.executor.static_outputs()
        self.recordings.append(recording)
        self._static.append(static)
        self._handed_out.append(HandedOut(static))
        self.may_record = len(self.recordings) < MOST_ALIKE
        return static

    def free(self) -> Recording | None:
        """One whose gradients nobody refers to."""
        place = free_place(self._handed_out)
        return None if place is None else self.recordings[place]

    def static(self) -> list[torch.Tensor]:
        """All gradients of recordings."""
        return [tensor for some in self._static for tensor in some]

    def in_use(self) -> bool:
        """Whether somebody refers to any of these."""
        return any(one.in_use() for one in self._handed_out)

    def release(self) -> None:
        for recording in self.recordings:
            recording.release()
        for some in (self.recordings, self._static, self._handed_out):
            some.clear()
