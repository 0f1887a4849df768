"""What captures take, and how much that may be: under a clock that the test sets."""

from __future__ import annotations

import pytest

from kitsune import budget as budget_module
from kitsune.budget import FREE_CAPTURES, TRAINED_PER_CAPTURE, CaptureBudget
from kitsune.config import Config
from tests.kitsune.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    return clock


def capture(budget: CaptureBudget, clock: Clock, seconds: float) -> None:
    with budget.capturing():
        clock.now += seconds


def test_the_first_captures_do_not_wait(clock: Clock) -> None:
    for config, free in ((Config(), FREE_CAPTURES), (Config(mode="replay", max_graphs=3), 6)):
        budget = CaptureBudget(config)
        for _ in range(free + 1):
            assert budget.refuse() is None
            capture(budget, clock, 2.0)
        assert budget.refuse() is not None
        assert (budget.captures, budget.seconds) == (free + 1, 2.0 * (free + 1))


@pytest.mark.parametrize("seconds", [0.1, 3.0])
def test_later_ones_take_a_tenth_of_any_stretch(seconds: float, clock: Clock) -> None:
    """And one of them more: whatever captures take, and however long nothing was captured before."""
    budget, step = CaptureBudget(Config()), 0.01
    spells = []
    for index in range(40_000):
        clock.now += step
        is_wanted = not 10_000 < index < 20_000
        if is_wanted and budget.refuse() is None:
            began = clock.now
            capture(budget, clock, seconds)
            spells.append((began, clock.now))
    later = spells[FREE_CAPTURES:]
    assert len(later) > 5
    for first, (began, _) in enumerate(later):
        for count, (_, ended) in enumerate(later[first:], 1):
            share = 1 / (1 + TRAINED_PER_CAPTURE)
            assert count * seconds <= share * (ended - began) + seconds + 1e-6


def test_what_is_recorded_anew_delays_captures_too(clock: Clock) -> None:
    budget = CaptureBudget(Config())
    for _ in range(FREE_CAPTURES + 1):
        capture(budget, clock, 1.0)
    with budget.spending():
        clock.now += 5.0
    clock.now += TRAINED_PER_CAPTURE * 6.0 - 5.0 - 0.1
    assert budget.refuse() is not None
    clock.now += 0.2
    assert budget.refuse() is None


def test_what_is_spent_within_counts_once(clock: Clock) -> None:
    budget = CaptureBudget(Config())
    before = CaptureBudget.num_spells
    with budget.capturing():
        clock.now += 1.0
        with budget.spending():
            clock.now += 2.0
        budget.charge(2.0)
    budget.charge(0.5)
    budget.charge(0.0)
    assert budget.seconds == 3.5
    assert CaptureBudget.num_spells == before + 2


def test_a_capture_that_fails_is_timed(clock: Clock) -> None:
    budget = CaptureBudget(Config())

    def fail() -> None:
        with budget.capturing():
            clock.now += 1.0
            raise ValueError("it cannot be captured")

    with pytest.raises(ValueError, match="cannot be captured"):
        fail()
    assert (budget.captures, budget.seconds) == (1, 1.0)
