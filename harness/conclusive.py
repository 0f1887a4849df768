"""Whether rounds measured so far decide, or more are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.names import is_product, reference_of
from harness.stats import Estimate, Verdict, noise_margin, paired_ratio, round_noise, verdict

MARGIN = 0.03
"""The relative difference in time that does not matter in any benchmark."""


def is_conclusive(rounds: Sequence[Mapping[str, Sequence[float]]], margin: float = MARGIN) -> bool:
    """Whether of each of Kitsune's forms it is known how it stands to eager, and exactly enough to compare commits.

    The verdict against eager is not inconclusive, and the interval's half-width is at most half the margin: that of the
    quotient of two such measurements is then below three quarters of it, so that a change of twice the margin is found.

    Args:
        rounds: the seconds of each variant's blocks, of each round of a case.
    """
    variants = dict.fromkeys(name for blocks in rounds for name in blocks)
    return all(_is_decided(rounds, name, margin) for name in variants if is_product(name))


def _is_decided(rounds: Sequence[Mapping[str, Sequence[float]]], name: str, margin: float) -> bool:
    pairs = [
        list(zip(blocks[name], blocks[reference_of(name)], strict=True))
        for blocks in rounds
        if name in blocks and reference_of(name) in blocks
    ]
    if not pairs:
        return True  # there is nothing to compare with, and another round would not change that
    estimate = paired_ratio(pairs)
    own = noise_margin(round_noise(pairs), margin)
    return _is_narrow(estimate, own) and verdict(estimate, own) is not Verdict.INCONCLUSIVE


def _is_narrow(estimate: Estimate, margin: float) -> bool:
    return estimate.half_width <= margin / 2
