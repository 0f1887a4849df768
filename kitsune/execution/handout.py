"""Gives the caller of a CUDA graph results of each replay in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kitsune.device import refuse_triton, stream_reader
from kitsune.kernels.casts import is_dense

PLACES = 128
"""Replays that one allocation serves, if results are small enough for `ROW_BYTES`."""

ROW_BYTES = 256 * 1024
"""The most that is allocated at once for a result: all of it lives while somebody keeps the result of one replay."""

MOST_BYTES = 16 * 1024
"""Of a result that is given away like this: a larger one is better copied by many programs."""

_ALIGNMENT_BYTES = 16

Replay = Callable[[], None]
Give = Callable[[Replay], list[torch.Tensor]]
"""Replays a graph; returns its first results, which the next replay leaves as they are."""


class Handout(Protocol):
    """Makes of the first results of a graph, which are small, others for each replay.

    Attributes:
        count: how many results.
    """

    count: int

    def prepare(self, values: Sequence[torch.Tensor]) -> None:
        """To be called before graphs are recorded, with values as their results will be."""

    def record(self, values: Sequence[torch.Tensor]) -> Give:
        """To be called at the end of a recording, with the results that every replay overwrites."""


def is_small(result: torch.Tensor) -> bool:
    """Whether a result may be given away; Triton has no complex numbers."""
    return result.is_floating_point() and 0 < result.nbytes <= MOST_BYTES and is_dense(result)


def handout(device: torch.device, count: int = 1) -> Handout:
    """One for graphs on a CUDA device that are never replayed at the same time, and all have results as the first has.

    Args:
        device: where they run.
        count: how many results; each `is_small`.
    """
    if refuse_triton(device, "handing results out") is None:
        return _Rows(device, count)
    return _Copies(count)


class _Copies:
    """Copies the results after each replay."""

    def __init__(self, count: int) -> None:
        self.count = count

    def prepare(self, values: Sequence[torch.Tensor]) -> None:
        """There is nothing to prepare."""

    def record(self, values: Sequence[torch.Tensor]) -> Give:
        def give(replay: Replay) -> list[torch.Tensor]:
            replay()
            return [value.clone() for value in values]

        return give


class _Rows:
    """Lets the graphs themselves write each result to the next one of a row of places.

    A copy would be one launch more, for the host and the device. A cell on the device holds the address of the next
    place. Whenever it may be another one than the host takes it for (a replay was interrupted), or the rows are full,
    or the stream is another, there are new rows.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.count = count
        self._device, self._current_stream = device, stream_reader(device)
        self._cells = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(count)]
        self._values: list[torch.Tensor] = []
        self._places: list[list[torch.Tensor]] = []  # by replay
        self._num_taken = self._num_written = 0
        self._stream = 0

    def prepare(self, values: Sequence[torch.Tensor]) -> None:
        from kitsune.kernels.hand_out_triton import hand_out  # Triton is optional

        for value, cell in zip(values, self._cells, strict=True):
            spare = torch.empty_like(value)
            cell.fill_(spare.data_ptr())
            hand_out(value, cell, _pitch(value))  # a recording must not compile it
        self._places = []
        self._num_taken = self._num_written = 0

    def record(self, values: Sequence[torch.Tensor]) -> Give:
        from kitsune.kernels.hand_out_triton import hand_out  # Triton is optional

        for value, cell in zip(values, self._cells, strict=True):
            hand_out(value, cell, _pitch(value))
        self._values = [torch.empty_like(value, device="meta") for value in values]
        return self._give

    def _give(self, replay: Replay) -> list[torch.Tensor]:
        stream = self._current_stream()
        is_known = self._num_taken == self._num_written and stream == self._stream
        if not is_known or self._num_taken == len(self._places):
            self._renew(stream)
        places = self._places[self._num_taken]
        self._num_taken += 1
        replay()
        self._num_written = self._num_taken
        return places

    def _renew(self, stream: int) -> None:
        self._places = []  # before there are other rows
        most_bytes = max(_pitch(value) * value.element_size() for value in self._values)
        count = min(PLACES, ROW_BYTES // most_bytes)
        rows = []
        for value, cell in zip(self._values, self._cells, strict=True):
            pitch = _pitch(value)
            row = torch.empty(count * pitch, dtype=value.dtype, device=self._device)
            places = row.as_strided((count, *value.shape), (pitch, *value.stride())).unbind()
            rows.append([place.data for place in places])  # each with a version of its own
            cell.fill_(row.data_ptr())
        self._places = list(map(list, zip(*rows, strict=True)))
        self._num_taken = self._num_written = 0
        self._stream = stream


def _pitch(value: torch.Tensor) -> int:
    """Elements from a place to the next, which is aligned like other tensors."""
    size = value.element_size()
    return -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // size
