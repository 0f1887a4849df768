"""What captures take, and how much that may be: under a clock that the test sets."""

from __future__ import annotations

import math

import pytest

from kitsune import budget as budget_module
from kitsune.budget import FIRST_CAPTURES, CaptureBudget
from kitsune.config import Config
from tests.kitsune.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(budget_module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _captures_are_not_put_off() -> None:
    """Here they are."""


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(CaptureBudget, "num_spells", 0)
    monkeypatch.setattr(CaptureBudget, "spent", 0.0)


TRAINED_PER_CAPTURE = 9.0


def capture(budget: CaptureBudget, clock: Clock, seconds: float) -> None:
    with budget.capturing():
        clock.now += seconds


def test_the_first_captures_do_not_wait_for_one_another(clock: Clock) -> None:
    for config, free in ((Config(), FIRST_CAPTURES), (Config(mode="replay", max_graphs=3), 6)):
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
    later = spells[FIRST_CAPTURES:]
    assert len(later) > 5
    for first, (began, _) in enumerate(later):
        for count, (_, ended) in enumerate(later[first:], 1):
            share = 1 / (1 + TRAINED_PER_CAPTURE)
            assert count * seconds <= share * (ended - began) + seconds + 1e-6


def test_what_is_recorded_anew_delays_captures_too(clock: Clock) -> None:
    budget = CaptureBudget(Config())
    for _ in range(FIRST_CAPTURES + 1):
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


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_the_first_capture_waits_until_it_has_its_share(share: float, clock: Clock) -> None:
    """As expected from the size of the model: of a training that ends as soon as it is made, it takes the share."""
    budget, parts = CaptureBudget(Config(setup_share=share)), 10
    began = clock.now
    begins = budget.put_off_until(parts)
    assert begins is not None
    expected = share * (begins - began)
    assert expected == pytest.approx(budget_module._LOADING_SECONDS + parts * budget_module._SECONDS_PER_PART)
    assert f"after {math.ceil(begins - began)} s" in str(budget.put_off(begins))
    clock.now = begins - 0.01
    assert budget.put_off_until(parts) == begins
    clock.now = begins
    assert budget.put_off_until(parts) is None


def test_where_no_share_is_asked_for_the_first_captures_wait_a_fifth_of_what_they_take(clock: Clock) -> None:
    budget, parts = CaptureBudget(Config()), 10
    expected = budget_module._LOADING_SECONDS + parts * budget_module._SECONDS_PER_PART
    begins = budget.put_off_until(parts)
    assert begins is not None
    assert begins - clock.now == pytest.approx(expected / 5)
    assert "% of it" not in str(budget.put_off(begins))
    clock.now = begins
    assert budget.put_off_until(parts) is None
    capture(budget, clock, 2.0)
    assert budget.put_off_until(parts) is None, "the second shape has waited for long enough"


def test_a_larger_model_waits_longer_and_a_second_one_of_the_process_less(clock: Clock) -> None:
    first = CaptureBudget(Config()).put_off_until(5)
    larger = CaptureBudget(Config()).put_off_until(50)
    capture(CaptureBudget(Config()), clock, 1.0)
    clock.now = 100.0
    second = CaptureBudget(Config()).put_off_until(5)
    assert first is not None
    assert larger is not None
    assert second is not None
    assert second < first < larger


def test_a_second_shape_waits_for_its_share_beside_that_of_the_first(clock: Clock) -> None:
    """And what other loops have spent since this one began counts, too: a script has all of it."""
    budget, other = (CaptureBudget(Config(setup_share=0.1)) for _ in range(2))
    began = clock.now
    clock.now += 1000.0
    assert budget.put_off_until(5) is None
    capture(budget, clock, 60.0)
    assert budget.put_off_until(5) == pytest.approx(began + 1200.0)
    capture(other, clock, 30.0)
    assert budget.put_off_until(5) == pytest.approx(began + 1500.0)


def test_nothing_waits_where_that_is_not_wanted(clock: Clock) -> None:
    for config in (Config(mode="replay"), Config(setup_share=1.0)):
        assert CaptureBudget(config).put_off_until(1000) is None


def test_a_training_without_bound_captures_all(clock: Clock) -> None:
    budget = CaptureBudget(Config(setup_share=1.0))
    for _ in range(3 * FIRST_CAPTURES):
        assert budget.put_off_until(5) is None
        assert budget.refuse() is None
        capture(budget, clock, 1.0)


def test_a_capture_that_fails_is_timed(clock: Clock) -> None:
    budget = CaptureBudget(Config())

    def fail() -> None:
        with budget.capturing():
            clock.now += 1.0
            raise ValueError("it cannot be captured")

    with pytest.raises(ValueError, match="cannot be captured"):
        fail()
    assert (budget.captures, budget.seconds) == (1, 1.0)
