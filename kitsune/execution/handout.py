"""Gives the caller of a CUDA graph a result of each replay in memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kitsune.device import refuse_triton, stream_reader

PLACES = 128
"""Results that one allocation serves."""

Replay = Callable[[], None]
Give = Callable[[Replay], torch.Tensor]
"""Replays a graph; returns its result, which the next replay leaves as it is."""


class Handout(Protocol):
    """Makes of the result of a graph, a tensor of one element, one tensor for each replay."""

    def prepare(self, value: torch.Tensor) -> None:
        """To be called before graphs are recorded, with a value as their result will be."""

    def record(self, value: torch.Tensor) -> Give:
        """To be called at the end of a recording, with the result that every replay overwrites."""


def handout(device: torch.device) -> Handout:
    """One for graphs on a CUDA device that are never replayed at the same time."""
    return _Row(device) if refuse_triton(device, "handing results out") is None else _Copy()


class _Copy:
    """Copies the result after each replay."""

    def prepare(self, value: torch.Tensor) -> None:
        """There is nothing to prepare."""

    def record(self, value: torch.Tensor) -> Give:
        def give(replay: Replay) -> torch.Tensor:
            replay()
            return value.clone()

        return give


class _Row:
    """Lets the graphs themselves write each result to the next one of a row of places.

    A copy would be one launch more, for the host and the device. A cell on the device holds the address of the next
    place. Whenever it may be another one than the host takes it for (a replay was interrupted), or the row is full,
    or the stream is another, there is a new row.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._current_stream = device, stream_reader(device)
        self._cell = torch.zeros((), dtype=torch.int64, device=device)
        self._value: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []
        self._num_taken = self._num_written = 0
        self._stream = 0

    def prepare(self, value: torch.Tensor) -> None:
        from kitsune.kernels.hand_out_triton import hand_out  # Triton is optional

        spare = torch.empty_like(value)
        self._cell.fill_(spare.data_ptr())
        hand_out(value, self._cell)  # a recording must not compile it
        self._places = []
        self._num_taken = self._num_written = 0

    def record(self, value: torch.Tensor) -> Give:
        from kitsune.kernels.hand_out_triton import hand_out  # Triton is optional

        hand_out(value, self._cell)
        self._value = torch.empty_like(value, device="meta")
        return self._give

    def _give(self, replay: Replay) -> torch.Tensor:
        stream = self._current_stream()
        is_known = self._num_taken == self._num_written and stream == self._stream
        if not is_known or self._num_taken == len(self._places):
            self._renew(stream)
        place = self._places[self._num_taken]
        self._num_taken += 1
        replay()
        self._num_written = self._num_taken
        return place

    def _renew(self, stream: int) -> None:
        assert self._value is not None
        self._places = []  # before there is another row
        row = torch.empty(PLACES, dtype=self._value.dtype, device=self._device)
        places = row.view(PLACES, *self._value.shape).unbind()
        self._places = [place.data for place in places]  # each with a version of its own
        self._num_taken = self._num_written = 0
        self._cell.fill_(row.data_ptr())
        self._stream = stream
