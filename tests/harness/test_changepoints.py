import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import changepoints
from harness.changepoints import LEAST_RUN, find_changes


def series(seed: int, *levels: tuple[float, int], noise: float = 0.01) -> list[float]:
    """Levels, each for so many commits, with Gaussian noise."""
    rng = np.random.default_rng(seed)
    return [level * math.exp(rng.normal(0, noise)) for level, count in levels for _ in range(count)]


def positions(values: list[float]) -> list[int]:
    return [change.position for change in find_changes(values)]


def test_a_step_is_found_with_its_place_its_range_and_its_size() -> None:
    (change,) = find_changes(series(0, (1.0, 20), (1.05, 20)))
    assert abs(change.position - 20) <= 1
    assert change.earliest <= change.position <= change.latest
    assert change.latest - change.earliest <= 4
    assert change.ratio == pytest.approx(1.05, abs=0.01)
    assert change.p_value <= changepoints.SIGNIFICANCE


def test_a_step_down_and_a_recovery_are_two_changes() -> None:
    down, up = find_changes(series(1, (1.0, 15), (0.94, 10), (1.0, 15)))
    assert (abs(down.position - 15), abs(up.position - 25)) <= (1, 1)
    assert down.ratio < 1 < up.ratio


def test_three_commits_at_a_new_level_are_enough() -> None:
    assert positions(series(2, (1.0, 37), (1.06, 3))) == [37]


def test_one_or_two_outliers_are_no_step() -> None:
    values = series(3, (1.0, 40))
    values[12] *= 1.4
    values[30] *= 1.3
    values[31] *= 1.3
    assert positions(values) == []


def test_a_step_smaller_than_asked_for_is_left_out() -> None:
    values = series(4, (1.0, 60), (1.015, 60), noise=0.003)
    assert positions(values) == []
    assert find_changes(values, least_step=0.01)[0].position == pytest.approx(60, abs=2)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_few_values_have_no_step(count: int) -> None:
    assert positions([1.0] * (count // 2) + [2.0] * (count - count // 2)) == []


def test_a_series_that_never_varies_has_no_step() -> None:
    assert positions([0.5] * 30) == []


def test_a_clean_step_without_noise_is_found() -> None:
    assert positions([1.0] * 15 + [1.1] * 15) == [15]


@pytest.mark.parametrize("unusable", [0.0, -1.0, math.nan, math.inf])
def test_unusable_values_are_refused(unusable: float) -> None:
    with pytest.raises(ValueError, match="not positive and finite"):
        find_changes([1.0] * 10 + [unusable])


def test_a_least_step_is_not_negative() -> None:
    with pytest.raises(ValueError, match="least_step"):
        find_changes([1.0] * 10, least_step=-0.1)


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_the_unit_of_the_values_does_not_matter(seed: int, unit: float) -> None:
    values = series(seed, (1.0, 15), (1.08, 15))
    assert positions([unit * value for value in values]) == positions(values)


@given(st.integers(0, 2**32 - 1))
def test_seen_as_speeds_the_steps_are_the_same(seed: int) -> None:
    values = series(seed, (1.0, 15), (1.08, 15))
    assert positions([1 / value for value in values]) == positions(values)


def slow_p_value(values: np.ndarray) -> float:
    """Over all orders there are, by comparing means directly."""
    observed = slow_statistic(tuple(values))
    orders = list(itertools.permutations(values))
    return sum(slow_statistic(order) >= observed * (1 - 1e-12) for order in orders) / len(orders)


def slow_statistic(values: tuple[float, ...]) -> float:
    size = len(values)
    return max(
        abs(np.mean(values[:place]) - np.mean(values[place:])) * math.sqrt(place * (size - place) / size)
        for place in range(LEAST_RUN, size - LEAST_RUN + 1)
    )


@pytest.mark.parametrize("seed", range(4))
def test_p_values_are_those_of_all_orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changepoints, "_NEVER", 0.0)
    monkeypatch.setattr(changepoints, "_CHANCE", 2.0)
    logs = np.random.default_rng(seed).normal(0, 1, 7)
    found = changepoints._p_value(logs, 100.0, 0, 3, 7)
    assert found == pytest.approx(slow_p_value(logs), abs=0.09)


@pytest.mark.parametrize("size", [9, 15, 40, 60])
def test_what_is_not_tested_is_never_significant(size: int) -> None:
    """The statistic that a hundredth of all orders exceeds lies above the bound below which none is tested."""
    values = np.random.default_rng(size).standard_t(3, size)
    values -= values.mean()
    largest = changepoints._statistics(values[changepoints._orders(size)]).max(axis=-1)
    assert np.quantile(largest, 0.99) > changepoints._NEVER * values.std()


def test_false_alarms_are_rare_and_steps_are_found() -> None:
    """Fixed seeds; docs/change_points.md has the figures for more histories and other noise."""
    alarms = sum(bool(positions(series(seed, (1.0, 40)))) for seed in range(150))
    found = sum(
        any(abs(position - 24) <= 2 for position in positions(series(seed, (1.0, 24), (1.03, 16))))
        for seed in range(150)
    )
    assert alarms <= 4
    assert found >= 140
