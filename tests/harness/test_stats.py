import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as oracle

from harness import stats
from harness.stats import Estimate, Verdict

TIMES = st.floats(1e-7, 1e3)
ROUNDS = st.lists(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=9), min_size=2, max_size=7)


@pytest.mark.parametrize("freedom", [1, 1.3, 2, 2.71, 4, 7.5, 30, 1000, 123456.7])
def test_the_quantile_is_students(freedom: float) -> None:
    assert stats._t_quantile(freedom) == pytest.approx(oracle.t.ppf(0.975, freedom), rel=1e-9)


@given(ROUNDS)
def test_a_paired_ratio_is_scipys_t_interval_of_the_rounds_medians(rounds: list[list[tuple[float, float]]]) -> None:
    medians = [float(np.median([math.log(a / b) for a, b in pairs])) for pairs in rounds]
    spread = oracle.sem(medians)
    assume(spread > 0)
    low, high = oracle.t.interval(0.95, len(medians) - 1, loc=np.mean(medians), scale=spread)

    estimate = stats.paired_ratio(rounds)

    assert math.log(estimate.ratio) == pytest.approx(np.mean(medians), rel=1e-9, abs=1e-9)
    assert estimate.rounds == len(rounds)
    assert estimate.pairs == sum(map(len, rounds))
    if high < 600:
        assert math.log(estimate.low) == pytest.approx(low, rel=1e-6, abs=1e-6)
        assert math.log(estimate.high) == pytest.approx(high, rel=1e-6, abs=1e-6)


@given(ROUNDS, ROUNDS)
def test_comparing_ratios_is_scipys_welch_interval(
    head: list[list[tuple[float, float]]], base: list[list[tuple[float, float]]]
) -> None:
    head_medians = [statistics.median(math.log(a / b) for a, b in pairs) for pairs in head]
    base_medians = [statistics.median(math.log(a / b) for a, b in pairs) for pairs in base]
    assume(statistics.variance(head_medians) + statistics.variance(base_medians) > 1e-12)
    expected = oracle.ttest_ind(head_medians, base_medians, equal_var=False).confidence_interval(0.95)

    estimate = stats.compare_ratios(head, base)

    if expected.high < 600:
        assert math.log(estimate.low) == pytest.approx(expected.low, rel=1e-5, abs=1e-6)
        assert math.log(estimate.high) == pytest.approx(expected.high, rel=1e-5, abs=1e-6)


def test_one_round_claims_no_interval() -> None:
    alone = stats.paired_ratio([[(2.0, 1.0), (4.0, 2.0)]])
    assert (alone.low, alone.high, alone.rounds, alone.pairs) == (0.0, math.inf, 1, 2)
    assert alone.ratio == pytest.approx(2)
    assert not alone.has_interval

    three = [[(1.0, 1.0)], [(1.1, 1.0)], [(1.2, 1.0)]]
    assert not stats.compare_ratios(three, [[(1.0, 1.0)]]).has_interval
    assert not stats.compare_ratios([[(1.0, 1.0)]], three).has_interval


def test_rounds_count_and_pairs_within_them_do_not() -> None:
    few = stats.paired_ratio([[(1.0, 1.0)] * 3, [(1.1, 1.0)] * 3])
    many = stats.paired_ratio([[(1.0, 1.0)] * 300, [(1.1, 1.0)] * 300])
    assert (few.low, few.high) == (many.low, many.high)


def test_identical_rounds_have_an_interval_of_no_width() -> None:
    rounds = [[(1.0, 2.0)]] * 3
    assert stats.paired_ratio(rounds) == Estimate(0.5, 0.5, 0.5, 3, 3)
    assert stats.compare_ratios(rounds, rounds) == Estimate(1.0, 1.0, 1.0, 3, 3)


@given(ROUNDS)
def test_inverting_an_estimate_swaps_the_two_sides(rounds: list[list[tuple[float, float]]]) -> None:
    swapped = stats.paired_ratio([[(b, a) for a, b in pairs] for pairs in rounds])
    inverted = stats.paired_ratio(rounds).inverted()
    assert inverted.ratio == pytest.approx(swapped.ratio)
    if swapped.low > 0 and swapped.high < 1e200:
        assert inverted.low == pytest.approx(swapped.low, rel=1e-6)
        assert inverted.high == pytest.approx(swapped.high, rel=1e-6)


def test_an_estimate_without_interval_stays_so_when_inverted() -> None:
    inverted = Estimate(2.0, 0.0, math.inf, 1, 4).inverted()
    assert inverted == Estimate(0.5, 0.0, math.inf, 1, 4)
    assert not inverted.has_interval


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([], "at least one round"),
        ([[]], "no pairs"),
        ([[(1.0, 0.0)]], "not positive"),
        ([[(-1.0, 1.0)]], "not positive"),
        ([[(math.nan, 1.0)]], "not positive"),
        ([[(1.0, math.inf)]], "not positive"),
    ],
)
def test_unusable_pairs_are_refused(rounds: list[list[tuple[float, float]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stats.paired_ratio(rounds)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.04, 1.06, Verdict.SLOWER),
        (0.90, 0.95, Verdict.FASTER),
        (0.98, 1.02, Verdict.SAME),
        (1 / 1.03, 1.03, Verdict.SAME),
        (1.02, 1.06, Verdict.INCONCLUSIVE),
        (0.95, 0.99, Verdict.INCONCLUSIVE),
        (0.90, 1.10, Verdict.INCONCLUSIVE),
        (0.0, math.inf, Verdict.INCONCLUSIVE),
    ],
)
def test_a_verdict_needs_the_whole_interval(low: float, high: float, expected: Verdict) -> None:
    estimate = Estimate(1.0, low, high, 3, 9)
    assert stats.verdict(estimate, 0.03) is expected


@given(TIMES, TIMES, st.floats(0.001, 0.5))
def test_slower_seen_from_the_other_side_is_faster(one: float, other: float, margin: float) -> None:
    estimate = Estimate(math.sqrt(one * other), min(one, other), max(one, other), 3, 9)
    opposite = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    judged = stats.verdict(estimate, margin)
    at_an_edge = any(
        math.isclose(end, edge, rel_tol=1e-9)
        for end in (estimate.low, estimate.high)
        for edge in stats.margin_band(margin)
    )
    assert at_an_edge or stats.verdict(estimate.inverted(), margin) is opposite.get(judged, judged)


@pytest.mark.parametrize("margin", [0, -0.1, math.inf, math.nan])
def test_a_margin_is_a_positive_number(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        stats.verdict(Estimate(1, 0.9, 1.1, 3, 9), margin)


def test_a_geometric_mean() -> None:
    assert stats.geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert stats.geometric_mean([2.0, 0.5]) == pytest.approx(1)
    for unusable in ([], [1.0, 0.0], [math.inf], [-1.0]):
        with pytest.raises(ValueError, match="geometric mean"):
            stats.geometric_mean(unusable)


def test_a_typical_time_does_not_weigh_rounds_by_their_length() -> None:
    assert stats.typical_seconds([[1.0, 1.0, 9.0], [3.0], [2.0, 2.0]]) == 2.0
    for unusable in ([], [[]]):
        with pytest.raises(ValueError, match="typical"):
            stats.typical_seconds(unusable)


@pytest.mark.parametrize(
    ("setup", "step", "expected"),
    [
        (11.0, 0.9, 100),
        (1.0, 0.9, 0),
        (0.5, 1.0, 0),
        (11.0, 1.0, math.inf),
        (11.0, 1.1, math.inf),
        (0.5, 1.1, math.inf),
    ],
)
def test_break_even_against_a_set_up_of_one_second_and_steps_of_one(setup: float, step: float, expected: float) -> None:
    assert stats.break_even_steps(setup, step, 1.0, 1.0) == pytest.approx(expected, abs=1)


@given(st.floats(0, 100), st.floats(1e-4, 1), st.floats(0, 100), st.floats(1e-4, 1))
def test_at_break_even_the_totals_have_crossed(setup: float, step: float, other_setup: float, other: float) -> None:
    steps = stats.break_even_steps(setup, step, other_setup, other)
    if 0 < steps < 1e9:
        assert setup + steps * step <= other_setup + steps * other + 1e-6
        assert setup + (steps - 1) * step >= other_setup + (steps - 1) * other - 1e-6


BASELINE = ((0, 2.3), (10, 1.0), (20, 0.3))


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (BASELINE, 0.0),
        (((0, 2.3), (20, 0.5)), 0.1),
        (((0, 2.3), (20, 0.1)), -0.1),
        (((0, 2.3), (10, 1.13)), 0.1),
        (((0, 2.3), (20, None)), math.inf),
        ((), None),
        (((5, 1.0),), None),
    ],
)
def test_a_loss_gap_is_a_share_of_the_baselines_progress(curve: stats.Curve, expected: float | None) -> None:
    assert stats.loss_gap(curve, BASELINE) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("baseline", [((0, 1.0), (20, 1.0)), ((0, None), (20, 1.0)), ((0, 2.0), (20, None))])
def test_no_loss_gap_without_a_baseline_that_learned(baseline: stats.Curve) -> None:
    assert stats.loss_gap(BASELINE, baseline) is None


def test_a_shift_of_all_times_of_a_round_cancels() -> None:
    rng = random.Random(0)
    rounds = [[(rng.uniform(1, 2), rng.uniform(1, 2)) for _ in range(5)] for _ in range(4)]
    shifted = [[(a * factor, b * factor) for a, b in pairs] for factor, pairs in zip((1, 3, 7, 2), rounds, strict=True)]
    assert stats.paired_ratio(shifted).low == pytest.approx(stats.paired_ratio(rounds).low)
