"""Memory plans against every state that the streams can reach, and against runs that write into the planned bytes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.memory.check import check_memory
from kitsune.memory.planner import plan_memory
from kitsune.plan import MemoryPlan, Schedule, TaskGraph, Wait
from tests.kitsune.memory.graphs import (
    GraphWriter,
    in_order,
    random_graph,
    random_schedule,
    scheduled_graphs,
    training_step,
)
from tests.kitsune.memory.interleavings import alive_together, most_bytes, overlap, wrong_reads

Case = tuple[TaskGraph, Schedule]


def rounded(graph: TaskGraph, alignment: int) -> list[int]:
    return [(value.num_bytes + alignment - 1) // alignment * alignment for value in graph.values]


@given(scheduled_graphs(max_tasks=9, max_streams=3), st.sampled_from([1, 16, 512]))
def test_values_alive_together_in_any_state_share_no_bytes(case: Case, alignment: int) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule, alignment=alignment)
    assert not [pair for pair in alive_together(graph, schedule) if overlap(graph, plan.offsets, *pair)]
    for value, begin in zip(graph.values, plan.offsets, strict=True):
        assert (begin is None) == (value.num_bytes == 0)
        if begin is not None:
            assert begin % alignment == 0
            assert 0 <= begin <= plan.arena_bytes - value.num_bytes
    assert plan.arena_bytes <= sum(rounded(graph, alignment))


@given(scheduled_graphs(max_tasks=9, max_streams=3), st.sampled_from([1, 512]))
def test_live_bytes_bound_every_state_and_are_exact_on_one_stream(case: Case, alignment: int) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule, alignment=alignment)
    most = most_bytes(graph, schedule, rounded(graph, alignment))
    assert plan.live_bytes >= most
    assert plan.arena_bytes >= most
    assert schedule.num_streams > 1 or plan.live_bytes == most


@given(scheduled_graphs(max_tasks=60, max_streams=8), st.integers(0, 10**6))
def test_every_task_finds_what_it_uses_as_it_was_written(case: Case, seed: int) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule)
    for timing in range(5):
        assert wrong_reads(graph, schedule, plan, seed + timing) == []


@given(scheduled_graphs(max_tasks=60, max_streams=8))
def test_a_plan_is_the_same_every_time(case: Case) -> None:
    assert plan_memory(*case) == plan_memory(*case)


def without_last_user(graph: TaskGraph, index: int) -> TaskGraph:
    values = list(graph.values)
    values[index] = dataclasses.replace(values[index], users=values[index].users[:-1])
    return dataclasses.replace(graph, values=tuple(values))


def test_a_lifetime_that_is_too_short_is_found_by_each_oracle() -> None:
    found = {"states": 0, "reads": 0, "check": 0}
    for seed in range(40):
        graph = random_graph(9, seed)
        schedule = random_schedule(graph, 1 + seed % 3, seed)
        for value in graph.values:
            if not value.users or value.is_output:
                continue
            plan = plan_memory(without_last_user(graph, value.index), schedule)
            shared = [pair for pair in alive_together(graph, schedule) if overlap(graph, plan.offsets, *pair)]
            found["states"] += bool(shared)
            found["check"] += bool(check_memory(graph, schedule, plan))
            found["reads"] += any(wrong_reads(graph, schedule, plan, timing) for timing in range(5))
    assert found["states"] == found["check"]
    assert min(found.values()) > 10


def test_a_chain_needs_two_buffers() -> None:
    writer = GraphWriter()
    value = writer.value(512)
    for _ in range(9):
        value = writer.value(512, value)
    graph = writer.graph([value])
    assert plan_memory(graph, in_order(graph)) == MemoryPlan((0, 512) * 5, 1024, 1024)


def test_only_an_order_lets_values_of_two_streams_share() -> None:
    writer = GraphWriter()
    first = writer.value(512)
    reader = writer.task([first])
    second = writer.value(512)
    graph = writer.graph()
    apart = Schedule("by hand", (0, 1, 2), (0, 0, 1))
    assert plan_memory(graph, apart).arena_bytes == 1024
    early = Schedule("by hand", (0, 1, 2), (0, 0, 1), (Wait(second + 1, 0),))
    assert plan_memory(graph, early).arena_bytes == 1024
    joined = Schedule("by hand", (0, 1, 2), (0, 0, 1), (Wait(second + 1, reader),))
    assert plan_memory(graph, joined).arena_bytes == 512


def test_an_output_is_never_overwritten_but_may_take_the_place_of_the_dead() -> None:
    writer = GraphWriter()
    first = writer.value(512)
    writer.task([first])
    output = writer.value(512)
    last = writer.value(512)
    graph = writer.graph([output])
    plan = plan_memory(graph, in_order(graph))
    assert plan.offsets[output] != plan.offsets[last]
    assert plan.arena_bytes == 1024


def test_nothing_needs_no_memory() -> None:
    assert plan_memory(TaskGraph(()), Schedule("in order", (), ())) == MemoryPlan((), 0, 0)
    writer = GraphWriter()
    writer.value(0)
    graph = writer.graph()
    assert plan_memory(graph, in_order(graph)) == MemoryPlan((None,), 0, 0)


@pytest.mark.parametrize("alignment", [0, -1, 3, 513])
def test_the_alignment_is_a_power_of_two(alignment: int) -> None:
    graph = TaskGraph((), ())
    with pytest.raises(ValueError, match=f"not {alignment}"):
        plan_memory(graph, in_order(graph), alignment=alignment)


@pytest.mark.parametrize("num_values", [100, 1100])
def test_values_that_grow_need_little_more_than_what_is_alive(num_values: int) -> None:
    writer = GraphWriter()
    value = writer.value(512)
    for place in range(1, num_values):
        value = writer.value(512 * place, value)
    graph = writer.graph([value])
    plan = plan_memory(graph, in_order(graph))
    assert plan.arena_bytes <= 1.01 * plan.live_bytes


@pytest.mark.parametrize("num_layers", [2, 20, 100, 400])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_training_step_needs_little_more_than_what_is_alive(num_layers: int, num_streams: int) -> None:
    graph = training_step(num_layers)
    schedule = in_order(graph) if num_streams == 1 else random_schedule(graph, num_streams, 0, stay=0.8)
    plan = plan_memory(graph, schedule)
    assert check_memory(graph, schedule, plan) == []
    assert plan.arena_bytes <= 1.05 * plan.live_bytes
