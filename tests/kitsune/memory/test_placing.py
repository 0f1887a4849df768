"""Each way to place values by itself: the planner keeps only the best, which would hide a fault of the others."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.memory.by_size import by_size
from kitsune.memory.extents import NOBODY, Extent, Extents
from kitsune.memory.lifetimes import Lifetimes, lifetimes
from kitsune.memory.sweep import backwards, events, sweep
from kitsune.plan import Schedule, TaskGraph
from tests.kitsune.memory.graphs import GraphWriter, in_order, scheduled_graphs
from tests.kitsune.memory.interleavings import alive_together, overlap

Place = Callable[[Lifetimes, Sequence[int]], list[int]]


def low(lives: Lifetimes, sizes: Sequence[int]) -> list[int]:
    return sweep(events(lives), sizes, lives.schedule.num_streams, frozenset())


def high(lives: Lifetimes, sizes: Sequence[int]) -> list[int]:
    return sweep(events(lives), sizes, lives.schedule.num_streams, frozenset(range(0, len(sizes), 2)))


def largest_first(lives: Lifetimes, sizes: Sequence[int]) -> list[int]:
    return by_size(lives, sizes, sorted(range(len(sizes)), key=lambda index: -sizes[index]))


def last_first(lives: Lifetimes, sizes: Sequence[int]) -> list[int]:
    return by_size(lives, sizes, range(len(sizes))[::-1])


def require_apart(graph: TaskGraph, schedule: Schedule, offsets: Sequence[int]) -> None:
    sizes = [value.num_bytes for value in graph.values]
    assert all(0 <= offset <= sum(sizes) - size for offset, size in zip(offsets, sizes, strict=True))
    assert not [pair for pair in alive_together(graph, schedule) if overlap(graph, offsets, *pair)]


@pytest.mark.parametrize("place", [low, high, largest_first, last_first])
@given(case=scheduled_graphs(max_tasks=9, max_streams=3))
def test_values_alive_together_are_apart(place: Place, case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    sizes = [value.num_bytes for value in graph.values]
    require_apart(graph, schedule, place(lifetimes(graph, schedule), sizes))


@pytest.mark.parametrize("is_high", [False, True])
@given(case=scheduled_graphs(max_tasks=12, max_streams=1))
def test_backwards_they_are_apart_too(is_high: bool, case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    sizes = [value.num_bytes for value in graph.values]
    shorts = frozenset(range(0, len(sizes), 2)) if is_high else frozenset[int]()
    require_apart(graph, schedule, sweep(backwards(events(lifetimes(graph, schedule))), sizes, 1, shorts))


def test_the_smallest_hole_is_taken() -> None:
    writer = GraphWriter()
    large, wall, small, top = (writer.value(size) for size in (5, 1, 3, 1))
    writer.task([large, small])
    fits, tail = writer.value(3), writer.value(2)
    writer.task([wall, top, fits, tail])
    graph = writer.graph()
    lives = lifetimes(graph, in_order(graph))
    sizes = [value.num_bytes for value in graph.values]
    assert sweep(events(lives), sizes, 1, frozenset()) == [0, 5, 6, 9, 6, 0]
    assert sweep(events(lives), sizes, 1, frozenset([tail])) == [0, 5, 6, 9, 6, 3]


def test_holes_that_touch_become_one() -> None:
    writer = GraphWriter()
    first, second, third = (writer.value(2) for _ in range(3))
    wall = writer.value(1)
    for value in (first, third, second):
        writer.task([value])
    large = writer.value(6)
    writer.task([wall, large])
    graph = writer.graph()
    sizes = [value.num_bytes for value in graph.values]
    assert sweep(events(lifetimes(graph, in_order(graph))), sizes, 1, frozenset()) == [0, 2, 4, 6, 0]


def test_by_size_takes_the_smallest_gap() -> None:
    writer = GraphWriter()
    walls = [writer.value(1) for _ in range(3)]
    gaps = [writer.value(3), writer.value(2)]
    writer.task(gaps)
    late = writer.value(2)
    writer.task([*walls, late])
    graph = writer.graph()
    lives = lifetimes(graph, in_order(graph))
    order = [walls[0], gaps[0], walls[1], gaps[1], walls[2], late]
    offsets = by_size(lives, [value.num_bytes for value in graph.values], order)
    assert offsets == [0, 4, 7, 1, 5, 5]


claims = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=12)


@given(claims, st.integers(0, 40), st.integers(1, 15))
def test_extents_say_who_had_each_byte_last(claimed: list[tuple[int, int]], begin: int, size: int) -> None:
    extents = Extents()
    owners = [NOBODY] * 60
    for owner, (first, length) in enumerate(claimed):
        extents.claim(first, first + length, owner)
        owners[first : first + length] = [owner] * length
    found = extents.overlapping(begin, begin + size)
    assert [(byte, extent.owner) for extent in found for byte in range(extent.begin, extent.end)] == [
        (byte, owners[byte]) for byte in range(begin, begin + size) if owners[byte] != NOBODY
    ]
    assert all(extent.begin < extent.end for extent in found)
    assert all(one.end <= two.begin for one, two in pairwise(found))


def test_nobody_has_an_empty_memory() -> None:
    assert Extents().overlapping(0, 100) == []
    extents = Extents()
    extents.claim(10, 20, 7)
    assert extents.overlapping(0, 100) == [Extent(10, 20, 7)]
