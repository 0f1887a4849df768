import numpy as np
import pytest

from harness.simulation import rivals


def slow_divergence(values: np.ndarray, split: int) -> float:
    """The scaled energy distance as it is defined, pair by pair."""
    left, right = values[:split], values[split:]
    between = np.mean([abs(a - b) for a in left for b in right])
    within = [
        np.mean([abs(a - b) for index, a in enumerate(side) for b in side[:index]]) if len(side) > 1 else 0.0
        for side in (left, right)
    ]
    return float(len(left) * len(right) / len(values) * (2 * between - sum(within)))


def test_divergences_are_energy_distances() -> None:
    values = np.random.default_rng(0).normal(1, 0.1, 12)
    distances = np.abs(values[:, None] - values[None, :])
    expected = [slow_divergence(values, split) for split in range(3, 10)]
    assert rivals._divergences(distances[None])[0] == pytest.approx(expected)


def test_e_divisive_finds_a_clear_step_and_nothing_in_noise() -> None:
    noise = np.random.default_rng(1).normal(1, 0.01, 30)
    assert rivals.e_divisive(noise) == []
    assert rivals.e_divisive(np.where(np.arange(30) < 14, noise, 1.2 * noise)) == [14]


def test_asv_reports_what_exceeds_its_threshold() -> None:
    noise = np.random.default_rng(1).normal(1, 0.01, 30)
    slower = np.where(np.arange(30) < 14, noise, 1.2 * noise)
    assert rivals.asv_regressions(slower, 0.05) == [14]
    assert rivals.asv_regressions(slower, 0.5) == []
    assert rivals.asv_regressions(1 / slower, 0.05) == []
