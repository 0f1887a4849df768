"""The contest as a state machine, under a clock that the test sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch

from kitsune.engine import contest
from kitsune.engine.contest import Contest
from kitsune.errors import Refusal, RefusedError

INPUTS = [torch.zeros(1)]
RUNOFF_TURN = contest._RUNOFF_TURN


T = TypeVar("T")


@pytest.fixture(autouse=True)
def fast_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the host's clock is a tenth of a microsecond after the one before."""
    looks = itertools.count()
    monkeypatch.setattr(contest.time, "perf_counter", lambda: next(looks) * 1e-7)


@pytest.fixture(autouse=True)
def full_runoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_RUNOFF_TURN", RUNOFF_TURN)


class Clock:
    """The device's."""

    def __init__(self) -> None:
        self.us = 0.0


class Stopwatch:
    """Reads the device's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._times = clock, list[float]()

    def time(self, work: Callable[[], T]) -> T:
        began = self._clock.us
        result = work()
        self._times.append(self._clock.us - began)
        return result

    def read(self) -> list[float]:
        times, self._times = self._times, []
        return times


class Runner:
    """Takes `cost_us` at each call, and returns its name and how often it was called."""

    def __init__(self, name: str, clock: Clock, cost_us: float) -> None:
        self.name, self.cost_us, self.calls, self.released, self.num_recordings = name, cost_us, 0, False, 1
        self._clock = clock

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert not self.released
        assert inputs is INPUTS
        self.calls += 1
        self._clock.us += self.cost_us
        return []

    def release(self) -> None:
        assert not self.released
        self.released = True


class Race:
    """A contest between runners of these costs; the first is there from the beginning."""

    def __init__(self, *costs_us: float | None) -> None:
        self.clock = Clock()
        self.costs_us = {str(place): cost for place, cost in enumerate(costs_us)}
        self.made: list[Runner] = []
        self.refusals: list[str] = []
        self.alive_when_cleared: list[list[str]] = []
        self.limit_us = math.inf
        self._others = [self._maker(str(place)) for place in range(1, len(costs_us))]
        self.contest = Contest(
            self._maker("0"),
            INPUTS,
            Stopwatch(self.clock),
            lambda error: self.refusals.append(error.refusal.reason),
            lambda: self.alive_when_cleared.append(self.alive()),
            lambda: self.limit_us,
        )

    def open(self) -> None:
        self.contest.open(self._others, INPUTS)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.contest(INPUTS)

    def alive(self) -> list[str]:
        return [runner.name for runner in self.made if not runner.released]

    def _maker(self, name: str) -> Callable[[Sequence[torch.Tensor]], Runner]:
        def make(inputs: Sequence[torch.Tensor]) -> Runner:
            assert inputs is INPUTS
            cost_us = self.costs_us[name]
            if cost_us is None:
                raise RefusedError(Refusal(f"no {name}"))
            runner = Runner(name, self.clock, cost_us)
            self.made.append(runner)
            return runner

        return make


class Host:
    """A loop that takes `rest_us` beside the launches of its steps; it goes on at once, or waits for each step."""

    def __init__(
        self, race: Race, monkeypatch: pytest.MonkeyPatch, launches_us: dict[str, float], rest_us: float, waits: bool
    ) -> None:
        self._race, self.rest_us, self._waits = race, rest_us, waits
        self._us = 0.0
        monkeypatch.setattr(contest.time, "perf_counter", lambda: self._us * 1e-6)
        run = Runner.__call__

        def launched(runner: Runner, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self._us += launches_us[runner.name]
            return run(runner, inputs)

        monkeypatch.setattr(Runner, "__call__", launched)

    def run(self, steps: int) -> None:
        for step in range(steps):
            before_us = self._race.clock.us
            self._race.run(1)
            self._us += self.rest_us * (1 + step % 3 / 100)
            if self._waits:
                self._us += self._race.clock.us - before_us


def test_the_fastest_wins_and_is_made_anew_alone() -> None:
    race = Race(10.0, 12.0, 7.0, 9.0)
    race.open()
    race.run(300)
    assert not race.contest.trying
    assert race.contest.winner is race.made[-1]
    assert race.contest.winner.name == "2"
    assert race.contest.place == 2
    assert race.contest.times_us == (10.0, 12.0, 7.0, 9.0)
    assert [runner.name for runner in race.made] == ["0", "1", "2", "3", "2"]
    assert race.alive() == ["2"]
    assert race.alive_when_cleared == [[]]
    race.contest.release()
    assert race.alive() == []


def test_nothing_is_tried_before_it_is_opened() -> None:
    race = Race(10.0, 1.0)
    race.run(50)
    assert len(race.made) == 1
    assert race.contest.times_us == (None,)


def test_the_first_stays_where_the_difference_is_noise() -> None:
    race = Race(10.0, 9.95)
    race.open()
    race.run(50)
    assert race.contest.place == 0
    assert race.alive() == ["0"]


@pytest.mark.parametrize(
    ("costs_us", "place"),
    [
        pytest.param((2000.0, 1000.0, 995.0, 994.0, 992.0), 1, id="less than a hundredth"),
        pytest.param((2000.0, 1000.0, 995.0, 994.0, 989.0), 2, id="a hundredth against the first of them"),
        pytest.param((2000.0, 1000.0, 995.0, 988.0, 980.0), 3, id="a hundredth against the second"),
        pytest.param((40.0, 30.0, 29.2, 28.8, 28.6), 1, id="less than several streams cost"),
        pytest.param((40.0, 30.0, 29.2, 28.8, 28.4), 2, id="more than that against the first of them"),
    ],
)
def test_the_simplest_of_those_that_are_about_as_fast_wins(costs_us: tuple[float, ...], place: int) -> None:
    race = Race(*costs_us)
    race.open()
    race.run(300)
    assert race.contest.place == place
    assert race.alive() == [str(place)]


def test_the_fastest_meets_the_best_of_the_simpler_ones_again() -> None:
    race = Race(20.0, 10.0, 12.0, 9.0)
    race.open()
    while len(race.made) < 4:
        race.run(1)
    race.costs_us["1"] = race.made[1].cost_us = 8.0  # ran slower when it had its turn
    race.run(300)
    assert race.contest.place == 1
    assert race.contest.times_us == (20.0, 8.0, 12.0, 9.0)
    assert race.alive() == ["1"]


def test_an_entrant_that_cannot_be_made_is_passed_over() -> None:
    race = Race(10.0, None, 5.0, None)
    race.open()
    race.run(300)
    assert race.refusals == ["no 1", "no 3"]
    assert race.contest.place == 2
    assert race.contest.times_us == (10.0, None, 5.0, None)


def test_where_none_can_be_made_the_first_stays() -> None:
    race = Race(10.0, None)
    race.open()
    race.run(50)
    assert race.contest.place == 0
    assert not race.contest.trying


def test_a_single_entrant_is_not_tried_but_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0)
    race.open()
    race.run(20)
    assert not race.contest.trying
    assert race.contest.times_us == (None,)
    race.run(40)
    assert race.contest.times_us == (10.0,)
    assert race.contest.settled == 0
    race.made[0].cost_us = 20.0
    race.run(40)
    assert race.contest.times_us == (10.0,), "it may pass"
    race.run(30)
    assert race.contest.times_us == (20.0,)
    assert race.contest.settled == 1  # the choice against eager is to be made again
    assert len(race.made) == 1


def test_what_else_the_loop_does_is_not_counted() -> None:
    """Between any two steps the loop does something that takes ever longer."""
    race = Race(10.0, 8.0)
    race.open()
    for step in range(300):
        race.contest(INPUTS)
        race.clock.us += 100.0 + step
    assert race.contest.place == 1
    assert race.contest.times_us == (10.0, 8.0)


def test_a_turn_begins_when_all_recordings_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second entrant is the faster one once it has made eight more, each in the midst of a replay."""
    run = Runner.__call__

    def record(runner: Runner, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if runner.name == "1" and runner.num_recordings <= 8:
            runner.num_recordings += 1
            runner.cost_us = 8.0 if runner.num_recordings > 8 else 100.0
        return run(runner, inputs)

    monkeypatch.setattr(Runner, "__call__", record)
    race = Race(10.0, 100.0)
    race.open()
    race.run(300)
    assert race.contest.place == 1
    assert race.contest.times_us == (10.0, 8.0)


def test_recordings_made_later_do_not_put_off_looking_for_slowdowns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0)
    race.open()
    race.run(20)
    race.made[0].num_recordings += 1
    race.run(11)
    assert race.contest.times_us == (10.0,)


def test_where_there_is_no_room_for_trials_the_winner_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0, 5.0)
    race.open()
    race.run(300)
    winner = race.contest.winner
    race.costs_us["0"] = None
    winner.cost_us = 20.0
    race.run(100)
    assert set(race.refusals) == {"no 0"}
    assert race.contest.winner is winner
    assert not winner.released


def test_every_step_is_run_once() -> None:
    race = Race(10.0, 12.0, 7.0)
    race.open()
    race.run(300)
    assert sum(runner.calls for runner in race.made) == 300


def test_a_first_slow_replay_does_not_count() -> None:
    race = Race(10.0, 5.0)
    race.open()
    race.made[0].cost_us = 1000.0
    race.run(1)
    race.made[0].cost_us = 10.0
    race.run(300)
    assert race.contest.times_us == (10.0, 5.0)


def test_a_device_that_became_faster_in_the_meantime_favours_no_one() -> None:
    race = Race(10.0, 6.0)
    race.open()
    while len(race.made) < 2:
        race.run(1)
    race.made[0].cost_us = 5.0  # all ran slower when the first had its turn
    race.run(300)
    assert race.contest.place == 0
    assert race.contest.times_us == (5.0, 6.0)


def test_making_is_counted_once() -> None:
    race = Race(10.0, 5.0)
    race.open()
    race.run(300)
    assert race.contest.take_making_seconds() > 0
    assert race.contest.take_making_seconds() == 0
    race.run(10)
    assert race.contest.take_making_seconds() == 0


def test_a_winner_that_cannot_be_made_again_leaves_the_first() -> None:
    race = Race(10.0, 5.0)
    race.open()
    while len(race.made) < 2:
        race.run(1)
    race.costs_us["1"] = None
    race.run(300)
    assert race.refusals == ["no 1"]
    assert race.contest.place == 0
    assert race.alive() == ["0"]


class Crowded(Race):
    """A race some of whose runners cannot be made again, once all have been."""

    def __init__(self, *costs_us: float, refused: Sequence[int]) -> None:
        super().__init__(*costs_us)
        self._refused = {str(place) for place in refused}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.made) == len(self.costs_us):
                self.costs_us |= dict.fromkeys(self._refused)
            super().run(1)


def test_of_winners_that_cannot_be_made_again_the_next_best() -> None:
    race = Crowded(100.0, 50.0, 80.0, 40.0, 70.0, refused=(1, 3))
    race.open()
    race.run(300)
    assert race.refusals == ["no 3", "no 1"]
    assert race.contest.place == 4
    assert race.alive() == ["4"]
    assert race.alive_when_cleared == [[], [], []], "each is made alone"
    assert race.contest.times_us == (100.0, 50.0, 80.0, 40.0, 70.0)


def test_what_could_not_be_made_again_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Crowded(100.0, 50.0, 80.0, refused=(1,))
    race.open()
    race.run(300)
    assert race.contest.place == 2
    race.made[-1].cost_us = 300.0
    race.costs_us["2"] = 300.0
    race.run(600)
    assert race.refusals == ["no 1"]
    assert race.contest.place == 0


def test_where_none_can_be_made_again_the_first() -> None:
    race = Crowded(100.0, 50.0, 40.0, refused=(1, 2))
    race.open()
    race.run(300)
    assert race.refusals == ["no 2", "no 1"]
    assert race.contest.place == 0


def test_what_slows_the_loop_down_is_not_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    race = Crowded(100.0, 60.0, 50.0, refused=(1,))
    host = Host(race, monkeypatch, {"0": 10.0, "1": 11.0, "2": 90.0}, rest_us=10.0, waits=True)
    race.open()
    host.run(400)
    assert not race.contest.trying
    assert race.refusals == ["no 1"]
    assert race.contest.place == 0


def test_what_takes_long_to_launch_is_not_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    race = Crowded(100.0, 60.0, 55.0, 50.0, refused=(3,))
    host = Host(race, monkeypatch, {"0": 10.0, "1": 11.0, "2": 300.0, "3": 12.0}, rest_us=10.0, waits=False)
    race.open()
    host.run(400)
    assert race.refusals == ["no 3"]
    assert race.contest.place == 1


def test_if_not_even_the_first_can_be_made_the_call_is_refused() -> None:
    race = Race(10.0, 5.0)
    race.open()
    while len(race.made) < 2:
        race.run(1)
    race.costs_us.update({"0": None, "1": None})
    with pytest.raises(RefusedError, match="no 0") as caught:
        race.run(300)
    assert caught.value.passing
    assert race.alive() == []
    with pytest.raises(RefusedError, match="no 0"):
        Race(None)


def test_drift_opens_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0, 5.0)
    race.open()
    race.run(300)
    assert race.contest.place == 1
    winner = race.contest.winner
    winner.cost_us = 5.5
    race.run(100)
    assert race.contest.winner is winner
    assert not race.contest.trying
    winner.cost_us = 20.0  # another process shares the device, say; a new one takes 5 again
    race.run(300)
    assert race.contest.place == 1
    assert race.contest.winner is not winner
    assert winner.released
    assert race.contest.times_us == (10.0, 5.0)
    assert race.alive() == ["1"]
    made = len(race.made)
    race.contest.winner.cost_us = 20.0
    race.run(60 - race.contest._replays)  # the next look comes after 60
    assert len(race.made) == made
    race.run(300)
    assert len(race.made) > made


@pytest.mark.parametrize(("limit_us", "reopened"), [(5.5, True), (5.9, False)])
def test_what_becomes_slower_than_eager_is_tried_again(
    limit_us: float, reopened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little slower it has become."""
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0, 5.0)
    race.limit_us = limit_us
    race.open()
    race.run(300)
    winner = race.contest.winner
    assert race.contest.place == 1
    winner.cost_us = 5.8
    race.run(300)
    assert (race.contest.winner is not winner) == reopened


def test_a_slowdown_that_passes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0, 5.0)
    race.open()
    race.run(300)
    winner = race.contest.winner
    for _ in range(4):
        race.run(30 - race.contest._replays)
        winner.cost_us = 20.0
        race.run(1)
        winner.cost_us = 5.0
        race.run(29)  # of the samples of a look, one is as before
        winner.cost_us = 20.0
        race.run(30)
        winner.cost_us = 5.0
        race.run(30)
    assert race.contest.winner is winner


def test_a_step_takes_at_least_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is faster on the device is no use where the host takes longer to launch it."""
    race = Race(20.0, 12.0, 16.0)
    host = Host(race, monkeypatch, {"0": 8.0, "1": 18.0, "2": 14.0}, rest_us=0.0, waits=False)
    race.open()
    host.run(300)
    assert race.contest.place == 2
    assert race.contest.times_us == (20.0, 12.0, 16.0), "of the device"


@pytest.mark.parametrize(
    ("rest_us", "waits", "place"),
    [
        pytest.param(20.0, False, 0, id="the host sets the pace"),
        pytest.param(1.0, False, 1, id="the device sets the pace"),
        pytest.param(20.0, True, 1, id="each waits for the other"),
        pytest.param(200.0, True, 1, id="each waits for the other and the loop takes long"),
    ],
)
def test_what_slows_the_loop_down_is_not_chosen(
    rest_us: float, waits: bool, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is faster on the device, and takes a little longer to launch."""
    race = Race(10.0, 7.0)
    host = Host(race, monkeypatch, {"0": 4.0, "1": 5.0}, rest_us, waits)
    race.open()
    host.run(300)
    assert not race.contest.trying
    assert race.contest.place == place
    assert race.contest.times_us == (10.0, 7.0)


def test_a_slow_device_is_not_overlooked_while_its_queue_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes longer than the host needs for a step. The host would notice once the queue is full."""
    race = Race(200.0, 40.0)
    host = Host(race, monkeypatch, {"0": 4.0, "1": 5.0}, rest_us=45.0, waits=False)
    race.open()
    host.run(300)
    assert race.contest.place == 1


def test_other_work_on_the_host_does_not_hide_what_is_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it happens, the host is slow whenever the second one has its turn."""
    race = Race(117.0, 42.0)
    host = Host(race, monkeypatch, {"0": 26.0, "1": 27.0}, rest_us=30.0, waits=False)
    race.open()
    for _ in range(300):
        host.rest_us = 150.0 if race.contest.winner.name == "1" else 30.0
        host.run(1)
    assert not race.contest.trying
    assert race.contest.place == 1


def test_a_host_that_is_often_disturbed_does_not_make_a_launch_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it happens, it is disturbed in most launches of the second one and in most of the loop's steps then."""
    race = Race(79.0, 22.0)
    launches_us = {"0": 26.0, "1": 26.0}
    host = Host(race, monkeypatch, launches_us, rest_us=50.0, waits=False)
    race.open()
    for step in range(300):
        is_disturbed = race.contest.winner.name == "1" and step % 5 > 0
        launches_us["1"] = 60.0 if is_disturbed else 26.0
        host.rest_us = 150.0 if is_disturbed else 50.0
        host.run(1)
    assert not race.contest.trying
    assert race.contest.place == 1


def test_after_drift_the_pace_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0, 7.0)
    launches_us = {"0": 4.0, "1": 5.0}
    host = Host(race, monkeypatch, launches_us, rest_us=20.0, waits=False)
    race.open()
    host.run(300)
    assert race.contest.place == 0
    race.contest.winner.cost_us = 50.0
    launches_us["1"] = 3.0
    host.run(400)
    assert race.contest.place == 1


def test_after_drift_an_entrant_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 30)
    race = Race(10.0, 5.0)
    race.open()
    race.run(300)
    race.costs_us["1"] = None
    race.contest.winner.cost_us = 20.0
    race.run(300)
    assert race.contest.place == 0
    assert race.contest.times_us == (10.0, None)
    assert race.alive() == ["0"]


def test_replays_before_it_was_opened_do_not_count() -> None:
    race = Race(10.0, 12.0)
    race.made[0].cost_us = 100.0
    race.run(20)
    race.made[0].cost_us = 10.0
    race.open()
    race.run(60)
    assert race.contest.place == 0
    assert race.contest.times_us == (10.0, 12.0)


def test_at_most_two_are_kept_beside_the_one_on_trial() -> None:
    race = Race(20.0, 16.0, 18.0, 14.0, 12.0)
    race.open()
    for _ in range(300):
        race.run(1)
        assert len(race.alive()) <= 3
    assert race.alive() == ["4"]


def test_while_compilers_run_nothing_is_timed(noise: Callable[[bool], None]) -> None:
    """In whichever turn; the one that replays goes on, and what it takes meanwhile decides nothing."""
    for steps in range(0, 120, 7):
        race = Race(100.0, 50.0, 80.0)
        race.open()
        race.run(steps)
        present, made = race.contest.place, len(race.made)
        noise(True)
        for runner in race.made:
            runner.cost_us += 1000.0
        race.run(500)
        assert (race.contest.place, len(race.made)) == (present, made)
        for runner in race.made:
            runner.cost_us -= 1000.0
        noise(False)
        race.run(400)
        assert not race.contest.trying
        assert race.contest.place == 1
        assert race.contest.times_us[1] == 50.0


def test_while_compilers_run_the_winner_is_not_probed(
    noise: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "_PROBE_EVERY", 50)
    race = Race(100.0, 50.0)
    race.open()
    race.run(400)
    settled, winner = race.contest.settled, race.contest.winner
    noise(True)
    race.made[-1].cost_us = 500.0
    race.run(5000)
    assert (race.contest.settled, race.contest.winner) == (settled, winner)
    assert not race.contest.trying
