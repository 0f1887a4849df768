"""Cuts a sequence into runs that are about as large."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def partition(num_bytes: Sequence[int], num_parts: int) -> list[range]:
    """Cuts a sequence of sizes into `num_parts` runs, or one for each size, that are as equal as can be.

    The sum of the squares of the runs' sizes is the smallest there is. By dynamic programming over the number of runs;
    the best place of the last cut moves only to the right as a sequence gets longer, which bounds the search
    (divide and conquer; Aggarwal et al., Geometric applications of a matrix-searching algorithm, 1987).
    """
    num_sizes = len(num_bytes)
    sums = [0, *itertools.accumulate(num_bytes)]
    best: list[int] = [total**2 for total in sums]  # by the number of sizes, in one run
    cuts: list[list[int]] = []
    for done in range(1, min(num_parts, num_sizes)):
        best, cut = _one_more_run(sums, best, done)
        cuts.append(cut)
    ends = [num_sizes]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return [range(start, end) for start, end in itertools.pairwise([0, *reversed(ends)]) if start < end]


def _one_more_run(sums: Sequence[int], best: Sequence[int], done: int) -> tuple[list[int], list[int]]:
    """By the number of sizes: the least sum of squares in `done + 1` runs, and where the last begins.

    `best` is that of `done` runs. There must be at least as many sizes as runs; the rest of the lists means nothing.
    """
    least, cut = [0] * len(sums), [0] * len(sums)
    pending = [(done + 1, len(sums), done, len(sums) - 2)]
    while pending:
        first, end, lowest, highest = pending.pop()
        if first >= end:
            continue
        middle = (first + end) // 2
        places = range(lowest, min(middle - 1, highest) + 1)
        least[middle], cut[middle] = min((best[place] + (sums[middle] - sums[place]) ** 2, place) for place in places)
        pending += [(first, middle, lowest, cut[middle]), (middle + 1, end, cut[middle], highest)]
    return least, cut
