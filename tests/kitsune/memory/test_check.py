"""The check of memory plans against every state that the streams can reach."""

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from kitsune.memory.check import check_memory
from kitsune.memory.planner import plan_memory
from kitsune.plan import MemoryPlan, Schedule, TaskGraph
from tests.kitsune.memory.graphs import GraphWriter, in_order, scheduled_graphs
from tests.kitsune.memory.interleavings import alive_together, overlap

ARENA = 1 << 16


@given(scheduled_graphs(max_tasks=9, max_streams=3), st.integers(0, 10**6), st.integers(1, 200))
def test_it_complains_exactly_of_illegal_plans(case: tuple[TaskGraph, Schedule], seed: int, places: int) -> None:
    graph, schedule = case
    chance = random.Random(seed)
    sizes = [min(value.num_bytes, 4096) for value in graph.values]
    values = [dataclasses.replace(value, num_bytes=size) for value, size in zip(graph.values, sizes, strict=True)]
    graph = dataclasses.replace(graph, values=tuple(values))
    offsets = tuple(512 * chance.randrange(places) if size else None for size in sizes)
    shared = any(overlap(graph, offsets, *pair) for pair in alive_together(graph, schedule))
    assert bool(check_memory(graph, schedule, MemoryPlan(offsets, 1 << 20, 0))) == shared


@given(scheduled_graphs(max_tasks=9, max_streams=3), st.data())
def test_it_finds_a_value_that_is_moved_onto_another(case: tuple[TaskGraph, Schedule], data: st.DataObject) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule)
    assert check_memory(graph, schedule, plan) == []
    pairs = [
        pair for pair in alive_together(graph, schedule) if None not in (plan.offsets[pair[0]], plan.offsets[pair[1]])
    ]
    if not pairs:
        return
    one, two = data.draw(st.sampled_from(sorted(pairs)))
    offsets = list(plan.offsets)
    offsets[one] = offsets[two]
    assert check_memory(graph, schedule, MemoryPlan(tuple(offsets), 1 << 20, plan.live_bytes)) != []


def pair_of_values() -> TaskGraph:
    writer = GraphWriter()
    writer.task([], [100, 600])
    return writer.graph()


def problems(*offsets: int | None, arena_bytes: int = ARENA, alignment: int = 512) -> list[str]:
    graph = pair_of_values()
    return check_memory(graph, in_order(graph), MemoryPlan(offsets, arena_bytes, 0), alignment=alignment)


def test_it_says_what_is_wrong() -> None:
    assert problems(0, 512) == []
    assert problems(0, 512, arena_bytes=1112) == []
    assert problems(0, 0) == [
        "value 1 (value_1) shares bytes with value 0 (value_0), which may be alive when task 0 starts"
    ]
    assert problems(0) == ["the plan places 1 values, and the graph has 2"]
    assert problems(0, None) == ["value 1 (value_1) has 600 bytes and no place"]
    assert problems(0, 100) == ["value 1 (value_1) begins at byte 100, no multiple of 512"]
    assert problems(0, 100, alignment=4) == []
    assert problems(-512, 512) == ["value 0 (value_0), bytes -512 to -412, is not in the arena of 65536 bytes"]
    assert problems(0, 512, arena_bytes=1111) == [
        "value 1 (value_1), bytes 512 to 1112, is not in the arena of 1111 bytes"
    ]


def test_an_output_is_not_overwritten() -> None:
    writer = GraphWriter()
    value = writer.value(512)
    writer.task([value])
    writer.value(512)
    plan = MemoryPlan((0, 0), 512, 512)
    passing, returned = writer.graph(), writer.graph([value])
    assert check_memory(passing, in_order(passing), plan) == []
    assert len(check_memory(returned, in_order(returned), plan)) == 1


def test_rounding_may_be_shared_but_not_bytes() -> None:
    assert problems(0, 100, alignment=1) == []
    assert len(problems(0, 99, alignment=1)) == 1
