"""Which recording replays a step, by where its inputs lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitsune.engine import by_address, region
from kitsune.engine.by_address import ByAddress, Places
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from tests.kitsune import static_memory
from tests.kitsune.training import batch, compare

SIGHTINGS = 5


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_address, "_SIGHTINGS", SIGHTINGS)


class Fake:
    """A recording: returns its number, and demands inputs that lie where it reads."""

    def __init__(self, number: int, inputs: Sequence[Tensor], in_place: Collection[int], keeps_outputs: bool) -> None:
        self.number, self.in_place, self.released = number, list(in_place), False
        self.executor = SimpleNamespace(keeps_outputs=keeps_outputs)
        self._places = {position: inputs[position].data_ptr() for position in in_place}

    def __call__(self, inputs: Sequence[Tensor]) -> int:
        assert not self.released
        assert all(inputs[position].data_ptr() == place for position, place in self._places.items())
        return self.number

    def release(self) -> None:
        assert not self.released
        self.released = True


class Records:
    """Makes fakes, as many as it may."""

    def __init__(self, most: int = 100, keeps_outputs: bool = True) -> None:
        self.made: list[Fake] = []
        self._most, self._keeps_outputs = most, keeps_outputs

    def __call__(self, inputs: Sequence[Tensor], *, in_place: Collection[int]) -> Any:
        if len(self.made) == self._most:
            raise RefusedError(Refusal("too little memory"))
        self.made.append(Fake(len(self.made), inputs, in_place, self._keeps_outputs))
        return self.made[-1]


WEIGHT = torch.zeros(1)
ASKED: list[None] = []


def replays(records: Records, worthwhile: bool = True) -> ByAddress:
    ASKED.clear()
    return ByAddress(records, [torch.zeros(1), WEIGHT], [0], Places(lambda: (ASKED.append(None), worthwhile)[1]))


def ring(size: int) -> Iterator[list[Tensor]]:
    buffers = [torch.zeros(1) for _ in range(size)]
    for index in range(1000):
        yield [buffers[index % size], WEIGHT]


def run(step: ByAddress, batches: Iterator[list[Tensor]], steps: int) -> list[Any]:
    return [step(next(batches)) for _ in range(steps)]


def test_places_that_come_back_get_recordings_of_their_own() -> None:
    records = Records()
    step, batches = replays(records), ring(3)
    assert run(step, batches, 3 * (SIGHTINGS - 1)) == [0] * 12
    assert (step.take_recording_seconds(), step.num_recordings) == (0, 1)
    assert run(step, batches, 6) == [1, 2, 3, 1, 2, 3]
    assert step.num_recordings == 4
    assert step.take_recording_seconds() > 0
    assert step.take_recording_seconds() == 0
    assert [made.in_place for made in records.made] == [[], [0], [0], [0]]
    assert step([torch.ones(1), WEIGHT]) == 0
    assert len(ASKED) == 1
    step.release()
    assert all(made.released for made in records.made)


def test_many_places_are_copied_from() -> None:
    records = Records()
    step = replays(records)
    assert set(run(step, ring(by_address._MOST_PLACES + 1), 900)) == {0}
    assert len(records.made) == 1


def test_of_some_places_the_first_get_recordings() -> None:
    records = Records()
    step, batches = replays(records), ring(by_address._MOST_RECORDINGS + 2)
    run(step, batches, 10 * SIGHTINGS)
    assert run(step, batches, 10) == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert len(records.made) == 9


def test_a_new_place_now_and_then_leaves_the_others_as_they_are() -> None:
    records = Records()
    step, batches = replays(records), ring(2)
    run(step, batches, 2 * SIGHTINGS)
    kept = [torch.ones(1) for _ in range(50)]
    assert {step([tensor, WEIGHT]) for tensor in kept} == {0}
    assert run(step, batches, 2) == [1, 2]


def test_what_lies_in_the_memory_of_others_is_copied() -> None:
    """The step may write there before it has read all of its inputs."""
    records = Records()
    both = torch.zeros(2)
    step = ByAddress(records, [torch.zeros(1), both[:1]], [0], Places(lambda: True))
    assert {step([both[1:], both[:1]]) for _ in range(100)} == {0}
    assert len(records.made) == 1


def test_another_way_to_replay_the_step_knows_the_places() -> None:
    places, batches = Places(lambda: True), ring(3)
    run(ByAddress(Records(), [torch.zeros(1), WEIGHT], [0], places), batches, 3 * SIGHTINGS)
    other = ByAddress(Records(), [torch.zeros(1), WEIGHT], [0], places)
    assert run(other, batches, 6) == [1, 2, 3, 1, 2, 3]
    assert other([torch.ones(1), WEIGHT]) == 0


@pytest.mark.parametrize(
    ("size", "steps"),
    [
        pytest.param(1, by_address._MOST_RECORDINGS * SIGHTINGS, id="few"),
        pytest.param(by_address._MOST_RECORDINGS, by_address._MOST_RECORDINGS * SIGHTINGS, id="as many as are kept"),
        pytest.param(1000, 30 + 1, id="many"),
    ],
)
def test_it_has_looked_once_no_place_is_missing(size: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_address, "_MOST_PLACES", 30)
    records = Records()
    step, batches = replays(records), ring(size)
    for _ in range(steps):
        assert not step.has_looked
        step(next(batches))
    assert step.has_looked
    assert len(records.made) == 1 + (size if size <= by_address._MOST_RECORDINGS else 0)
    assert len(ASKED) == 1


def test_where_copies_cost_little_there_is_nothing_to_look_for() -> None:
    assert replays(Records(), worthwhile=False).has_looked
    assert replays(Records(keeps_outputs=False)).has_looked
    assert len(ASKED) == 0


def test_where_copies_cost_little_they_stay() -> None:
    records = Records()
    step = replays(records, worthwhile=False)
    assert set(run(step, ring(1), 100)) == {0}
    assert (len(records.made), len(ASKED)) == (1, 1)


def test_where_no_more_can_be_recorded_the_others_serve() -> None:
    records = Records(most=2)
    step = replays(records)
    assert set(run(step, ring(3), 100)) == {0, 1}
    assert len(records.made) == 2


def test_an_executor_that_copies_nothing_is_left_alone() -> None:
    records = Records(keeps_outputs=False)
    assert set(run(replays(records), ring(1), 100)) == {0}
    assert (len(records.made), len(ASKED)) == (1, 0)


def test_copies_matter_by_their_share_of_a_replay() -> None:
    chooser: Any = SimpleNamespace(replay_seconds=1e-3)
    assert region._copies_matter(chooser, 4.0)
    assert not region._copies_matter(chooser, 2.0)
    assert not region._copies_matter(SimpleNamespace(replay_seconds=None), 2.0)


@pytest.mark.usefixtures("replay_is_faster")
def test_a_training_that_reads_in_place_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches lie in three buffers, which are written again and again; some come from elsewhere."""
    places: list[Collection[int]] = []
    record = Recording.__init__

    def count(recording: Recording, *args: Any, in_place: Collection[int] = (), **more: Any) -> None:
        places.append(in_place)
        record(recording, *args, in_place=in_place, **more)

    monkeypatch.setattr(Recording, "__init__", count)
    static_memory.install(monkeypatch)
    monkeypatch.setattr(region, "_copies_matter", lambda *_: True)
    buffers = [batch(index)[0] for index in range(3)]

    def batches(index: int) -> Any:
        (x, y), _ = batch(index)
        if index % 7 == 6:
            return (x, y), {}
        for buffer, fresh in zip(buffers[index % 3], (x, y), strict=True):
            buffer.copy_(fresh)
        return buffers[index % 3], {}

    compare("train_step", steps=60, batches=batches, replays=55, mode="auto")
    assert [len(positions) for positions in places] == [0, 2, 2, 2]


def test_nothing_is_recorded_while_compilers_run(noise: Callable[[bool], None]) -> None:
    records, batches = Records(), ring(2)
    step = replays(records)
    noise(True)
    assert run(step, batches, 10 * SIGHTINGS) == [0] * (10 * SIGHTINGS)
    noise(False)
    run(step, batches, 4 * SIGHTINGS)
    assert set(run(step, batches, 4)) == {1, 2}
