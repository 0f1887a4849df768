import math
import random

from harness.conclusive import is_conclusive

Round = dict[str, list[float]]


def rounds(count: int, noise: float, ratio: float, *, eager: bool = True) -> list[Round]:
    rng = random.Random(0)
    drawn = []
    for _ in range(count):
        times = {"kitsune_dropin_fp32": ratio * math.exp(rng.gauss(0, noise)), "compile_fp32": rng.uniform(1, 2)}
        times |= {"eager_fp32": 1.0} if eager else {}
        drawn.append({name: [seconds] * 3 for name, seconds in times.items()})
    return drawn


def test_a_clear_and_narrow_ratio_is_enough() -> None:
    assert is_conclusive(rounds(5, 0.004, 0.7))
    assert is_conclusive(rounds(5, 0.004, 1.0))


def test_a_ratio_that_is_clear_but_not_narrow_asks_for_more() -> None:
    assert not is_conclusive(rounds(5, 0.05, 0.3))


def test_a_ratio_at_the_margin_asks_for_more() -> None:
    assert not is_conclusive(rounds(5, 0.004, 1.03))


def test_one_round_is_never_enough() -> None:
    assert not is_conclusive(rounds(1, 0.0, 0.5))


def test_without_a_reference_or_a_form_of_kitsune_there_is_nothing_to_wait_for() -> None:
    assert is_conclusive(rounds(2, 0.5, 1.0, eager=False))
    assert is_conclusive([])
