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

_STRETCH = 50
_PERMUTATIONS = 999
_FIRST_PERMUTATIONS = 99
_PENALTY = 3.5
_CLIP = 3.0
_LONGEST_PIECE = 12
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
    kept = _significant(logs, spread, _candidates(logs, spread), float(np.log1p(least_step)))
    edges = [0, *kept, len(logs)]
    return tuple(
        _change(logs, spread, before, position, after)
        for before, position, after in zip(edges, edges[1:], edges[2:], strict=False)
    )


def _spread(logs: Floats) -> float:
    """Standard deviation of the noise: from differences of neighbours, of which steps are few."""
    differences = np.abs(np.diff(logs))
    typical = float(np.median(differences)) or float(np.mean(differences))
    return typical / NormalDist().inv_cdf(0.75) / math.sqrt(2)


def _candidates(logs: Floats, spread: float) -> list[int]:
    """First indices of the pieces of asv's solution.

    Its exact solver takes time with the square of the longest piece, so pieces are short at first and then merged where
    that costs less, as asv itself does.
    """
    values, weights = logs.tolist(), [1.0] * len(logs)
    distances, penalty = step_detect.get_mu_dist(values, weights), _PENALTY * spread
    right, levels, residuals = step_detect.solve_potts(
        values, weights, penalty, min_size=LEAST_RUN, max_size=_LONGEST_PIECE, mu_dist=distances
    )
    right, _, _ = step_detect.merge_pieces(penalty, right, levels, residuals, distances, max_size=_LONGEST_PIECE)
    return [int(edge) for edge in right[:-1]]


def _significant(logs: Floats, spread: float, candidates: Sequence[int], least: float) -> list[int]:
    """The candidates that are left when the least significant one is dropped again and again."""
    kept = list(candidates)
    known: dict[tuple[int, int, int], float] = {}
    while kept:
        edges = [0, *kept, len(logs)]
        p_values = []
        for place in zip(edges, edges[1:], edges[2:], strict=False):
            if place not in known:
                known[place] = _p_value(logs, spread, *place, least)
            p_values.append(known[place])
        worst = max(range(len(kept)), key=p_values.__getitem__)
        if p_values[worst] <= SIGNIFICANCE:
            break
        del kept[worst]
    return kept


def _p_value(logs: Floats, spread: float, before: int, position: int, after: int, least: float = 0.0) -> float:
    """How often values in random order make as large a step; 1 for a step that is too small to matter."""
    values = _around(logs, spread, before, position, after)[1]
    if len(values) < 2 * LEAST_RUN:
        return 1.0
    statistics = _statistics(values)
    split = int(np.argmax(statistics)) + LEAST_RUN
    if abs(float(np.mean(values[split:]) - np.mean(values[:split]))) < least:
        return 1.0
    observed = float(np.max(statistics)) * (1 - 1e-12)
    orders = _orders(len(values))
    early = int(np.sum(np.max(_statistics(values[orders[:_FIRST_PERMUTATIONS]]), axis=-1) >= observed))
    if early >= 10 * SIGNIFICANCE * _FIRST_PERMUTATIONS:
        return (early + 1) / (_FIRST_PERMUTATIONS + 1)
    late = int(np.sum(np.max(_statistics(values[orders[_FIRST_PERMUTATIONS:]]), axis=-1) >= observed))
    return (early + late + 1) / (_PERMUTATIONS + 1)


def _around(logs: Floats, spread: float, before: int, position: int, after: int) -> tuple[int, Floats]:
    """Where the stretch that a candidate is judged by begins, and its values: centred, with outliers drawn in."""
    start, end = max(before, position - _STRETCH), min(after, position + _STRETCH)
    left, right = logs[start:position], logs[position:end]
    levels = np.repeat((np.median(left), np.median(right)), (len(left), len(right)))
    drawn_in: Floats = levels + np.clip(logs[start:end] - levels, -_CLIP * spread, _CLIP * spread)
    return start, drawn_in - np.mean(drawn_in)


def _statistics(values: Floats) -> Floats:
    """For centred values, along the last axis: the standardized difference of means for each place of a step."""
    size = values.shape[-1]
    places = np.arange(LEAST_RUN, size - LEAST_RUN + 1)
    sums = np.cumsum(values, axis=-1)[..., LEAST_RUN - 1 : size - LEAST_RUN]
    standardized: Floats = np.abs(sums) * np.sqrt(size / (places * (size - places)))
    return standardized


@lru_cache(maxsize=2 * _STRETCH)
def _orders(size: int) -> npt.NDArray[np.int64]:
    """Random orders of so many values, the same ones every time."""
    orders: npt.NDArray[np.int64] = np.random.default_rng(size).permuted(
        np.tile(np.arange(size), (_PERMUTATIONS, 1)), axis=1
    )
    return orders


def _change(logs: Floats, spread: float, before: int, position: int, after: int) -> ChangePoint:
    """The step with its best place, the range of its places, and its size."""
    start, values = _around(logs, spread, before, position, after)
    statistics = _statistics(values)
    best = int(np.argmax(statistics))
    explained = statistics**2
    noise = float(np.sum(values**2) - explained[best]) / (len(values) - 2)
    likely = np.flatnonzero(explained >= explained[best] - _LIKELIHOOD_BOUND * noise)
    split = best + LEAST_RUN
    step = float(np.mean(values[split:]) - np.mean(values[:split]))
    first = start + LEAST_RUN
    return ChangePoint(
        position=first + best,
        earliest=first + int(likely[0]),
        latest=first + int(likely[-1]),
        ratio=float(np.exp(step)),
        p_value=_p_value(logs, spread, before, position, after),
    )
