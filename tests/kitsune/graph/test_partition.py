"""Runs of sizes are as equal as can be, against all partitions there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kitsune.graph.partition import partition


def best_partition(sizes: Sequence[int], num_parts: int) -> int:
    """The sum of squares of the best of all partitions."""
    num_parts = min(num_parts, len(sizes))
    cuts = combinations(range(1, len(sizes)), num_parts - 1)
    bounds = [(0, *cut, len(sizes)) for cut in cuts]
    return min(sum(sum(sizes[start:end]) ** 2 for start, end in pairwise(cut)) for cut in bounds)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 10))
def test_partitions_are_the_best_there_are(sizes: list[int], num_parts: int) -> None:
    runs = partition(sizes, num_parts)
    assert [place for run in runs for place in run] == list(range(len(sizes)))
    assert len(runs) == min(num_parts, len(sizes))
    assert all(runs)
    assert sum(sum(sizes[place] for place in run) ** 2 for run in runs) == best_partition(sizes, num_parts)


def test_nothing_has_no_parts() -> None:
    assert partition([], 3) == []
