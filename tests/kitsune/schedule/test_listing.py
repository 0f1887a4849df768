"""List scheduling: legal, near the optimum of small graphs, and sensible on what training steps are made of."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Costs, TaskGraph
from kitsune.schedule.assign import in_order
from kitsune.schedule.check import check
from kitsune.schedule.edges import dependencies, dependents, upward_ranks
from kitsune.schedule.listing import list_schedule
from kitsune.schedule.live_bytes import IssuedBytes
from kitsune.schedule.simulate import simulate
from tests.kitsune.schedule.graphs import costs_of, graphs, make_costs, make_graph, training_step
from tests.kitsune.schedule.oracles import enforces, optimum_us


@given(graphs(), st.integers(1, 8), st.data())
def test_a_list_schedule_is_legal(graph: TaskGraph, num_streams: int, data: st.DataObject) -> None:
    schedule = list_schedule(graph, data.draw(costs_of(graph)), num_streams)
    assert check(graph, schedule) == []
    assert enforces(graph, schedule, schedule.waits)
    assert schedule.num_streams <= num_streams


@given(graphs(), st.integers(1, 4), st.integers(0, 60), st.data())
def test_a_bound_of_memory_keeps_it_legal(
    graph: TaskGraph, num_streams: int, max_bytes: int, data: st.DataObject
) -> None:
    schedule = list_schedule(graph, data.draw(costs_of(graph)), num_streams, max_bytes)
    assert check(graph, schedule) == []


@given(graphs(), st.data())
def test_a_bound_that_does_not_bind_changes_nothing(graph: TaskGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_of(graph))
    total_bytes = sum(value.num_bytes for value in graph.values)
    assert list_schedule(graph, costs, 3, total_bytes) == list_schedule(graph, costs, 3)


def small_problem(seed: int) -> tuple[TaskGraph, Costs]:
    """Five to seven tasks, mostly connected, that fit beside each other well, now and then, or never."""
    generator = random.Random(seed)
    num_tasks = generator.choice([5, 6, 7])
    after: list[list[int]] = [[]]
    for task in range(1, num_tasks):
        num_earlier = generator.choice([0, 1, 1, 1, 1, 2, 2])
        after.append(sorted({generator.randrange(task) for _ in range(num_earlier)}))
    shares = [[0.1, 0.3, 0.5], [0.2, 0.5, 1.0], [1.0]][seed % 3]
    us = [generator.uniform(1, 20) for _ in after]
    sync_us = generator.choice([0.5, 1.0, 3.0])
    return make_graph(after), make_costs(us, [generator.choice(shares) for _ in after], 1.0, sync_us)


def test_lists_are_near_the_optimum() -> None:
    ratios, serial_ratios = [], []
    for seed in range(45):
        graph, costs = small_problem(seed)
        optimum = optimum_us(graph, costs, 2)
        ratios.append(simulate(graph, costs, list_schedule(graph, costs, 2)).total_us / optimum)
        serial_ratios.append(simulate(graph, costs, in_order(graph)).total_us / optimum)
    assert min(*ratios, *serial_ratios) > 1 - 1e-9
    assert mean(serial_ratios) > 1.2  # so there is something to reach
    assert mean(ratios) <= 1.10
    assert max(ratios) <= 1.5


def test_small_independent_tasks_use_all_streams() -> None:
    schedule = list_schedule(make_graph([[]] * 4), make_costs([10.0] * 4, 0.25), 4)
    assert sorted(schedule.streams) == [0, 1, 2, 3]


def test_a_fork_that_costs_more_than_it_gains_is_not_made() -> None:
    graph = make_graph([[], [0], [0], [1, 2]])
    cheap, dear = (make_costs([5.0, 4.0, 4.0, 5.0], 0.2, sync_us=sync_us) for sync_us in (0.1, 20.0))
    assert list_schedule(graph, cheap, 2).num_streams == 2
    assert list_schedule(graph, dear, 2).num_streams == 1


def test_the_critical_path_stays_on_its_stream_and_is_not_overtaken() -> None:
    """Input gradients 0, 2, 4, 6 lead on to 7; weight gradients 1, 3, 5 come first in the graph but end nowhere."""
    graph = make_graph([[], [0], [0], [2], [2], [4], [4], [6]])
    schedule = list_schedule(graph, make_costs([10.0] * 8, 0.4), 2)
    assert [schedule.streams[task] for task in (0, 2, 4, 6, 7)] == [0, 0, 0, 0, 0]
    assert [schedule.streams[task] for task in (1, 3, 5)] == [1, 1, 1]
    assert schedule.order.index(2) < schedule.order.index(1)


def test_tasks_are_issued_by_start() -> None:
    graph, costs = training_step(10)
    schedule = list_schedule(graph, costs, 3)
    starts = simulate(graph, costs, schedule).start_us
    early = max(
        starts[first] - starts[second] for first, second in zip(schedule.order, schedule.order[1:], strict=False)
    )
    assert early <= costs.launch_us + 2 * costs.sync_us + 1e-9


@pytest.mark.parametrize("num_streams", [2, 4])
def test_a_training_step_gains_up_to_what_the_critical_path_allows(num_streams: int) -> None:
    graph, costs = training_step(30)
    total_us = simulate(graph, costs, list_schedule(graph, costs, num_streams)).total_us
    longest_us = max(upward_ranks(dependents(dependencies(graph)), costs))
    assert longest_us <= total_us <= 0.85 * simulate(graph, costs, in_order(graph)).total_us


def test_memory_in_the_order_of_issue_keeps_to_the_bound_of_a_training_step() -> None:
    graph, costs = training_step(30)
    serial = IssuedBytes(graph)
    for task in range(len(graph.tasks)):
        serial.issue(task)
    bounded = IssuedBytes(graph)
    for task in list_schedule(graph, costs, 4, serial.peak).order:
        bounded.issue(task)
    assert bounded.peak <= serial.peak


def test_work_that_does_not_fit_is_put_off() -> None:
    """Two branches, each of which fills memory by itself until its second task has read it."""
    graph = make_graph([[], [], [0], [1]], [(8, 0, [2], False), (8, 1, [3], False)])
    costs = make_costs([5.0] * 4, 0.2)
    assert list_schedule(graph, costs, 2).order[:2] == (0, 1)
    assert list_schedule(graph, costs, 2, 8).order == (0, 2, 1, 3)
