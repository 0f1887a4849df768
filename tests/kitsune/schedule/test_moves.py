"""Moves of tasks to other streams: legal, and each a gain."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Costs, TaskGraph
from kitsune.schedule.assign import in_order, on_streams
from kitsune.schedule.chains import chain_schedule
from kitsune.schedule.check import check
from kitsune.schedule.live_bytes import peak_bytes
from kitsune.schedule.moves import improved
from kitsune.schedule.simulate import simulate
from tests.kitsune.schedule.graphs import costs_of, graphs, make_costs, make_graph
from tests.kitsune.schedule.oracles import enforces, optimum_us

NUM_GRAPHS = 60


@given(graphs(9), st.integers(1, 4), st.data())
def test_what_is_improved_is_legal_and_no_slower(graph: TaskGraph, num_streams: int, data: st.DataObject) -> None:
    costs = data.draw(costs_of(graph))
    for schedule in (in_order(graph), chain_schedule(graph, costs, num_streams)):
        better = improved(graph, costs, schedule, num_streams)
        assert check(graph, better) == []
        assert enforces(graph, better, better.waits)
        assert better.num_streams <= num_streams
        assert simulate(graph, costs, better).total_us <= simulate(graph, costs, schedule).total_us


@given(graphs(9), st.integers(0, 60), st.data())
def test_no_move_needs_more_than_the_bound(graph: TaskGraph, max_bytes: int, data: st.DataObject) -> None:
    serial = in_order(graph)
    better = improved(graph, data.draw(costs_of(graph)), serial, 3, max_bytes)
    assert better == serial or peak_bytes(graph, better) <= max_bytes


def harsh_problem(seed: int) -> tuple[TaskGraph, Costs, int]:
    """Four to six tasks, some of them unconnected, and waits that may cost much more than they do."""
    generator = random.Random(seed)
    after: list[list[int]] = [[]]
    for task in range(1, generator.choice([4, 5, 6])):
        num_earlier = generator.choice([0, 0, 1, 1, 1, 2])
        after.append(sorted({generator.randrange(task) for _ in range(num_earlier)}))
    shares = generator.choice([[0.1, 0.3, 0.5], [0.2, 0.5, 1.0], [1.0], [0.5]])
    us = [generator.choice([1.0, generator.uniform(0.5, 5), generator.uniform(1, 20)]) for _ in after]
    sync_us = generator.choice([0.5, 1.0, 3.0, 8.0, 15.0])
    costs = make_costs(us, [generator.choice(shares) for _ in after], generator.choice([0.0, 0.3, 1.0]), sync_us)
    return make_graph(after), costs, generator.choice([2, 2, 3])


def test_lists_of_small_graphs_are_near_the_optimum_whatever_waits_cost() -> None:
    ratios = []
    for seed in range(NUM_GRAPHS):
        graph, costs, num_streams = harsh_problem(seed)
        schedule = on_streams(graph, costs, "list", num_streams, None)
        assert schedule is not None
        assert schedule.strategy == "list"
        ratios.append(simulate(graph, costs, schedule).total_us / optimum_us(graph, costs, num_streams))
    assert mean(ratios) <= 1.05
    assert max(ratios) <= 1.5


@pytest.mark.parametrize(
    ("after", "us", "shares", "num_streams"),
    [
        ([[], [], [0, 1], []], [1, 1, 1, 1], [0.5, 0.2, 1, 1], 2),
        ([[], [], [], [], [2, 3]], [1, 1, 1, 1, 1], [0.5, 0.2, 0.5, 0.5, 0.5], 3),
    ],
)
def test_waits_that_cost_more_than_tasks_are_avoided(
    after: list[list[int]], us: list[float], shares: list[float], num_streams: int
) -> None:
    graph, costs = make_graph(after), make_costs(us, shares, 0.0, 8.0)
    schedule = on_streams(graph, costs, "list", num_streams, None)
    assert schedule is not None
    assert schedule.waits == ()
    assert simulate(graph, costs, schedule).total_us <= 1.1 * optimum_us(graph, costs, num_streams)
