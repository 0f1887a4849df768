"""The streams of a loop: made once, with priority for the first."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kitsune.execution.stream_pool import MAX_STREAMS, StreamPool


class Stream(NamedTuple):
    """Stands in for `torch.cuda.Stream`."""

    device: torch.device
    priority: int
    number: int


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """All streams that are made."""
    streams: list[Stream] = []

    def make(device: torch.device, priority: int) -> Stream:
        streams.append(Stream(device, priority, len(streams)))
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    return streams


def test_the_first_stream_alone_has_priority(made: list[Stream]) -> None:
    streams = StreamPool().on(torch.device("cuda", 0), MAX_STREAMS)
    assert list(streams) == made
    first, *others = (stream.priority for stream in made)
    assert others == [0] * (MAX_STREAMS - 1)
    assert first < 0  # CUDA's lower numbers come first


def test_streams_are_made_once_for_each_device(made: list[Stream]) -> None:
    pool, here, there = StreamPool(), torch.device("cuda", 0), torch.device("cuda", 1)
    two = pool.on(here, 2)
    assert pool.on(here) == two[:1]
    assert pool.on(here, 3)[:2] == two
    assert pool.on(there, 1) != two[:1]
    assert [(stream.device, stream.priority) for stream in made] == [(here, -1), (here, 0), (here, 0), (there, -1)]


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("count", [0, MAX_STREAMS + 1])
def test_there_are_one_to_eight(count: int) -> None:
    with pytest.raises(AssertionError):
        StreamPool().on(torch.device("cuda", 0), count)


@pytest.mark.gpu
def test_the_device_knows_the_priorities() -> None:
    least, greatest = torch.cuda.Stream.priority_range()
    first, second = StreamPool().on(torch.device("cuda", 0), 2)
    assert greatest <= first.priority < second.priority <= least
