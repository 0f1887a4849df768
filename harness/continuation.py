"""Losses of a variant in its steady state beside those of eager PyTorch from the same state. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERANCE = 0.02
"""The relative difference in loss within so few steps that rounding explains."""

_NOISE_FACTOR = 3.0
"""Where eager differs from itself, because its kernels add in any order, this many times as much is explained, too."""

Losses = tuple[float | None, ...]
"""Those of consecutive steps; None is one that was not finite."""


@dataclass(frozen=True)
class Continuation:
    """Losses of the same steps from one state: of the variant, of eager, and of eager once more, to see its noise.

    ``num_replays`` of the variant's steps were replayed; there are none of peers.
    """

    losses: Losses
    eager: Losses
    eager_again: Losses
    num_replays: int = 0

    @property
    def gap(self) -> float:
        """The largest relative difference between a loss and eager's of the same step; infinite where one is finite."""
        return _gap(self.losses, self.eager)

    @property
    def noise(self) -> float:
        """The same of eager and itself."""
        return _gap(self.eager_again, self.eager)

    @property
    def agrees(self) -> bool:
        """Whether rounding, and what eager differs from itself, explain the gap."""
        return self.gap <= max(TOLERANCE, _NOISE_FACTOR * self.noise)


def _gap(losses: Losses, reference: Losses) -> float:
    return max(map(_apart, losses, reference))


def _apart(loss: float | None, reference: float | None) -> float:
    if loss is None or reference is None:
        return 0.0 if loss is reference else math.inf
    return 0.0 if loss == reference else abs(loss - reference) / max(abs(reference), abs(loss) * 1e-9)
