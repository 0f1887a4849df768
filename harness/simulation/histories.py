"""Invented histories: kinds of noise, and changes of which it is known where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

COMMITS = 40
NOISE = 0.01
"""Standard deviation of the noise of one commit, relative to the level; the tails and drifts below come on top."""

_LATE = 3
_DIP = 12


def _gaussian(rng: np.random.Generator) -> Floats:
    return rng.normal(0, NOISE, COMMITS)


def _heavy_tailed(rng: np.random.Generator) -> Floats:
    """Student's t with three degrees of freedom."""
    noise: Floats = rng.standard_t(3, COMMITS) * NOISE / np.sqrt(3)
    return noise


def _spikes(rng: np.random.Generator) -> Floats:
    """One commit in ten was measured on a busy machine."""
    noise: Floats = rng.normal(0, NOISE, COMMITS) + np.where(
        rng.random(COMMITS) < 0.1, rng.uniform(0, 10 * NOISE, COMMITS), 0.0
    )
    return noise


def _bimodal(rng: np.random.Generator) -> Floats:
    """Two modes, commit by commit, as from the layout of memory."""
    modes = np.where(rng.random(COMMITS) < 0.5, NOISE, -NOISE)
    noise: Floats = 0.9 * modes + rng.normal(0, 0.5 * NOISE, COMMITS)
    return noise


def _drifting(rng: np.random.Generator) -> Floats:
    """A machine that slowly becomes faster and slower: a random walk under the noise."""
    noise: Floats = rng.normal(0, 0.9 * NOISE, COMMITS) + np.cumsum(rng.normal(0, 0.15 * NOISE, COMMITS))
    return noise


def _wave(rng: np.random.Generator) -> Floats:
    """The same, but a wave as large as the noise, whose length is from two thirds to three times the history's."""
    phase = np.arange(COMMITS) / COMMITS * rng.uniform(1 / 3, 3 / 2) + rng.random()
    noise: Floats = rng.normal(0, 0.9 * NOISE, COMMITS) + NOISE * np.sin(2 * np.pi * phase)
    return noise


NOISES: Mapping[str, Callable[[np.random.Generator], Floats]] = {
    "Gaussian": _gaussian,
    "heavy tails": _heavy_tailed,
    "spikes": _spikes,
    "bimodal": _bimodal,
    "random walk": _drifting,
    "slow wave": _wave,
}
"""Noise of the logarithms of times, by name."""


@dataclass(frozen=True)
class Shape:
    """What happens to the level: a name, and the function that draws the places where it goes up and down again."""

    name: str
    places: Callable[[np.random.Generator], tuple[int, ...]]


UNCHANGED = Shape("no step", lambda rng: ())
SHAPES = (
    Shape("step", lambda rng: (int(rng.integers(COMMITS // 4, 3 * COMMITS // 4 + 1)),)),
    Shape("three before the end", lambda rng: (COMMITS - _LATE,)),
    Shape("recovery", lambda rng: ((start := int(rng.integers(8, COMMITS - _DIP - 8))), start + _DIP)),
)
"""A step that stays, in the middle half; one that the last three commits show; one that is gone after twelve."""


@dataclass(frozen=True)
class History:
    """A series of times, and the indices at which its level changed."""

    values: Floats
    places: tuple[int, ...]


def draw(noise: str, shape: Shape, step: float, rng: np.random.Generator) -> History:
    """A history of :data:`COMMITS` commits.

    Args:
        noise: a name in :data:`NOISES`.
        shape: where the level goes up, and down again.
        step: by which share of the level it does.
    """
    logs = NOISES[noise](rng)
    places = shape.places(rng)
    for index, place in enumerate(places):
        logs[place:] += np.log1p(step) if index % 2 == 0 else -np.log1p(step)
    return History(np.exp(logs), places)
