"""Replays that read their inputs where they lie, as far as these keep coming from the same addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from kitsune.background import is_quiet
from kitsune.engine.recording import Recording
from kitsune.errors import RefusedError
from kitsune.execution.in_order import Outputs
from kitsune.native.facts import Fact

Place = tuple[int, ...]

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


class Places:
    """Where a step's inputs have lain, and which of these places they come back to.

    Args:
        is_worthwhile: whether copies take enough of a step for more recordings; asked once.
    """

    def __init__(self, is_worthwhile: Callable[[], bool]) -> None:
        self._is_worthwhile = is_worthwhile
        self._sightings: dict[Place, int] = {}
        self._kept: set[Place] = set()
        self._has_asked = self._is_closed = False

    @property
    def are_final(self) -> bool:
        """Whether none will be kept any more."""
        if not self._has_asked:
            self._has_asked = True
            self._is_closed |= not self._is_worthwhile()
        return self._is_closed

    @property
    def are_none(self) -> bool:
        """Whether none is kept or ever will be."""
        return self._is_closed and not self._kept

    def see(self, place: Place) -> bool:
        """Counts a sighting; whether `place` is one of the first that were seen often."""
        if place not in self._kept and not self._is_closed:
            self._sightings[place] = self._sightings.get(place, 0) + 1
            if self._sightings[place] >= _SIGHTINGS and not self.are_final:
                self._kept.add(place)
            self._is_closed |= len(self._kept) == _MOST_RECORDINGS or len(self._sightings) > _MOST_PLACES
        return place in self._kept


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
        places: where those have lain, in this step however it is recorded.

    Raises:
        RefusedError: not even the recording that copies can be made.

    Attributes:
        executor: what runs the step where inputs are copied.
    """

    def __init__(self, record: Record, inputs: Sequence[torch.Tensor], copied: Collection[int], places: Places) -> None:
        self._record, self._copied, self._places = record, sorted(copied), places
        self._copying = record(inputs, in_place=())
        self.executor = self._copying.executor
        self._at: dict[Place, Recording] = {}
        self._looking = self.executor.keeps_outputs  # others use their inputs where they lie anyway
        self._replays = 0
        self._recording_seconds = 0.0

    @property
    def num_recordings(self) -> int:
        """How many there are: a replay that makes another one takes longer than the next."""
        return 1 + len(self._at)

    @property
    def has_looked(self) -> bool:
        """Whether a ring of as many places as are kept would be known, or those that are found do not matter."""
        return not self._looking or self._places.are_final or self._replays >= _MOST_RECORDINGS * _SIGHTINGS

    def take_recording_seconds(self) -> float:
        """Wall time that replays have spent on recordings since this was last asked."""
        seconds, self._recording_seconds = self._recording_seconds, 0.0
        return seconds

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """As `Recording.fits`."""
        return self._copying.fits(inputs)

    @property
    def written(self) -> frozenset[int]:
        """As `Recording.written`."""
        return self._copying.written

    def refuse_written(self, inputs: Sequence[torch.Tensor]) -> None:
        """As `Recording.refuse_written`."""
        self._copying.refuse_written(inputs)

    def misfit(self, inputs: Sequence[torch.Tensor], names: Mapping[int, str]) -> str:
        """As `Recording.misfit`."""
        return self._copying.misfit(inputs, names)

    def facts(self, count: int) -> list[Fact]:
        """As `Recording.facts`."""
        return self._copying.facts(count)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        if not self._looking and not self._at:
            return self._copying(inputs)
        self._replays += 1
        place = tuple([inputs[position].data_ptr() for position in self._copied])
        recording = self._at.get(place)
        if recording is None and self._looking and is_quiet():
            recording = self._look(place, inputs)
        return (recording or self._copying)(inputs)

    def release(self) -> None:
        """Gives the memory of all recordings back."""
        for recording in self._at.values():
            recording.release()
        self._at.clear()
        self._copying.release()

    def _look(self, place: Place, inputs: Sequence[torch.Tensor]) -> Recording | None:
        """A new recording for `place`, if inputs come back to it and there can be one."""
        if not self._places.see(place):
            self._looking = not self._places.are_none
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
            self._recording_seconds += time.perf_counter() - started
        return recording

    def _overlap(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether inputs that would be read in place share memory with others, which the step may write before."""
        copied = set(self._copied)
        storages = {tensor.untyped_storage().data_ptr() for place, tensor in enumerate(inputs) if place not in copied}
        return any(inputs[place].untyped_storage().data_ptr() in storages for place in copied)
