import itertools
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


FEW_ROUNDS = st.lists(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5), min_size=2, max_size=4)


def resampled_means(medians: list[float]) -> list[float]:
    """The means of all resamples there are, each as often as it is drawn."""
    return [statistics.fmean(drawn) for drawn in itertools.product(medians, repeat=len(medians))]


def is_quantile(bound: float, deviations: list[float], level: float) -> bool:
    """Whether a bound is the quantile of a level, give or take what a few thousand draws leave open."""
    slack = 1e-9 * max(map(abs, deviations))
    below = sum(deviation < bound - slack for deviation in deviations) / len(deviations)
    up_to = sum(deviation <= bound + slack for deviation in deviations) / len(deviations)
    return below <= level + 0.012 and up_to >= level - 0.012


@given(FEW_ROUNDS)
def test_the_interval_of_a_paired_ratio_is_that_of_all_resamples_stretched(
    rounds: list[list[tuple[float, float]]],
) -> None:
    medians = [float(np.median([math.log(a / b) for a, b in pairs])) for pairs in rounds]
    count, centre = len(medians), statistics.fmean(medians)
    assume(oracle.sem(medians) > 1e-9)
    stretch = math.sqrt(count / (count - 1)) * oracle.t.ppf(0.975, count - 1) / oracle.norm.ppf(0.975)
    deviations = [mean - centre for mean in resampled_means(medians)]
    assume(stretch * max(map(abs, deviations)) < 300)

    estimate = stats.paired_ratio(rounds)

    assert math.log(estimate.ratio) == pytest.approx(centre, rel=1e-9, abs=1e-9)
    assert (estimate.rounds, estimate.freedom) == (count, count - 1)
    assert estimate.pairs == sum(map(len, rounds))
    assert is_quantile((math.log(estimate.low) - centre) / stretch, deviations, 0.025)
    assert is_quantile((math.log(estimate.high) - centre) / stretch, deviations, 0.975)


@given(ROUNDS, ROUNDS)
def test_different_resamples_count_as_often_as_they_were_drawn(
    head: list[list[tuple[float, float]]], base: list[list[tuple[float, float]]]
) -> None:
    def draws(medians: list[float], seed: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        chosen = np.random.default_rng((len(medians), seed)).integers(len(medians), size=(4000, len(medians)))
        deviations = np.asarray(medians)[chosen].mean(axis=1) - statistics.fmean(medians)
        return deviations * math.sqrt(len(medians) / (len(medians) - 1))

    sides = stats.log_medians(head), stats.log_medians(base)
    estimate = stats.compare_ratios(head, base)
    assert estimate.freedom is not None
    drawn = draws(sides[0], 0) - draws(sides[1], 1)
    bounds = np.quantile(drawn, ((1 - 0.95) / 2, 1 - (1 - 0.95) / 2), method="inverted_cdf")
    stretch = stats._t_quantile(estimate.freedom) / oracle.norm.ppf(0.975)
    assume(stretch * np.abs(drawn).max() < 300)
    found = math.log(estimate.low / estimate.ratio), math.log(estimate.high / estimate.ratio)
    expected = stretch * min(0, bounds[0]), stretch * max(0, bounds[1])
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("sizes", "different"), [((2,), 3), ((3,), 10), ((2, 3), 30)])
def test_few_values_have_few_different_resamples(sizes: tuple[int, ...], different: int) -> None:
    shares, counts = stats._resamples(sizes)
    assert shares.shape == (different, sum(sizes))
    assert counts.sum() == 4000


@pytest.mark.parametrize("count", [3, 5, 8])
def test_intervals_of_rounds_that_spread_evenly_are_about_students(count: int) -> None:
    medians = [oracle.norm.ppf((index + 0.5) / count) * 0.01 for index in range(count)]
    rounds = [[(math.exp(value), 1.0)] for value in medians]
    half = oracle.t.ppf(0.975, count - 1) * oracle.sem(medians)
    assert stats.paired_ratio(rounds).half_width == pytest.approx(half, rel=0.15)

    welch = oracle.ttest_ind(medians, medians, equal_var=False).confidence_interval(0.95)
    both = stats.compare_ratios(rounds, rounds)
    assert both.freedom == pytest.approx(2 * (count - 1))
    assert both.half_width == pytest.approx((welch.high - welch.low) / 2, rel=0.15)


@given(ROUNDS, ROUNDS)
def test_comparing_ratios_has_welchs_freedom(
    head: list[list[tuple[float, float]]], base: list[list[tuple[float, float]]]
) -> None:
    head_medians = [statistics.median(math.log(a / b) for a, b in pairs) for pairs in head]
    base_medians = [statistics.median(math.log(a / b) for a, b in pairs) for pairs in base]
    assume(min(statistics.variance(head_medians), statistics.variance(base_medians)) > 1e-6)
    expected = oracle.ttest_ind(head_medians, base_medians, equal_var=False)

    estimate = stats.compare_ratios(head, base)

    assert estimate.freedom == pytest.approx(expected.df, rel=1e-6)
    assert estimate.ratio == pytest.approx(math.exp(statistics.fmean(head_medians) - statistics.fmean(base_medians)))


def test_the_same_samples_have_the_same_interval() -> None:
    rounds = [[(1.0 + 0.01 * index, 1.0)] for index in (0, 3, 1, 7, 4)]
    assert stats.paired_ratio(rounds) == stats.paired_ratio(rounds)
    assert stats.compare_ratios(rounds, rounds[:3]) == stats.compare_ratios(rounds, rounds[:3])


def test_a_lopsided_set_of_rounds_has_a_lopsided_interval() -> None:
    estimate = stats.paired_ratio([[(1.0, 1.0)]] * 6 + [[(1.5, 1.0)]])
    downwards, upwards = math.log(estimate.ratio / estimate.low), math.log(estimate.high / estimate.ratio)
    assert upwards > 1.5 * downwards


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
    assert stats.paired_ratio(rounds) == Estimate(0.5, 0.5, 0.5, 3, 3, 2)
    assert stats.compare_ratios(rounds, rounds) == Estimate(1.0, 1.0, 1.0, 3, 3, 4)


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


def rounds_around(ratio: float, rng: random.Random, spread: float = 0.01, count: int = 5) -> list[stats.Pairs]:
    return [[(ratio * math.exp(rng.gauss(0, spread)), 1.0)] for _ in range(count)]


def test_a_p_value_agrees_with_the_interval() -> None:
    rng = random.Random(3)
    for _ in range(200):
        estimate = stats.paired_ratio(rounds_around(rng.uniform(0.97, 1.03), rng))
        assert (estimate.p_value <= 0.05) == (not estimate.low <= 1 <= estimate.high)


def test_p_values_of_special_estimates() -> None:
    assert Estimate(1.1, 0.0, math.inf, 1, 4).p_value == 1
    assert Estimate(1.0, 0.9, 1.1, 3, 9).p_value == 1
    assert Estimate(1.1, 1.1, 1.1, 3, 9).p_value == 0
    assert Estimate(1.1, 0.0, math.inf, 1, 4).half_width == math.inf


def test_a_single_ratio_is_judged_as_by_itself() -> None:
    for low, high in ((1.04, 1.06), (0.90, 0.95), (0.98, 1.02), (0.9, 1.1)):
        estimate = Estimate(math.sqrt(low * high), low, high, 5, 9)
        assert stats.judge([estimate], [0.03]) == (stats.verdict(estimate, 0.03),)


def test_among_many_rows_a_barely_clear_one_is_inconclusive() -> None:
    barely = Estimate(1.36, 1.035, 1.79, 3, 9)
    unchanged = Estimate(1.001, 0.99, 1.012, 3, 9)
    assert stats.judge([barely], [0.03]) == (Verdict.SLOWER,)
    assert stats.judge([barely, *[unchanged] * 20], [0.03] * 21) == (Verdict.INCONCLUSIVE, *[Verdict.SAME] * 20)


def test_what_is_clear_stays_clear_among_many_rows() -> None:
    slow, fast = Estimate(1.10, 1.09, 1.11, 5, 9), Estimate(0.8, 0.79, 0.81, 5, 9)
    unchanged = Estimate(1.001, 0.99, 1.012, 5, 9)
    judged = stats.judge([slow, fast, *[unchanged] * 100], [0.03] * 102)
    assert judged[:2] == (Verdict.SLOWER, Verdict.FASTER)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_discoveries_are_scipys(p_values: list[float]) -> None:
    adjusted = oracle.false_discovery_control(p_values)
    assume(min(abs(value - stats.FALSE_DISCOVERIES) for value in adjusted) > 1e-9)
    bound = stats._discovery_bound(p_values, stats.FALSE_DISCOVERIES)
    assert [p <= bound for p in p_values] == [value <= stats.FALSE_DISCOVERIES for value in adjusted]


def test_judging_needs_a_margin_for_each_ratio() -> None:
    with pytest.raises(ValueError, match="1 estimates but 2 margins"):
        stats.judge([Estimate(1, 0.9, 1.1, 3, 9)], [0.03, 0.03])
    assert stats.judge([], []) == ()


@pytest.mark.parametrize(
    ("noise", "least", "expected"),
    [(None, 0.03, 0.03), (0.005, 0.03, 0.03), (0.02, 0.03, math.expm1(0.04)), (0.5, 0.03, 0.10), (0.5, 0.2, 0.2)],
)
def test_a_margin_is_twice_the_noise_within_bounds(noise: float | None, least: float, expected: float) -> None:
    assert stats.noise_margin(noise, least) == pytest.approx(expected)


def test_the_noise_of_repeats_is_their_spread_whatever_changed_between_them() -> None:
    rng = random.Random(0)
    level = [1.0] * 100 + [1.2] * 60 + [0.9] * 40
    measured = [value * math.exp(rng.gauss(0, 0.01)) for value in level]
    assert stats.repeat_noise(measured) == pytest.approx(math.sqrt(2) * 0.01, rel=0.2)
    assert stats.repeat_noise(measured[:8]) is None


@pytest.mark.parametrize(
    ("repeats", "rounds", "expected"),
    [(None, 0.01, 0.01), (0.005, 0.01, 0.005), (0.015, 0.01, 0.015), (0.08, 0.01, 0.02), (0.01, None, None)],
)
def test_noise_over_the_history_counts_as_far_as_processes_explain_it(
    repeats: float | None, rounds: float | None, expected: float | None
) -> None:
    assert stats.benchmark_noise(repeats, rounds) == expected


def test_the_noise_of_rounds_is_their_pooled_spread() -> None:
    rng = random.Random(0)
    one, other = rounds_around(1.0, rng, count=60), rounds_around(1.4, rng, count=40)
    assert stats.round_noise(one, other) == pytest.approx(0.01, rel=0.15)
    assert stats.round_noise(one[:1], other[:1]) is None


def test_a_geometric_mean() -> None:
    exact = [Estimate(2.0, 2.0, 2.0, 3, 9), Estimate(8.0, 8.0, 8.0, 4, 8)]
    assert stats.geometric_mean(exact).ratio == pytest.approx(4)
    assert stats.geometric_mean(exact).low == pytest.approx(4)
    assert (stats.geometric_mean(exact).rounds, stats.geometric_mean(exact).pairs) == (3, 17)
    assert not stats.geometric_mean([*exact, Estimate(2.0, 0.0, math.inf, 1, 3)]).has_interval
    for unusable in ([], [0.0], [math.inf], [-1.0]):
        with pytest.raises(ValueError, match="geometric mean"):
            stats.geometric_mean([Estimate(ratio, ratio, ratio, 3, 9) for ratio in unusable])


def test_the_interval_of_a_geometric_mean_holds_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(400):
        means = stats.geometric_mean([stats.paired_ratio(rounds_around(ratio, rng)) for ratio in (0.5, 0.8, 1.25, 2.0)])
        covered += means.low <= 1 <= means.high
    assert 0.93 <= covered / 400 <= 0.985


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
