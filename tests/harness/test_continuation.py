"""What losses from one state say of a variant."""

import math

import pytest

from harness.continuation import TOLERANCE, Continuation


def test_the_gap_is_the_largest_relative_difference() -> None:
    found = Continuation((2.0, 1.01, 0.5), (2.0, 1.0, 0.5), (2.0, 1.0, 0.5005), num_replays=3)
    assert found.gap == pytest.approx(0.01)
    assert found.noise == pytest.approx(0.001)
    assert found.agrees


def test_beyond_rounding_it_differs_unless_eager_differs_from_itself_as_much() -> None:
    apart = 1 + 2 * TOLERANCE
    assert not Continuation((apart,), (1.0,), (1.0,)).agrees
    assert Continuation((apart,), (1.0,), (1 - TOLERANCE,)).agrees


@pytest.mark.parametrize(("loss", "eager", "gap"), [(None, None, 0.0), (None, 1.0, math.inf), (1.0, None, math.inf)])
def test_what_is_not_finite_agrees_with_its_like_alone(loss: float | None, eager: float | None, gap: float) -> None:
    found = Continuation((1.0, loss), (1.0, eager), (1.0, eager))
    assert found.gap == gap
    assert found.agrees == (gap == 0)


def test_losses_of_nothing_are_equal() -> None:
    assert Continuation((0.0,), (0.0,), (0.0,)).gap == 0
    assert Continuation((1e-3,), (0.0,), (0.0,)).gap > 1
