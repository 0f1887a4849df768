"""What paired samples say: ratios with intervals, verdicts, and the small numbers a reader decides by.

Pure functions of plain numbers. The unit of evidence is the *round*, a fresh process: samples within one process share
its memory layout, clocks and neighbours, so treating them as independent makes every interval falsely tight (Kalibera
and Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013). Within a round, two variants are compared pair by
pair, each pair measured in the same turn, and the round contributes one number: the median of its log-ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import fmean, median, variance

CONFIDENCE = 0.95

Pairs = Sequence[tuple[float, float]]
"""(seconds of a, seconds of b), both positive, measured in the same turn."""

Curve = Sequence[tuple[int, "float | None"]]
"""(step, loss) with steps ascending; None where the loss was not finite."""


@dataclass(frozen=True)
class Estimate:
    """A ratio of two times with its 95% interval.

    ``low`` is 0 and ``high`` infinite where no interval can be claimed. ``rounds`` and ``pairs`` say how much it rests
    on; for a comparison of two measurements they are those of the one with fewer rounds.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    pairs: int

    @property
    def has_interval(self) -> bool:
        """Whether the interval says anything."""
        return math.isfinite(self.high)

    def inverted(self) -> Estimate:
        """The ratio of b to a instead of a to b: a speed-up where this is a ratio of times."""
        low = 1 / self.high if self.has_interval else 0.0
        high = 1 / self.low if self.low > 0 else math.inf
        return Estimate(1 / self.ratio, low, high, self.rounds, self.pairs)


class Verdict(Enum):
    """What an interval says about a ratio of times against a margin."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"


def paired_ratio(rounds: Sequence[Pairs]) -> Estimate:
    """Ratio of the times of a to those of b over rounds of pairs.

    The median of the paired log-ratios of each round, then their mean with Student's t interval over the rounds
    (Student, "The Probable Error of a Mean", Biometrika 1908), both taken back by exp. From a single round no interval
    is claimed: how much processes differ cannot be seen from within one.

    Raises:
        ValueError: there is no round, a round without pairs, or a time that is not positive and finite.
    """
    medians = _log_medians(rounds)
    centre = fmean(medians)
    pairs = sum(len(entry) for entry in rounds)
    if len(medians) < 2:
        return Estimate(math.exp(centre), 0.0, math.inf, 1, pairs)
    half = _t_quantile(len(medians) - 1.0) * math.sqrt(variance(medians) / len(medians))
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), len(medians), pairs)


def compare_ratios(head: Sequence[Pairs], base: Sequence[Pairs]) -> Estimate:
    """How a ratio measured at head relates to the same ratio measured at base: above 1, a's time has grown.

    The two sets of rounds are independent, so the interval is Welch's (Welch, "The Generalization of 'Student's'
    Problem when Several Different Population Variances are Involved", Biometrika 1947) on the per-round medians of
    log-ratios. Where b is a control that the commits do not touch, machine-wide drift between the two measurements
    cancels.

    Raises:
        ValueError: as :func:`paired_ratio`.
    """
    head_medians, base_medians = _log_medians(head), _log_medians(base)
    centre = fmean(head_medians) - fmean(base_medians)
    fewer = head if len(head) <= len(base) else base
    pairs = sum(len(entry) for entry in fewer)
    if len(fewer) < 2:
        return Estimate(math.exp(centre), 0.0, math.inf, len(fewer), pairs)
    head_square = variance(head_medians) / len(head_medians)
    base_square = variance(base_medians) / len(base_medians)
    square = head_square + base_square
    half = 0.0
    if square > 0:
        head_share, base_share = head_square / square, base_square / square
        freedom = 1 / (head_share**2 / (len(head_medians) - 1) + base_share**2 / (len(base_medians) - 1))
        half = _t_quantile(freedom) * math.sqrt(square)
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), len(fewer), pairs)


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


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that does not depend on which side of a ratio is the reference.

    Fleming and Wallace, "How not to lie with statistics", CACM 1986.

    Raises:
        ValueError: there is no ratio, or one is not positive and finite.
    """
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"a geometric mean needs positive finite ratios, got {list(ratios)}")
    return math.exp(fmean(math.log(ratio) for ratio in ratios))


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


def _log_medians(rounds: Sequence[Pairs]) -> list[float]:
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
