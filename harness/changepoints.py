"""Where the level of a series of measurements changed for good, or for a while.

Three steps:

1. Candidates: the piecewise constant function with the least sum of absolute residuals plus a penalty for each step
   (Friedrich et al., "Complexity Penalized M-Estimation", J. Computational and Graphical Statistics 2008), by asv's
   ``step_detect``. asv is there wherever there are results, so a report needs nothing more; its search is in C++ and
   takes absolute values, which a few outliers do not move. Its penalty is set low here, so that it names too many.
2. Decision: a permutation test for each candidate, on the values around it up to the neighbouring candidates. The
   statistic is the largest standardized difference of means over all places in that stretch, as the place was chosen by
   looking (Csörgő and Horváth, "Limit Theorems in Change-Point Analysis", 1997, chapter 1); values far off their level
   are drawn in before, so that outliers are no steps. The least significant candidate is dropped and its neighbours are
   judged again, until all that are left are significant.
3. Size: a step that is significant but smaller than :data:`LEAST_STEP` is dropped as well. Slow drifts, which no
   permutation test tells from steps, are mostly smaller than that within the stretches that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from asv import step_detect

LEAST_STEP = 0.02
"""Relative size of the smallest step that is reported."""

SIGNIFICANCE = 0.01
"""A candidate stays where fewer permutations than this share make as large a step."""

LEAST_RUN = 3
"""A level holds for at least so many measurements: one or two are outliers."""

_STRETCH = 30
_PERMUTATIONS = 299
_FIRST_PERMUTATIONS = 49
_CHANCE = 0.1
"""Where so many of the first permutations make as large a step, the others are not tried."""
_NEVER = 2.0
"""A statistic below so many standard deviations of the values has a p-value of several percent at its place alone."""
_PENALTY = 3.5
_CLIP = 3.0
_LONGEST_PIECE = 12
_LONGEST_MOVE = 3
_LIKELIHOOD_BOUND = NormalDist().inv_cdf(0.975) ** 2
"""What twice the log-likelihood may fall below its largest value within a 95% range of one parameter."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChangePoint:
    """A step in a series.

    ``position`` is the index of the first value of the new level; with 95% confidence it lies from ``earliest`` to
    ``latest`` (for normal noise: Hinkley, "Inference about the change-point in a sequence of random variables",
    Biometrika 1970). ``ratio`` is the new level over the old one.
    """

    position: int
    earliest: int
    latest: int
    ratio: float
    p_value: float


def find_changes(values: Sequence[float], *, least_step: float = LEAST_STEP) -> tuple[ChangePoint, ...]:
    """The steps of a series, in its order; the same values always give the same steps.

    Args:
        values: measurements of the same benchmark in the same environment, in the order of the commits; those that are
            missing are left out.
        least_step: relative size of the smallest step to report.

    Raises:
        ValueError: a value is not positive and finite, or the least step is negative.
    """
    measured = np.asarray(values, dtype=np.float64)
    if not np.all((measured > 0) & np.isfinite(measured)):
        raise ValueError("a series holds a value that is not positive and finite; leave out what was not measured")
    if not least_step >= 0:
        raise ValueError(f"least_step is {least_step}; expected a fraction from 0, such as {LEAST_STEP}")
    if len(measured) < 2 * LEAST_RUN:
        return ()
    logs = np.log(measured)
    spread = _spread(logs)
    if spread == 0:
        return ()
    kept = _significant(logs, spread, _candidates(logs, spread), math.log1p(least_step))
    edges = [0, *kept, len(logs)]
    return tuple(
        _change(logs, spread, *place, kept[place[1]]) for place in zip(edges, edges[1:], edges[2:], strict=False)
    )


def _spread(logs: Floats) -> float:
    """Standard deviation of the noise: from differences of neighbours, of which steps are few."""
    differences = np.abs(np.diff(logs))
    typical = float(np.median(differences)) or float(np.mean(differences))
    return typical / NormalDist().inv_cdf(0.75) / math.sqrt(2)


def _candidates(logs: Floats, spread: float) -> list[int]:
    """First indices of the pieces of asv's solution.

    Its exact solver takes time with the square of the longest piece, so pieces are short at first and then merged where
    that costs less, as asv itself does; their edges move by a few places then, and are found exactly in the end.
    """
    values, weights = logs.tolist(), [1.0] * len(logs)
    distances, penalty = step_detect.get_mu_dist(values, weights), _PENALTY * spread
    right, levels, residuals = step_detect.solve_potts(
        values, weights, penalty, min_size=LEAST_RUN, max_size=_LONGEST_PIECE, mu_dist=distances
    )
    right, _, _ = step_detect.merge_pieces(penalty, right, levels, residuals, distances, max_size=_LONGEST_MOVE)
    return [int(edge) for edge in right[:-1]]


def _significant(logs: Floats, spread: float, candidates: Sequence[int], least: float) -> dict[int, float]:
    """The candidates that are left when the least significant one is dropped again and again, with their p-values."""
    kept = list(candidates)
    known: dict[tuple[int, int, int], float] = {}
    while True:
        edges = [0, *kept, len(logs)]
        places = list(zip(edges, edges[1:], edges[2:], strict=False))
        for place in places:
            if place not in known:
                known[place] = _p_value(logs, spread, *place, least)
        p_values = [known[place] for place in places]
        if max(p_values, default=0.0) <= SIGNIFICANCE:
            return dict(zip(kept, p_values, strict=True))
        del kept[max(range(len(kept)), key=p_values.__getitem__)]


def _p_value(logs: Floats, spread: float, before: int, position: int, after: int, least: float = 0.0) -> float:
    """How often values in random order make as large a step; 1 for a step that is too small to matter.

    A statistic that no permutation test finds significant is not tested: at each single place, it has the variance of
    the values.
    """
    _, values = _around(logs, spread, before, position, after)
    if len(values) < 2 * LEAST_RUN:
        return 1.0
    statistics = _statistics(values)
    best = int(statistics.argmax())
    observed = float(statistics[best]) * (1 - 1e-9)
    deviation = math.sqrt(float(values @ values) / len(values))
    if abs(_step(values, best + LEAST_RUN)) < least or observed < _NEVER * deviation:
        return 1.0
    orders = _orders(len(values))
    early = int((_statistics(values[orders[:_FIRST_PERMUTATIONS]]).max(axis=-1) >= observed).sum())
    if early >= _CHANCE * _FIRST_PERMUTATIONS:
        return (early + 1) / (_FIRST_PERMUTATIONS + 1)
    late = int((_statistics(values[orders[_FIRST_PERMUTATIONS:]]).max(axis=-1) >= observed).sum())
    return (early + late + 1) / (_PERMUTATIONS + 1)


def _around(logs: Floats, spread: float, before: int, position: int, after: int) -> tuple[int, Floats]:
    """Where the stretch that a candidate is judged by begins, and its values: centred, with outliers drawn in."""
    start, end = max(before, position - _STRETCH), min(after, position + _STRETCH)
    levels = np.empty(end - start)
    levels[: position - start] = _median(logs[start:position])
    levels[position - start :] = _median(logs[position:end])
    deviations = logs[start:end] - levels
    drawn_in: Floats = levels + np.minimum(np.maximum(deviations, -_CLIP * spread), _CLIP * spread)
    return start, drawn_in - drawn_in.sum() / len(drawn_in)


def _median(values: Floats) -> float:
    """What numpy's does, in a fraction of the time for a few values."""
    ordered = np.sort(values)
    return float(ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


def _step(values: Floats, split: int) -> float:
    """For centred values: the mean from a place on, less that before it."""
    return -float(values[:split].sum()) * len(values) / (split * (len(values) - split))


def _statistics(values: Floats) -> Floats:
    """For centred values, along the last axis: the standardized difference of means for each place of a step."""
    size = values.shape[-1]
    sums = values.cumsum(axis=-1)[..., LEAST_RUN - 1 : size - LEAST_RUN]
    standardized: Floats = np.abs(sums, out=sums) * _scales(size)
    return standardized


@lru_cache(maxsize=2 * _STRETCH)
def _scales(size: int) -> Floats:
    places = np.arange(LEAST_RUN, size - LEAST_RUN + 1)
    scales: Floats = np.sqrt(size / (places * (size - places)))
    return scales


@lru_cache(maxsize=2 * _STRETCH)
def _orders(size: int) -> npt.NDArray[np.int64]:
    """Random orders of so many values, the same ones every time."""
    orders: npt.NDArray[np.int64] = np.random.default_rng(size).permuted(
        np.tile(np.arange(size), (_PERMUTATIONS, 1)), axis=1
    )
    return orders


def _change(logs: Floats, spread: float, before: int, position: int, after: int, p_value: float) -> ChangePoint:
    """The step with its best place, the range of its places, and its size."""
    start, values = _around(logs, spread, before, position, after)
    explained = _statistics(values) ** 2
    best = int(explained.argmax())
    noise = float(values @ values - explained[best]) / (len(values) - 2)
    likely = np.flatnonzero(explained >= explained[best] - _LIKELIHOOD_BOUND * noise)
    first = start + LEAST_RUN
    return ChangePoint(
        position=first + best,
        earliest=first + int(likely[0]),
        latest=first + int(likely[-1]),
        ratio=math.exp(_step(values, best + LEAST_RUN)),
        p_value=p_value,
    )
