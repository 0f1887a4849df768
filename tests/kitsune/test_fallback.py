"""The choice between eager and replay, as a state machine under a clock that the test sets."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kitsune import fallback
from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop import whole_step
from tests.kitsune.clock import Clock
from tests.kitsune.training import FORMS, Training, net_and_adam


def drive(chooser: Chooser, clock: Clock, cost: Callable[[str], float], steps: int = 40) -> list[str]:
    """Runs steps as the chooser says; each takes what `cost` says of its kind."""
    choices = []
    for _ in range(steps):
        choice = chooser.next()
        clock.cost = cost(choice)
        chooser.start()
        choices.append(choice)
        chooser.finish(choice)
    return choices


def test_reopened_it_times_both_again(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else 0.5)
    chooser.reopen()
    assert not chooser.settled
    choices = drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else 0.25)
    assert {"eager", "replay"} == set(choices)
    assert (chooser.eager_seconds, chooser.replay_seconds) == (2.0, 0.25)
    chooser.reopen()
    drive(chooser, clock, lambda choice: 0.1 if choice == "eager" else 0.25)
    assert chooser.refusal is not None
    chooser.reopen()
    assert chooser.settled
    assert chooser.next() == "eager"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_replays_that_are_yet_to_be_fused_may_lose_to_what_is_by_more(is_compiled: bool, clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize, is_compiled=lambda: is_compiled)
    chooser.may_improve = True
    drive(chooser, clock, lambda choice: 1.0 if choice == "eager" else 1.5)
    assert (chooser.refusal is None) == is_compiled
    chooser.will_not_improve()
    drive(chooser, clock, lambda choice: 1.0 if choice == "eager" else 1.5)
    assert chooser.refusal is not None


@pytest.mark.parametrize(("usual", "has_lost"), [(0.9e-3, False), (1.1e-3, True)])
def test_short_steps_are_timed_for_a_while_before_they_have_lost_to_earlier_ones(
    usual: float, has_lost: bool, clock: Clock
) -> None:
    """The first of them are slower: kernels are loaded, or something else is going on."""
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda choice: 9e-3 if choice == "eager" else 1e-3)
    rival = chooser.replay_seconds
    chooser.reopen(rival)
    replays = 0

    def cost(choice: str) -> float:
        nonlocal replays
        replays += choice == "replay"
        return 9e-3 if choice == "eager" else 2e-3 if replays < 6 else usual

    drive(chooser, clock, cost, steps=100)
    assert chooser.settled
    assert chooser.has_lost == has_lost
    assert chooser.replay_seconds == pytest.approx(min(usual, 1e-3))


@pytest.mark.parametrize("mode", ["replay", "eager"])
def test_where_nothing_is_timed_nothing_is_timed_again(mode: fallback.Mode, clock: Clock) -> None:
    chooser = Chooser(mode, clock.synchronize)
    choices = drive(chooser, clock, lambda _: 1.0)
    chooser.reopen()
    assert chooser.settled
    assert chooser.next() == choices[-1]


def test_a_step_that_is_not_timed_is_not_waited_for(clock: Clock) -> None:
    """The first of a signature: of shapes that do not come back there are no others."""
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda _: 1.0, steps=1)
    assert clock.waits == 0
    drive(chooser, clock, lambda _: 1.0, steps=1)
    assert clock.waits == 2


def test_auto_keeps_the_faster_replay(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    choices = drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else 0.5)
    assert chooser.settled
    assert chooser.refusal is None
    switch = choices.index("replay")
    assert set(choices[switch:]) == {"replay"}
    assert 2 <= switch <= 10
    assert (chooser.eager_seconds, chooser.replay_seconds) == (2.0, 0.5)
    assert chooser.describe() == ("replay", "replay was measured faster than eager")


@pytest.mark.support("Speed", "replay that is no faster than eager is not used", "plain PyTorch, with a reason")
@pytest.mark.parametrize("replay", [2.0, 2.5])
def test_auto_keeps_eager_where_replay_is_no_faster(clock: Clock, replay: float) -> None:
    chooser = Chooser("auto", clock.synchronize)
    choices = drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else replay)
    assert chooser.settled
    assert choices[-1] == "eager"
    last = len(choices) - choices[::-1].index("replay")
    assert set(choices[last:]) == {"eager"}
    mode, reason = chooser.describe()
    assert mode == "eager"
    assert "no faster than eager" in reason
    assert f"{replay * 1e6:.0f} us against 2000000 us" in reason


def lost(clock: Clock) -> Chooser:
    """One that has settled on eager steps of 2 seconds."""
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else 3.0)
    assert chooser.settled
    assert chooser.refusal is not None
    return chooser


def test_eager_steps_that_become_slower_are_compared_again(clock: Clock) -> None:
    chooser = lost(clock)
    choices = drive(chooser, clock, lambda choice: 4.0 if choice == "eager" else 3.0, steps=2 * fallback._PROBE_EVERY)
    assert chooser.describe() == ("replay", "replay was measured faster than eager")
    assert choices.index("replay") < fallback._PROBE_EVERY + 20
    assert choices[-1] == "replay"
    assert chooser.eager_seconds == pytest.approx(4.0)


@pytest.mark.parametrize("seconds", [2.0, 2.3])
def test_eager_steps_that_stay_as_they_were_are_hardly_timed(clock: Clock, seconds: float) -> None:
    chooser = lost(clock)
    waits = clock.waits
    choices = drive(chooser, clock, lambda _: seconds, steps=3 * fallback._PROBE_EVERY)
    assert set(choices) == {"eager"}
    assert 0 < clock.waits - waits <= 3 * 2 * 4
    assert chooser.settled


def test_one_disturbed_probe_says_nothing(clock: Clock) -> None:
    chooser = lost(clock)
    drive(chooser, clock, lambda _: 2.0, steps=fallback._PROBE_EVERY)
    taken = iter([9.0, 9.0, 2.0, 9.0])
    choices = drive(chooser, clock, lambda _: next(taken, 2.0), steps=50)
    assert set(choices) == {"eager"}


def test_a_refusal_is_for_good(clock: Clock) -> None:
    """A measured loss may pass; what cannot be captured is not tried again because it has become slow."""
    chooser = lost(clock)
    chooser.refuse(Refusal("it cannot be captured"))
    waits = clock.waits
    choices = drive(chooser, clock, lambda _: 9.0, steps=2 * fallback._PROBE_EVERY)
    assert set(choices) == {"eager"}
    assert clock.waits == waits


def test_the_first_step_of_each_kind_is_not_counted(clock: Clock) -> None:
    """It initialises libraries, or captures."""
    seen = {"eager": 0, "replay": 0}

    def cost(choice: str) -> float:
        seen[choice] += 1
        return 1000.0 if seen[choice] == 1 else {"eager": 2.0, "replay": 1.0}[choice]

    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, cost)
    assert (chooser.eager_seconds, chooser.replay_seconds) == (2.0, 1.0)


def test_a_disturbed_step_does_not_decide(clock: Clock) -> None:
    count = 0

    def cost(choice: str) -> float:
        nonlocal count
        count += 1
        return (1.0 if choice == "replay" else 2.0) * (50 if count % 3 == 0 else 1)

    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, cost)
    assert chooser.describe()[0] == "replay"


def test_cold_caches_do_not_decide(clock: Clock) -> None:
    """The first replays of short steps may be slower than eager."""
    replays = 0

    def cost(choice: str) -> float:
        nonlocal replays
        replays += choice == "replay"
        return 1e-3 if choice == "eager" else 5e-4 * (1 + 10 / (1 + replays))

    chooser = Chooser("auto", clock.synchronize)
    choices = drive(chooser, clock, cost, steps=400)
    assert chooser.describe()[0] == "replay"
    assert choices.count("eager") > 5


def test_a_machine_that_is_slow_at_first_does_not_decide(clock: Clock) -> None:
    """While the eager steps were timed it had other work to do."""
    steps = 0

    def cost(choice: str) -> float:
        nonlocal steps
        steps += 1
        return (3.3e-3 if choice == "eager" else 3.6e-3) * (1.6 if steps <= 5 else 1)

    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, cost, steps=100)
    assert chooser.settled
    assert chooser.describe()[0] == "eager"


def test_measuring_ends_where_nothing_is_faster(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda choice: 1e-3 if choice == "eager" else 0.95e-3, steps=150)
    assert chooser.settled
    assert chooser.describe()[0] == "replay"


def test_nothing_waits_for_the_device_once_it_is_settled(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda choice: 1.0 if choice == "replay" else 2.0)
    waits = clock.waits
    drive(chooser, clock, lambda choice: 1.0)
    assert clock.waits == waits


def test_replay_mode_takes_no_times(clock: Clock) -> None:
    chooser = Chooser("replay", clock.synchronize)
    assert drive(chooser, clock, lambda choice: 1.0, steps=4) == ["eager", "replay", "replay", "replay"]
    assert clock.waits == 0
    assert chooser.describe() == ("replay", "mode='replay' was asked for")


def test_eager_mode(clock: Clock) -> None:
    chooser = Chooser("eager", clock.synchronize)
    assert set(drive(chooser, clock, lambda choice: 1.0)) == {"eager"}
    assert clock.waits == 0
    assert chooser.describe() == ("eager", "mode='eager' was asked for")


def test_a_refusal_ends_the_measuring(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda choice: 1.0, steps=3)
    chooser.refuse(Refusal("because", "here", "do that"))
    waits = clock.waits
    assert set(drive(chooser, clock, lambda choice: 1.0)) == {"eager"}
    assert clock.waits == waits
    assert chooser.describe() == ("eager", "because [here]; do that")


def test_steps_that_fall_back_settle_nothing(clock: Clock) -> None:
    """While every replay gives way to an eager step, waiting for the device stops too."""
    chooser = Chooser("auto", clock.synchronize)
    clock.cost = 1.0
    for _ in range(50):
        chooser.start()
        chooser.finish("eager")
    waits = clock.waits
    for _ in range(10):
        chooser.start()
        chooser.finish("eager")
    assert chooser.next() == "replay"
    assert clock.waits == waits
    assert chooser.replay_seconds is None
    drive(chooser, clock, lambda choice: 0.5)
    assert chooser.describe()[0] == "replay"


def test_the_times_of_several_calls_are_shared_out(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    while not chooser.settled:
        choice = chooser.next()
        clock.cost = 8.0 if choice == "eager" else 4.0
        chooser.start()
        chooser.finish(choice, 4)
    assert (chooser.eager_seconds, chooser.replay_seconds) == (2.0, 1.0)


@pytest.mark.parametrize(("replay", "mode"), [(0.5, "replay"), (3.0, "eager")])
@pytest.mark.parametrize("form", FORMS)
def test_a_training_is_timed_and_the_faster_way_stays(form: str, replay: float, mode: str, clock: Clock) -> None:
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer, mode="auto")
    modes = []
    for index in range(20):
        clock.cost = 2.0 if training.status().graphs == 0 else replay
        training.run(1, start=index)
        modes.append(training.status().mode)
    status = training.status()
    assert modes[2] == "measuring"
    assert set(modes[14:]) == {mode} == {status.mode}
    assert status.eager_seconds == 2.0
    assert status.replay_seconds == replay
    assert status.gain == 2.0 / replay
    assert status.graphs == (1 if mode == "replay" else 0)
    assert ("no faster" in status.reason) == (mode == "eager")
    replays = status.replays
    training.run(3, start=20)
    assert training.status().replays == replays + (3 if mode == "replay" else 0)


def disturbed(seconds: float, every: int = 2) -> Callable[[str], float]:
    """What steps take while something else takes a part of their time: replays half as long as eager steps."""
    count = 0

    def cost(choice: str) -> float:
        nonlocal count
        count += 1
        return seconds * (0.5 if choice == "replay" else 1.0) * (3.0 if count % every else 1.0)

    return cost


LOADED = "undecided while the host is disturbed"


def test_a_gain_that_was_only_load_is_measured_again(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, disturbed(1e-3), 400)
    assert chooser.settled
    mode, reason = chooser.describe()
    assert mode == "replay"
    assert reason == f"replay was measured faster than eager; {LOADED}"
    clock.now += fallback._REVIEWS_SECONDS[0]
    choices = drive(chooser, clock, lambda choice: 1e-3 if choice == "eager" else 2e-3, 400)
    assert chooser.describe()[0] == "eager"
    assert LOADED not in chooser.describe()[1]
    assert choices.count("replay") < 100


def test_a_loss_that_was_only_load_is_measured_again(clock: Clock) -> None:
    replays = 0

    def cost(choice: str) -> float:
        nonlocal replays
        replays += choice == "replay"
        return 1e-3 if choice == "eager" else 0.9e-3 * (4.0 if replays % 4 else 1.0)

    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, cost, 400)
    mode, reason = chooser.describe()
    assert mode == "eager"
    assert "no faster than eager" in reason
    assert reason.endswith(LOADED)
    clock.now += fallback._REVIEWS_SECONDS[0]
    drive(chooser, clock, lambda choice: 1e-3 if choice == "eager" else 0.9e-3, 400)
    assert chooser.describe() == ("replay", "replay was measured faster than eager")
    assert chooser.eager_seconds == pytest.approx(1e-3)
    assert chooser.replay_seconds == pytest.approx(0.9e-3)


def test_a_thread_that_loses_its_processor_is_disturbed(clock: Clock) -> None:
    """Whatever its samples look like: all of them may have been slow."""
    chooser = Chooser("auto", clock.synchronize)
    for _ in range(60):
        choice = chooser.next()
        clock.cost = 20e-3 if choice == "eager" else 5e-3
        chooser.start()
        clock.switches += 3
        chooser.finish(choice)
    assert chooser.settled
    assert chooser.is_undecided


def test_a_disturbed_host_is_asked_a_few_times(clock: Clock) -> None:
    """A review takes some eager steps; where the host is never quiet, what was measured last stays."""
    chooser = Chooser("auto", clock.synchronize)
    cost = disturbed(1e-3)
    reviews = 0
    drive(chooser, clock, cost, 400)
    while chooser.is_undecided:
        drive(chooser, clock, cost, 400)
        assert chooser.settled, "nothing is measured before it is time"
        clock.now += 1000.0
        reviews += 1
        drive(chooser, clock, cost, 400)
    assert reviews == len(fallback._REVIEWS_SECONDS)
    assert chooser.describe() == ("replay", "replay was measured faster than eager")
    clock.now += 1e6
    waits = clock.waits
    drive(chooser, clock, cost, 400)
    assert clock.waits == waits


def test_what_is_refused_for_good_is_not_reviewed(clock: Clock) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, disturbed(1e-3), 400)
    chooser.refuse(Refusal("it cannot be captured"))
    clock.now += 1e6
    assert set(drive(chooser, clock, lambda _: 1.0)) == {"eager"}
    assert chooser.describe() == ("eager", "it cannot be captured")


def test_the_gain_is_the_median_of_rounds(clock: Clock) -> None:
    """One in which the eager steps were slowed, or the replays, does not count."""
    rounds = [(1.8, 1.0), (1.0, 0.8), (1.0, 0.8), (1.0, 4.0), (1.0, 0.8)]
    steps = 0

    def cost(choice: str) -> float:
        nonlocal steps
        eager, replay = rounds[min(steps // 10, len(rounds) - 1)]
        steps += 1
        return 2.5e-3 * (eager if choice == "eager" else replay)

    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, cost, 200)
    assert chooser.eager_seconds == pytest.approx(2.5e-3)
    assert chooser.replay_seconds == pytest.approx(2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_training_on_a_host_that_was_loaded_at_first(
    form: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays that had lost are captured again, and stay; the short way of a step is no way around that."""
    finish, steps = Chooser.finish, 0
    is_loaded = True

    def finished(chooser: Chooser, choice: fallback.Choice, count: int = 1) -> None:
        nonlocal steps
        steps += 1
        slow = 5.0 if choice == "replay" and is_loaded and steps % 3 else 1.0
        clock.cost = (1.0 if choice == "eager" else 0.5) * slow
        finish(chooser, choice, count)

    monkeypatch.setattr(Chooser, "finish", finished)
    training = Training(form, *net_and_adam(), mode="auto")
    training.run(25)
    assert training.status().mode == "eager"
    assert LOADED in training.status().reason
    is_loaded = False
    clock.now += fallback._REVIEWS_SECONDS[0]
    training.run(25, start=25)
    status = training.status()
    assert (status.mode, status.gain) == ("replay", 2.0)


@pytest.mark.parametrize("form", FORMS)
def test_a_training_whose_gain_was_only_load(form: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, steps = Chooser.finish, 0
    is_loaded = True

    def finished(chooser: Chooser, choice: fallback.Choice, count: int = 1) -> None:
        nonlocal steps
        steps += 1
        slow = 5.0 if choice == "eager" and is_loaded and steps % 3 else 1.0
        clock.cost = (1.0 if choice == "eager" else 1.5) * slow
        finish(chooser, choice, count)

    monkeypatch.setattr(Chooser, "finish", finished)
    training = Training(form, *net_and_adam(), mode="auto")
    training.run(25)
    assert training.status().mode == "replay"
    assert LOADED in training.status().reason
    is_loaded = False
    clock.now += fallback._REVIEWS_SECONDS[0]
    training.run(2 * whole_step._REPLAYS_PER_REVIEW, start=25)
    assert training.status().mode == "eager"


def test_the_log_tells_each_refusal_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog("the step")
    with caplog.at_level(logging.INFO, logger="kitsune"):
        for _ in range(3):
            log.add(Refusal("one"))
            log.add(RefusedError(Refusal("two"), passing=True))
            log.add(RefusedError(Refusal("three")))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "the step runs as plain PyTorch: one"),
        ("INFO", "the step ran a step as plain PyTorch: two"),
        ("WARNING", "the step runs as plain PyTorch: three"),
    ]
    assert log.reasons() == ("one", "two", "three")


def test_refusals_of_one_topic_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever their numbers are: the first of them, and the first warning."""
    log = RefusalLog("the step")
    with caplog.at_level(logging.INFO, logger="kitsune"):
        for number in range(3):
            log.add(RefusedError(Refusal(f"k is {number}", topic="k"), passing=True))
        assert log.reasons() == ("k is 0",)
        for number in range(3, 6):
            log.add(Refusal(f"k is {number}", topic="k"))
    assert [record.message for record in caplog.records] == [
        "the step ran a step as plain PyTorch: k is 0",
        "the step runs as plain PyTorch: k is 3",
    ]
    assert log.reasons() == ("k is 3",)


def test_the_log_tells_which_part_runs_as_plain_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog("the loop")
    for _ in range(2):
        log.part("the update").add(Refusal("no rule"))
        log.add(Refusal("no rule"))
    assert [record.message for record in caplog.records] == ["the update of the loop runs as plain PyTorch: no rule"]
    assert log.reasons() == ("no rule",)


def test_what_runs_beside_compilers_is_not_timed(clock: Clock, noise: Callable[[bool], None]) -> None:
    """It goes on as it is, eagerly or replayed, and counts for nothing. Where nothing is timed, it counts."""
    for quiet_steps, choice in ((0, "eager"), (3, "eager"), (6, "replay")):
        chooser = Chooser("auto", clock.synchronize)
        drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else 0.5, quiet_steps)
        waits = clock.waits
        noise(True)
        assert drive(chooser, clock, lambda _: 100.0, 20) == [choice] * 20
        assert clock.waits == waits
        noise(False)
        drive(chooser, clock, lambda choice: 2.0 if choice == "eager" else 0.5)
        assert (chooser.eager_seconds, chooser.replay_seconds) == (2.0, 0.5)
    noise(True)
    assert drive(Chooser("replay", clock.synchronize), clock, lambda _: 1.0, 3) == ["eager", "replay", "replay"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_in_which_compilers_begin_or_end_is_not_timed(
    ends: bool, clock: Clock, noise: Callable[[bool], None]
) -> None:
    chooser = Chooser("auto", clock.synchronize)
    drive(chooser, clock, lambda _: 2.0, 2)
    noise(ends)
    chooser.start()
    noise(not ends)
    clock.now += 0.001
    chooser.finish("eager")
    assert chooser.eager_seconds == 2.0
