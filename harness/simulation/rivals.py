"""Other ways to find steps, to be measured beside :mod:`harness.changepoints`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from asv import step_detect

from harness.changepoints import LEAST_RUN

Floats = npt.NDArray[np.float64]

_SIGNIFICANCE = 0.001
_BATCHES = (49, 150, 800)
_PERMUTATIONS = sum(_BATCHES)


def asv_regressions(values: Floats, threshold: float) -> list[int]:
    """First indices after the regressions that asv reports; it reports no improvements.

    Args:
        threshold: asv's ``regressions_thresholds``; its default is 0.05.
    """
    steps = step_detect.detect_steps(values.tolist())
    found = step_detect.detect_regressions(steps, threshold)[2]
    return [after for _, after, _, _ in found or () if after is not None]


def e_divisive(values: Floats, seed: int = 0) -> list[int]:
    """Steps by E-divisive (Matteson and James, "A Nonparametric Approach for Multiple Change Point Analysis of
    Multivariate Data", J. American Statistical Association 2014), with exponent 1, 999 permutations and p at most
    0.001, the settings of the continuous-integration tools that use it.

    A permutation test is given up as soon as it can no longer be significant, which changes no decision.
    """
    rng = np.random.default_rng(seed)
    stretches, found = [(0, len(values))], []
    while stretches:
        start, end = stretches.pop()
        if end - start < 2 * LEAST_RUN:
            continue
        distances = np.abs(values[start:end, None] - values[None, start:end])
        divergences = _divergences(distances[None])[0]
        split = start + LEAST_RUN + int(np.argmax(divergences))
        if _is_significant(distances, float(np.max(divergences)), rng):
            found.append(split)
            stretches += [(start, split), (split, end)]
    return sorted(found)


def _is_significant(distances: Floats, observed: float, rng: np.random.Generator) -> bool:
    size, exceeding = len(distances), 0
    for batch in _BATCHES:
        orders = rng.permuted(np.tile(np.arange(size), (batch, 1)), axis=1)
        shuffled = distances[orders[:, :, None], orders[:, None, :]]
        exceeding += int(np.sum(np.max(_divergences(shuffled), axis=1) >= observed * (1 - 1e-12)))
        if (exceeding + 1) / (_PERMUTATIONS + 1) > _SIGNIFICANCE:
            return False
    return True


def _divergences(distances: Floats) -> Floats:
    """For each matrix of distances and each place of a split: the scaled energy distance between the two sides."""
    size = distances.shape[-1]
    sums = np.zeros((len(distances), size + 1, size + 1))
    sums[:, 1:, 1:] = distances.cumsum(axis=1).cumsum(axis=2)
    left = np.arange(LEAST_RUN, size - LEAST_RUN + 1)
    right = size - left
    within_left, left_to_all, total = sums[:, left, left], sums[:, left, size], sums[:, size, size, None]
    between = left_to_all - within_left
    within_right = total - 2 * left_to_all + within_left
    energy = 2 * between / (left * right) - within_left / (left * (left - 1)) - within_right / (right * (right - 1))
    scaled: Floats = left * right / size * energy
    return scaled
