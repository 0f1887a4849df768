"""Replays that read their inputs where they lie, as far as these keep coming from the same addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from kitsune.errors import RefusedError
from kitsune.execution.in_order import Outputs
from kitsune.loop.recording import Recording
from kitsune.native.facts import Fact

# Batches in a ring (of a prefetcher, of an allocator that hands out what was just given back) come back to few places.
# Some more are passed through when the host and the device change their pace.
_MOST_RECORDINGS = 8
_MOST_PLACES = 64
_SIGHTINGS = 20  # of each: a ring of eight is known after 160 steps


class Record(Protocol):
    """Records a step."""

    def __call__(self, inputs: Sequence[torch.Tensor], *, in_place: Collection[int]) -> Recording:
        """A recording for `inputs`, which are copied in at each replay but for those at the positions `in_place`.

        Raises:
            RefusedError: it cannot be recorded.
        """


class ByAddress:
    """A recorded step that copies its inputs in, beside others of the same step for inputs at certain addresses.

    The loop decides where its batches lie. Where they come back to few places, the first 8 that are seen often get
    recordings of their own, which read them there. Such a recording is replayed only with tensors that lie where it
    reads, so it sees what a kernel launched in its place would see, and their memory is used again only as after such
    a kernel. The recordings share the memory of all that they compute.

    Args:
        record: makes the recordings.
        inputs: of the present step.
        copied: the positions of inputs that are new tensors at each step.
        is_worthwhile: whether copies take enough of a step for more recordings; asked once, when batches have come
            back to a place often.

    Raises:
        RefusedError: not even the recording that copies can be made.

    Attributes:
        executor: what runs the step where inputs are copied.
        recording_seconds: wall time spent on recordings in the midst of replays.
    """

    def __init__(
        self, record: Record, inputs: Sequence[torch.Tensor], copied: Collection[int], is_worthwhile: Callable[[], bool]
    ) -> None:
        self._record, self._copied, self._is_worthwhile = record, sorted(copied), is_worthwhile
        self._copying = record(inputs, in_place=())
        self.executor = self._copying.executor
        self._at: dict[tuple[int, ...], Recording] = {}
        self.recording_seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Drops all recordings but the one that copies; looks for places anew."""
        for recording in self._at.values():
            recording.release()
        self._at.clear()
        self._sightings: dict[tuple[int, ...], int] = {}
        self._looking = self.executor.keeps_outputs  # others use their inputs where they lie anyway

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """As `Recording.fits`."""
        return self._copying.fits(inputs)

    def facts(self, count: int) -> list[Fact]:
        """As `Recording.facts`."""
        return self._copying.facts(count)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        if not self._looking and not self._at:
            return self._copying(inputs)
        place = tuple([inputs[position].data_ptr() for position in self._copied])
        recording = self._at.get(place)
        if recording is None and self._looking:
            recording = self._look(place, inputs)
        return (recording or self._copying)(inputs)

    def release(self) -> None:
        """Gives the memory of all recordings back."""
        self.restart()
        self._copying.release()

    def _look(self, place: tuple[int, ...], inputs: Sequence[torch.Tensor]) -> Recording | None:
        """Counts a sighting; a recording for `place` if there have been enough."""
        self._sightings[place] = self._sightings.get(place, 0) + 1
        if len(self._sightings) > _MOST_PLACES:
            self._looking = False
        if self._sightings[place] < _SIGHTINGS or not self._looking:
            return None
        if len(self._at) == _MOST_RECORDINGS:
            self._looking = False
            return None
        if not self._at and not self._is_worthwhile():
            self._looking = False
            return None
        if self._overlap(inputs):
            return None
        started = time.perf_counter()
        try:
            recording = self._at[place] = self._record(inputs, in_place=self._copied)
        except RefusedError:  # the others serve as well
            self._looking = False
            return None
        finally:
            self.recording_seconds += time.perf_counter() - started
        return recording

    def _overlap(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether inputs that would be read in place share memory with others, which the step may write before."""
        copied = set(self._copied)
        storages = {tensor.untyped_storage().data_ptr() for place, tensor in enumerate(inputs) if place not in copied}
        return any(inputs[place].untyped_storage().data_ptr() in storages for place in copied)
