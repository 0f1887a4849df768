"""Turns: every variant is timed once in each, in an order that is drawn and then reversed, until it is known enough.

What drifts linearly over two turns, and what a variant does to the one after it, cancels that way (counterbalancing;
the order of the first of two turns is random, so that nothing periodic falls in step with it). Sampling ends when the
ratios that matter are known narrowly enough, or when the budget of turns or seconds is spent; both are told.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Literal, TypeVar

from harness.timer import BlockTime

T = TypeVar("T")

Ending = Literal["narrow", "turns", "seconds"]

_NORMAL = NormalDist()
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean, for normal values."""
_LEAST_PAIRS = 5


@dataclass(frozen=True)
class Limits:
    """When sampling ends.

    Attributes:
        turns: the fewest and the most of them.
        seconds: the most that timed blocks may take, once there are the fewest turns.
        narrow_within: the half-width of the 95% interval of each median log-ratio that is narrow enough; 0 for never.
        retries: how many turns are repeated at most because the device was throttled in them.
    """

    turns: tuple[int, int]
    seconds: float
    narrow_within: float
    retries: int


@dataclass(frozen=True)
class Taken:
    """The blocks of every variant that ran through, entry i of each taken in the same turn, and how it ended.

    ``throttled`` are the numbers of the turns in which the device was; ``half_width`` is the widest that is left of the
    ratios' intervals within this process, infinite where there are too few turns to say.
    """

    blocks: Mapping[str, tuple[BlockTime, ...]]
    throttled: tuple[int, ...]
    ended: Ending
    half_width: float


def take_turns(
    names: Sequence[str],
    block: Callable[[str], BlockTime | None],
    *,
    pairs: Sequence[tuple[str, str]],
    limits: Limits,
    is_throttled: Callable[[], bool],
    rng: random.Random,
) -> Taken:
    """Times the named variants in turns.

    Args:
        names: in no particular order; at least one.
        block: times one block of a variant; None if it failed, which takes it out.
        pairs: the ratios (a variant, its reference) that are to be known.
        is_throttled: whether the device has been throttled since the last call.
        rng: draws the orders.
    """
    orders = drawn_orders(names, rng)
    blocks: dict[str, list[BlockTime]] = {name: [] for name in names}
    throttled: list[int] = []
    fewest, most = limits.turns
    turns, begin = 0, time.monotonic()
    is_throttled()
    while blocks:
        for name in next(orders):
            timed = block(name) if name in blocks else None
            if timed is not None:
                blocks[name].append(timed)
            else:
                blocks.pop(name, None)
        if is_throttled():
            throttled.append(turns)
        turns += 1
        good = turns - min(len(throttled), limits.retries)
        if good < fewest:
            continue
        width = _widest(blocks, pairs, throttled)
        if width <= limits.narrow_within:
            return _taken(blocks, throttled, "narrow", width)
        if good >= most:
            return _taken(blocks, throttled, "turns", width)
        if time.monotonic() - begin >= limits.seconds:
            return _taken(blocks, throttled, "seconds", width)
    return _taken(blocks, throttled, "turns", math.inf)


def drawn_orders(things: Sequence[T], rng: random.Random) -> Iterator[list[T]]:
    """Orders without end: one that is drawn, the same backwards, another one, …."""
    while True:
        order = rng.sample(things, len(things))
        yield order
        yield order[::-1]


def half_width(ratios: Sequence[float]) -> float:
    """Half the width of the 95% interval of the median of log-ratios within a process, for normal noise.

    Infinite for fewer than five. The spread is taken from the median of absolute deviations, so that a few disturbed
    blocks do not keep sampling going.
    """
    if len(ratios) < _LEAST_PAIRS:
        return math.inf
    centre = median(ratios)
    spread = median(abs(ratio - centre) for ratio in ratios) / _NORMAL.inv_cdf(0.75)
    return _NORMAL.inv_cdf(0.975) * _MEDIAN_ERROR * spread / math.sqrt(len(ratios))


def _widest(
    blocks: Mapping[str, Sequence[BlockTime]], pairs: Sequence[tuple[str, str]], throttled: Sequence[int]
) -> float:
    """The widest interval of the pairs that are there; infinite without any: then nothing is known of a ratio."""
    left_out = set(throttled)
    widths = [
        half_width(
            [
                math.log(one.seconds / other.seconds)
                for turn, (one, other) in enumerate(zip(blocks[variant], blocks[reference], strict=True))
                if turn not in left_out
            ]
        )
        for variant, reference in pairs
        if variant in blocks and reference in blocks
    ]
    return max(widths, default=math.inf)


def _taken(blocks: Mapping[str, Sequence[BlockTime]], throttled: Sequence[int], ended: Ending, width: float) -> Taken:
    return Taken({name: tuple(times) for name, times in blocks.items()}, tuple(throttled), ended, width)
