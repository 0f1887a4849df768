"""What paired samples say: ratios with intervals, verdicts, and the small numbers a reader decides by.

Pure functions of plain numbers. The unit of evidence is the *round*, a fresh process: samples within one process share
its memory layout, clocks and neighbours, so treating them as independent makes every interval falsely tight (Kalibera
and Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013). Within a round, two variants are compared pair by
pair, each pair measured in the same turn, and the round contributes one number: the median of its log-ratios.

Intervals are bootstrapped over rounds (Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics
1979): rounds are drawn again with replacement, and what their mean then is shows how far it may be off. Of few rounds
that is too little: resampled means vary by (n - 1) / n of the variance, and their tails are normal where Student's are
not. So deviations are stretched by sqrt(n / (n - 1)) and by Student's quantile over the normal one (Hesterberg, "What
Teachers Should Know About the Bootstrap", The American Statistician 2015, section 3.2, does the same to their levels).
The draws come from a generator with a fixed seed: the same samples always give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist, fmean, median, variance

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95

FALSE_DISCOVERIES = 0.05
"""Of what :func:`judge` calls faster or slower, at most this share is expected not to have changed at all."""

MOST_MARGIN = 0.10
"""The widest margin that noise may lead to: beyond it a verdict would hide what anybody calls a regression."""

_RESAMPLES = 4000
_LEAST_REPEATS = 8
_TO_SPREAD = 1 / NormalDist().inv_cdf(0.75)
"""What makes a median of absolute deviations estimate a standard deviation."""

Pairs = Sequence[tuple[float, float]]
"""(seconds of a, seconds of b), both positive, measured in the same turn."""

Curve = Sequence[tuple[int, "float | None"]]
"""(step, loss) with steps ascending; None where the loss was not finite."""


@dataclass(frozen=True)
class Estimate:
    """A ratio of two times with its 95% interval.

    ``low`` is 0 and ``high`` infinite where no interval can be claimed. ``rounds`` and ``pairs`` say how much it rests
    on; for a comparison of two measurements they are those of the one with fewer rounds. ``freedom`` are the degrees of
    freedom of the interval; None for as many as there are rounds, less one.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    pairs: int
    freedom: float | None = None

    @property
    def has_interval(self) -> bool:
        """Whether the interval says anything."""
        return math.isfinite(self.high)

    def inverted(self) -> Estimate:
        """The ratio of b to a instead of a to b: a speed-up where this is a ratio of times."""
        low = 1 / self.high if self.has_interval else 0.0
        high = 1 / self.low if self.low > 0 else math.inf
        return Estimate(1 / self.ratio, low, high, self.rounds, self.pairs, self.freedom)

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the logarithm: 0.01 is about one percent; infinite without an interval."""
        return math.log(self.high / self.low) / 2 if self.has_interval and self.low > 0 else math.inf

    @property
    def errors(self) -> tuple[float, float]:
        """Standard errors of the logarithm of the ratio, downwards and upwards; infinite without an interval."""
        if not self.has_interval or self.low <= 0:
            return math.inf, math.inf
        quantile = _t_quantile(self._freedom)
        return math.log(self.ratio / self.low) / quantile, math.log(self.high / self.ratio) / quantile

    @property
    def p_value(self) -> float:
        """How probable it is to find a ratio at least so far from 1, on either side, where in truth it is 1."""
        downwards, upwards = self.errors
        distance, error = abs(math.log(self.ratio)), downwards if self.ratio > 1 else upwards
        if distance == 0 or math.isinf(error):
            return 1.0
        return 0.0 if error == 0 else _beyond(distance / error, self._freedom)

    @property
    def _freedom(self) -> float:
        return max(1.0, self.rounds - 1.0) if self.freedom is None else self.freedom


class Verdict(Enum):
    """What an interval says about a ratio of times against a margin."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"


def paired_ratio(rounds: Sequence[Pairs]) -> Estimate:
    """Ratio of the times of a to those of b over rounds of pairs.

    The median of the paired log-ratios of each round, then their mean with its bootstrapped interval over rounds (see
    above), both taken back by exp. From a single round no interval is claimed: how much processes differ cannot be seen
    from within one.

    Raises:
        ValueError: there is no round, a round without pairs, or a time that is not positive and finite.
    """
    return ratio_of_medians(log_medians(rounds), sum(len(entry) for entry in rounds))


def ratio_of_medians(medians: Sequence[float], pairs: int) -> Estimate:
    """:func:`paired_ratio` of rounds of which only the :func:`log_medians` are at hand.

    Args:
        medians: one a round, at least one.
        pairs: how many pairs the rounds had altogether.
    """
    centre = fmean(medians)
    if len(medians) < 2:
        return Estimate(math.exp(centre), 0.0, math.inf, 1, pairs)
    return _estimate(centre, [medians], len(medians) - 1.0, len(medians), pairs)


def compare_ratios(head: Sequence[Pairs], base: Sequence[Pairs]) -> Estimate:
    """How a ratio measured at head relates to the same ratio measured at base: above 1, a's time has grown.

    The two sets of rounds are independent and are resampled each by itself; the degrees of freedom are Welch's (Welch,
    "The Generalization of 'Student's' Problem when Several Different Population Variances are Involved", Biometrika
    1947). Where b is a control that the commits do not touch, machine-wide drift between the two measurements cancels.

    Raises:
        ValueError: as :func:`paired_ratio`.
    """
    head_medians, base_medians = log_medians(head), log_medians(base)
    centre = fmean(head_medians) - fmean(base_medians)
    fewer = head if len(head) <= len(base) else base
    pairs = sum(len(entry) for entry in fewer)
    if len(fewer) < 2:
        return Estimate(math.exp(centre), 0.0, math.inf, len(fewer), pairs)
    squares = [variance(medians) / len(medians) for medians in (head_medians, base_medians)]
    freedom = _welch_freedom(squares, [len(head_medians) - 1.0, len(base_medians) - 1.0])
    return _estimate(centre, [head_medians, [-value for value in base_medians]], freedom, len(fewer), pairs)


def standing_against_all(estimates: Sequence[Estimate]) -> Estimate:
    """One change, seen against several controls of which any may be the right one: what stands against all of them.

    The smallest of the changes, in an interval from the lowest bound to the highest: that one of them is beyond a
    margin is rejected where it is for each (Berger, "Multiparameter Hypothesis Testing and Acceptance Sampling",
    Technometrics 1982), without any allowance for their number.

    Args:
        estimates: one a control, at least one.
    """
    least = min(estimates, key=lambda estimate: abs(math.log(estimate.ratio)))
    return Estimate(
        least.ratio,
        min(estimate.low for estimate in estimates),
        max(estimate.high for estimate in estimates),
        least.rounds,
        least.pairs,
        min(estimate._freedom for estimate in estimates),
    )


def log_medians(rounds: Sequence[Pairs]) -> list[float]:
    """The median of the log-ratios of each round: the one number that a round contributes.

    Raises:
        ValueError: there is no round, a round without pairs, or a time that is not positive and finite.
    """
    if not rounds:
        raise ValueError("a ratio needs at least one round of pairs")
    medians = []
    for pairs in rounds:
        if not pairs:
            raise ValueError("a round holds no pairs")
        if not all(0 < time < math.inf for pair in pairs for time in pair):
            raise ValueError("a time is not positive and finite")
        medians.append(median(math.log(a) - math.log(b) for a, b in pairs))
    return medians


def verdict(estimate: Estimate, margin: float) -> Verdict:
    """Judge a ratio of times by its whole interval.

    ``margin`` is the relative difference that does not matter; :func:`margin_band` is what counts as the same. Faster
    and slower are said only of an interval that lies beyond that band altogether, the same only of one that lies within
    it (the interval form of the equivalence test: Schuirmann, J. Pharmacokinetics and Biopharmaceutics, 1987); anything
    else is inconclusive and asks for more rounds.

    Raises:
        ValueError: the margin is not a positive finite number.
    """
    least, most = margin_band(margin)
    if estimate.low > most:
        return Verdict.SLOWER
    if estimate.high < least:
        return Verdict.FASTER
    if least <= estimate.low and estimate.high <= most:
        return Verdict.SAME
    return Verdict.INCONCLUSIVE


def margin_band(margin: float) -> tuple[float, float]:
    """The ratios that count as the same.

    Raises:
        ValueError: the margin is not a positive finite number.
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"margin is {margin}; expected a positive fraction such as 0.03")
    return 1 / (1 + margin), 1 + margin


def judge(estimates: Sequence[Estimate], margins: Sequence[float]) -> tuple[Verdict, ...]:
    """Verdicts on many ratios at once, each with its margin: of many, some look changed by chance.

    As :func:`verdict`, but faster or slower is said only where "it has not changed at all" is rejected too, by the
    procedure that bounds the share of false discoveries among all of them (Benjamini and Hochberg, "Controlling the
    False Discovery Rate", J. Royal Statistical Society B 1995; ratios that share a reference are positively dependent,
    for which it holds as well: Benjamini and Yekutieli, Annals of Statistics 2001). What is not is inconclusive.

    Raises:
        ValueError: a margin is not a positive finite number, or there are more or fewer margins than estimates.
    """
    if len(estimates) != len(margins):
        raise ValueError(f"{len(estimates)} estimates but {len(margins)} margins; each estimate needs its own")
    alone = [verdict(estimate, margin) for estimate, margin in zip(estimates, margins, strict=True)]
    bound = _discovery_bound([estimate.p_value for estimate in estimates], FALSE_DISCOVERIES)
    clear = (Verdict.FASTER, Verdict.SLOWER)
    return tuple(
        Verdict.INCONCLUSIVE if judged in clear and estimate.p_value > bound else judged
        for estimate, judged in zip(estimates, alone, strict=True)
    )


def _discovery_bound(p_values: Sequence[float], rate: float) -> float:
    """The largest p-value that is still rejected; below 0 where none is."""
    ordered = sorted(p_values)
    rejected = [p for rank, p in enumerate(ordered, start=1) if p <= rank / len(ordered) * rate]
    return max(rejected, default=-1.0)


def noise_margin(noise: float | None, least: float) -> float:
    """The margin of a benchmark whose measurements differ by so much where the code does not.

    Twice the noise, which differences of unchanged code exceed about once in twenty times, but not below ``least`` and,
    unless that is wider, not above :data:`MOST_MARGIN`.

    Args:
        noise: standard deviation of log-ratios, from :func:`repeat_noise` or :func:`round_noise`; None where unknown.
        least: the relative difference that does not matter in any benchmark.
    """
    if noise is None:
        return least
    return max(least, min(MOST_MARGIN, math.expm1(2 * noise)))


def benchmark_noise(repeats: float | None, rounds: float | None) -> float | None:
    """The noise that a benchmark's margin follows: what repeats differ by, as far as processes explain it.

    From commit to commit the code changes too. So of what measurements one after the other differ by, no more counts
    than twice what processes do; where there is no history to tell, it is what processes differ by.

    Args:
        repeats: from :func:`repeat_noise`.
        rounds: from :func:`round_noise`.
    """
    if repeats is None or rounds is None:
        return rounds
    return min(repeats, 2 * rounds)


def repeat_noise(ratios: Sequence[float]) -> float | None:
    """How much two measurements one after the other differ: the standard deviation of the log of their quotient.

    From the median of absolute differences between neighbours (von Neumann et al., "The Mean Square Successive
    Difference", Annals of Mathematical Statistics 1941, made robust), so that changes of the code, each in one of many
    differences, hardly count. None for fewer than nine ratios.

    Args:
        ratios: of the same benchmark, in the order in which its commits were measured; positive and finite.
    """
    if len(ratios) <= _LEAST_REPEATS:
        return None
    return _TO_SPREAD * float(np.median(np.abs(np.diff(np.log(ratios)))))


def round_noise(*measurements: Sequence[Pairs]) -> float | None:
    """How much rounds of the same measurement differ: the pooled standard deviation of their median log-ratios.

    None where no measurement has two rounds.

    Raises:
        ValueError: as :func:`paired_ratio`.
    """
    sets = [medians for rounds in measurements if len(medians := log_medians(rounds)) > 1]
    freedom = sum(len(medians) - 1 for medians in sets)
    if not freedom:
        return None
    return math.sqrt(sum(variance(medians) * (len(medians) - 1) for medians in sets) / freedom)


def geometric_mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean that does not depend on which side of a ratio is the reference, with its interval.

    Fleming and Wallace, "How not to lie with statistics", CACM 1986. The interval is for the mean over these very
    benchmarks, measured independently of each other: their standard errors are added up, each direction by itself, with
    the degrees of freedom of Welch and Satterthwaite. There is none where one of them has none.

    Raises:
        ValueError: there is no estimate, or a ratio is not positive and finite.
    """
    ratios = [estimate.ratio for estimate in estimates]
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"a geometric mean needs positive finite ratios, got {ratios}")
    centre = fmean(math.log(ratio) for ratio in ratios)
    rounds, pairs = min(entry.rounds for entry in estimates), sum(entry.pairs for entry in estimates)
    errors = [estimate.errors for estimate in estimates]
    if any(math.isinf(error) for sides in errors for error in sides):
        return Estimate(math.exp(centre), 0.0, math.inf, rounds, pairs)
    squares = [((down + up) / 2) ** 2 for down, up in errors]
    freedom = _welch_freedom(squares, [estimate._freedom for estimate in estimates])
    half = _t_quantile(freedom) / len(ratios)
    low, high = (half * math.sqrt(sum(sides[side] ** 2 for sides in errors)) for side in (0, 1))
    return Estimate(math.exp(centre), math.exp(centre - low), math.exp(centre + high), rounds, pairs, freedom)


def typical_seconds(rounds: Sequence[Sequence[float]]) -> float:
    """The time to quote for a variant: the median over rounds of each round's median.

    Raises:
        ValueError: there is no round, or a round is empty.
    """
    if not rounds or not all(rounds):
        raise ValueError("a typical time needs at least one round, and at least one time in each")
    return median(median(times) for times in rounds)


def break_even_steps(
    setup_s: float, seconds_per_step: float, reference_setup_s: float, reference_seconds_per_step: float
) -> float:
    """After how many steps a variant's dearer set-up is earned back: 0 where it is not dearer, infinite for never."""
    extra = setup_s - reference_setup_s
    saved = reference_seconds_per_step - seconds_per_step
    if extra <= 0 and saved >= 0:
        return 0
    if saved <= 0:
        return math.inf
    return max(0, math.ceil(extra / saved))


def loss_gap(curve: Curve, baseline: Curve) -> float | None:
    """How far training has come compared with a baseline on the same batches, as a share of the baseline's progress.

    At the last step that both curves have: (loss - baseline loss) / (baseline's first loss - baseline loss). 0 is
    parity, 0.1 says a tenth of what the baseline learned is missing, negative values say more was learned. Infinite
    where the curve is no longer finite; None where it cannot be said (no common step, or a baseline that has not
    learned).
    """
    reference = dict(baseline)
    common = [(step, loss) for step, loss in curve if step in reference]
    if not common:
        return None
    step, loss = common[-1]
    first, last = baseline[0][1], reference[step]
    if first is None or last is None or first <= last:
        return None
    return math.inf if loss is None else (loss - last) / (first - last)


def _estimate(centre: float, samples: Sequence[Sequence[float]], freedom: float, rounds: int, pairs: int) -> Estimate:
    """An estimate whose interval are the quantiles of how far the sum of the samples' means is off in resamples.

    Args:
        samples: independent of one another, each of two values or more.
    """
    shares, counts = _resamples(tuple(map(len, samples)))
    deviations = shares @ np.concatenate([_centred(values) for values in samples])
    ascending = deviations.argsort()
    reached = counts[ascending].cumsum()
    tail = (1 - CONFIDENCE) / 2
    stretch = _t_quantile(freedom) / NormalDist().inv_cdf(1 - tail)
    low, high = deviations[ascending[reached.searchsorted((tail * _RESAMPLES, (1 - tail) * _RESAMPLES))]].tolist()
    bounds = math.exp(centre + stretch * min(0.0, low)), math.exp(centre + stretch * max(0.0, high))
    return Estimate(math.exp(centre), *bounds, rounds, pairs, freedom)


def _centred(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Deviations from the mean, so wide that means of resamples have the variance that means of new samples would."""
    stretched: npt.NDArray[np.float64] = (np.asarray(values) - fmean(values)) * math.sqrt(
        len(values) / (len(values) - 1)
    )
    return stretched


@lru_cache(maxsize=64)
def _resamples(sizes: tuple[int, ...]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The different resamples of independent samples of these sizes: for each the share that every value of the first
    has in it, of the second, and so on; and how many times it was drawn. Of few values there are few: ten of three.
    """
    drawn = [
        np.random.default_rng((size, seed)).integers(size, size=(_RESAMPLES, size)) for seed, size in enumerate(sizes)
    ]
    counts = [(of_one == index).sum(axis=1) for of_one, size in zip(drawn, sizes, strict=True) for index in range(size)]
    different, times = np.unique(np.stack(counts, axis=1), axis=0, return_counts=True)
    return different / np.repeat(sizes, sizes), times


def _welch_freedom(squares: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a sum of independent terms with these squared standard errors."""
    total = sum(squares)
    if total == 0:
        return sum(freedoms)
    return 1 / sum((square / total) ** 2 / freedom for square, freedom in zip(squares, freedoms, strict=True))


@lru_cache(maxsize=1024)
def _t_quantile(freedom: float) -> float:
    """The value that |t| stays below with probability :data:`CONFIDENCE`, for any real degrees of freedom from 1.

    P(|t| > q) is the regularized incomplete beta function at freedom / (freedom + q^2), with parameters freedom / 2 and
    1 / 2 (Abramowitz and Stegun, 26.5.27 and 26.7.1); bisection on q, which the function falls with.
    """
    low, high = 0.0, 2.0
    while _beyond(high, freedom) > 1 - CONFIDENCE:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, freedom) > 1 - CONFIDENCE else (low, middle)
    return (low + high) / 2


def _beyond(value: float, freedom: float) -> float:
    """P(|t| > value)."""
    a, b = freedom / 2, 0.5
    x = freedom / (freedom + value * value)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    return _incomplete_beta(a, b, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized incomplete beta function by its continued fraction (DLMF 8.17.22), evaluated by Lentz's method."""
    if x <= 0:
        return 0.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    numerator, denominator, fraction = 1.0, 0.0, 1.0
    for index in range(20_000):
        m = index // 2
        if index == 0:
            coefficient = 1.0
        elif index % 2:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominator = 1 / (1 + coefficient * denominator)
        numerator = 1 + coefficient / numerator
        fraction *= numerator * denominator
        if index and abs(numerator * denominator - 1) < 1e-15:
            break
    return front * (fraction - 1)
