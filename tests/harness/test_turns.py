import itertools
import math
import random

import numpy as np
import pytest

from harness.timer import BlockTime
from harness.turns import Limits, Taken, drawn_orders, half_width, take_turns

NAMES = ("a", "b", "c")
PAIRS = (("a", "c"), ("b", "c"))
LIMITS = Limits(turns=(4, 12), seconds=60.0, narrow_within=0.0, retries=2)


def take(limits: Limits = LIMITS, *, noise: float = 0.1, throttled: tuple[int, ...] = (), failing: int = 0) -> Taken:
    """Turns of blocks with noise; ``b`` fails at its so-many-th block, and the GPU is throttled in some turns."""
    rng = random.Random(0)
    calls = dict.fromkeys(NAMES, 0)
    turn = itertools.count(-1)

    def block(name: str) -> BlockTime | None:
        calls[name] += 1
        if name == "b" and calls[name] == failing:
            return None
        return BlockTime(math.exp(rng.gauss(0, noise)), None)

    return take_turns(
        NAMES, block, pairs=PAIRS, limits=limits, is_throttled=lambda: next(turn) in throttled, rng=random.Random(1)
    )


def test_orders_are_drawn_and_then_reversed() -> None:
    orders = list(itertools.islice(drawn_orders(NAMES, random.Random(0)), 40))
    assert all(back == forth[::-1] for forth, back in zip(orders[::2], orders[1::2], strict=True))
    assert {tuple(order) for order in orders[::2]} == set(itertools.permutations(NAMES))


def test_the_same_seed_draws_the_same_orders() -> None:
    one, other = (list(itertools.islice(drawn_orders(NAMES, random.Random(7)), 10)) for _ in range(2))
    assert one == other


def test_noisy_ratios_take_all_turns_there_are() -> None:
    taken = take()
    assert taken.ended == "turns"
    assert {len(times) for times in taken.blocks.values()} == {12}
    assert 0 < taken.half_width < 1


def test_narrow_ratios_end_it_early() -> None:
    limits = Limits(turns=(6, 100), seconds=60.0, narrow_within=0.01, retries=0)
    taken = take(limits, noise=0.001)
    assert taken.ended == "narrow"
    assert {len(times) for times in taken.blocks.values()} == {6}
    assert taken.half_width <= 0.01


def test_the_fewest_turns_are_taken_whatever_they_cost() -> None:
    taken = take(Limits(turns=(4, 12), seconds=0.0, narrow_within=0.0, retries=0))
    assert taken.ended == "seconds"
    assert {len(times) for times in taken.blocks.values()} == {4}


def test_throttled_turns_are_marked_and_repeated() -> None:
    taken = take(throttled=(1, 5))
    assert taken.throttled == (1, 5)
    assert {len(times) for times in taken.blocks.values()} == {14}


def test_a_gpu_that_is_always_throttled_is_not_waited_for() -> None:
    taken = take(throttled=tuple(range(100)))
    assert len(taken.throttled) == 14
    assert taken.half_width == math.inf


def test_a_variant_that_fails_leaves_and_the_others_go_on() -> None:
    taken = take(failing=3)
    assert set(taken.blocks) == {"a", "c"}
    assert {len(times) for times in taken.blocks.values()} == {12}


def test_when_all_have_failed_it_ends() -> None:
    taken = take_turns(
        ("a",),
        lambda name: None,
        pairs=(),
        limits=LIMITS,
        is_throttled=lambda: False,
        rng=random.Random(0),
    )
    assert taken.blocks == {}


@pytest.mark.parametrize("count", [8, 15, 40])
def test_the_interval_of_a_median_holds_the_truth_about_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(count)
    drawn = rng.normal(0, 1, (1500, count))
    covered = np.mean([abs(np.median(ratios)) <= half_width(ratios.tolist()) for ratios in drawn])
    assert 0.84 <= covered <= 0.97
    assert half_width([0.0] * 4) == math.inf
