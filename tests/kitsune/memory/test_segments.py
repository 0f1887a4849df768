"""The model of PyTorch's caching allocator, and what it takes for graphs in one piece and in many."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.execution import graph_pool
from kitsune.memory import segments
from kitsune.memory.pooled import pooled_bytes
from kitsune.memory.segments import Segments, pieces, taken_bytes
from kitsune.plan import Schedule, TaskGraph, Wait
from tests.kitsune.memory.graphs import GraphWriter, in_order, random_graph, random_schedule, training_step

MIB = 2**20

Changes = list[tuple[int, int]]


def enlarged(graph: TaskGraph, factor: int) -> TaskGraph:
    values = [dataclasses.replace(value, num_bytes=value.num_bytes * factor) for value in graph.values]
    return dataclasses.replace(graph, values=tuple(values))


def random_changes(seed: int, largest_mib: int) -> Changes:
    """Values of 1 to `largest_mib` MiB come and go."""
    chance = random.Random(seed)
    alive: list[tuple[int, int]] = []
    changes: Changes = []
    for index in range(60):
        if alive and chance.random() < 0.45:
            changes.append(alive.pop(chance.randrange(len(alive))))
        else:
            alive.append((index, 512 * chance.randint(2049, 2048 * largest_mib)))
            changes.append(alive[-1])
    return changes


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [((2,), 20), ((9, 9), 20), ((9, 12), 20 + 12), ((10,), 10), ((10.5,), 12), ((64, 40), 104), ((), 0)],
)
def test_what_a_segment_is(sizes: Sequence[float], taken: int) -> None:
    assert taken_bytes([(index, int(size * MIB)) for index, size in enumerate(sizes)]) == taken * MIB


def test_a_block_is_divided_and_joined_again() -> None:
    of_stream = Segments()
    whole = of_stream.take(64 * MIB)
    of_stream.give_back(whole)
    first, second, third = (of_stream.take(size * MIB) for size in (30, 20, 14))
    for block in (first, third, second):
        of_stream.give_back(block)
    assert of_stream.take(64 * MIB) == whole
    assert of_stream.num_bytes == 64 * MIB


def test_the_smallest_that_fits_is_taken_whole_if_hardly_anything_is_left() -> None:
    of_stream = Segments()
    small, large = of_stream.take(32 * MIB), of_stream.take(64 * MIB)
    of_stream.give_back(large)
    of_stream.give_back(small)
    assert of_stream.take(31 * MIB) == small
    assert of_stream.take(62 * MIB) == (62 * MIB, *large[1:])


def test_what_is_left_of_a_large_value_is_lost_for_the_next() -> None:
    writer = GraphWriter()
    first = writer.value(64 * MIB)
    writer.task([first])
    second = writer.value(40 * MIB)
    third = writer.value(64 * MIB)
    writer.task([second, third])
    graph = writer.graph()
    changes: Changes = [(0, 64 * MIB), (0, 0), (1, 40 * MIB), (2, 64 * MIB)]
    assert taken_bytes(changes) == 128 * MIB
    assert pieces(graph, in_order(graph)) == (104 * MIB,)
    assert taken_bytes(changes, 104 * MIB) == 104 * MIB


def test_each_stream_has_its_own_and_small_values_have_none() -> None:
    writer = GraphWriter()
    on_first = writer.value(64 * MIB)
    reader = writer.task([on_first])
    on_second = writer.value(48 * MIB)
    writer.task([on_second])
    second, third = writer.value(40 * MIB), writer.value(64 * MIB)
    writer.task([second, third])
    writer.value(MIB)
    graph = writer.graph()
    streams = (0, 0, 1, 1, 0, 0, 0, 2)
    assert pieces(graph, Schedule("by hand", tuple(range(8)), streams, (Wait(reader, 0),))) == (104 * MIB, 0, 0)


@given(st.integers(1, 10), st.integers(1, 3), st.integers(0, 2**20))
def test_no_more_is_taken_than_without(num_tasks: int, num_streams: int, seed: int) -> None:
    graph = enlarged(random_graph(num_tasks, seed), 997)
    schedule = random_schedule(graph, num_streams, seed)
    found = pieces(graph, schedule)
    needed = 0
    for piece, changes in zip(found, segments._changes(graph, schedule), strict=True):
        assert taken_bytes(changes, piece) <= taken_bytes(changes)
        needed += segments._most(changes)
        assert taken_bytes(changes, piece) >= segments._most(changes)
    rounded = [
        dataclasses.replace(value, num_bytes=-(-value.num_bytes // 512) * 512 if value.num_bytes > MIB else 0)
        for value in graph.values
    ]
    assert needed == pooled_bytes(dataclasses.replace(graph, values=tuple(rounded)), schedule)


@pytest.mark.parametrize("seed", range(10))
def test_a_step_takes_little_more_than_it_needs(seed: int) -> None:
    graph = enlarged(training_step(8, seed), 2048)
    (piece,) = pieces(graph, in_order(graph))
    (changes,) = segments._changes(graph, in_order(graph))
    assert taken_bytes(changes, piece) <= 1.2 * segments._most(changes)


@pytest.mark.gpu
@pytest.mark.parametrize("largest_mib", [3, 12, 40])
@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_the_allocator_takes(seed: int, largest_mib: int) -> None:
    changes = random_changes(seed, largest_mib)
    needed = segments._most(changes)
    for piece in (0, needed, needed + 5 * MIB):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            alive: dict[int, torch.Tensor] = {}
            if piece:
                torch.empty(piece, dtype=torch.uint8, device="cuda")
            for value, size in changes:
                if value in alive:
                    del alive[value]
                else:
                    alive[value] = torch.empty(size, dtype=torch.uint8, device="cuda")
            taken = sum(one["total_size"] for one in graph_pool._segments(pool.id))
            alive.clear()
        assert taken == taken_bytes(changes, piece)
