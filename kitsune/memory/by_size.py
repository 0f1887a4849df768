"""Placing values from the largest to the smallest, each into the smallest gap between those it may meet."""

from __future__ import annotations

from collections.abc import Sequence

from kitsune.memory.lifetimes import Lifetimes, conflicts


def by_size(lives: Lifetimes, sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """By index of the value, where it begins.

    The greedy by size of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, for
    values that meet on some timing of the streams rather than at some step. It takes time and memory in proportion
    to the square of the number of values.

    Args:
        sizes: by index of the value; values of size 0 are placed at 0.
        order: the indices of all values in the order in which they are placed.
    """
    ranks = [0] * len(order)
    for rank, index in enumerate(order):
        ranks[index] = rank
    offsets = [0] * len(order)
    extents: list[tuple[int, int]] = []  # by rank, begin and end
    for rank, others in enumerate(conflicts(lives, ranks)):
        size = sizes[order[rank]]
        bits = bin(others & ((1 << rank) - 1))[:1:-1]
        met = sorted(extent for extent, bit in zip(extents, bits, strict=False) if bit == "1")
        begin = _smallest_gap(met, size)
        offsets[order[rank]] = begin
        extents.append((begin, begin + size))
    return offsets


def _smallest_gap(extents: Sequence[tuple[int, int]], size: int) -> int:
    """Where the smallest gap between `extents`, ascending, begins that holds `size` bytes; else where they end."""
    best_begin, best_gap = -1, 0
    end = 0
    for begin, next_end in extents:
        gap = begin - end
        if gap >= size and (best_begin < 0 or gap < best_gap):
            best_begin, best_gap = end, gap
        end = max(end, next_end)
    return end if best_begin < 0 else best_begin
