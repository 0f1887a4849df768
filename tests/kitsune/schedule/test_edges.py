"""Dependencies as indices, and urgency."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Costs, TaskGraph
from kitsune.schedule.edges import dependencies, dependents, upward_ranks
from tests.kitsune.schedule.graphs import costs_of, graphs, make_costs, make_graph
from tests.kitsune.schedule.oracles import dependency_pairs


@given(graphs())
def test_dependents_are_dependencies_turned_round(graph: TaskGraph) -> None:
    after = dependencies(graph)
    before = dependents(after)
    assert {(earlier, task) for task, earlier_tasks in enumerate(after) for earlier in earlier_tasks} == (
        dependency_pairs(graph)
    )
    assert {(task, later) for task, later_tasks in enumerate(before) for later in later_tasks} == (
        dependency_pairs(graph)
    )
    assert all(later == sorted(later) for later in before)


@given(graphs(8), st.data())
def test_the_rank_is_the_longest_path(graph: TaskGraph, data: st.DataObject) -> None:
    costs = data.draw(costs_of(graph))
    before = dependents(dependencies(graph))
    assert upward_ranks(before, costs) == [_longest(before, costs, task) for task in range(len(before))]


def test_the_gap_counts_between_tasks_only() -> None:
    before = dependents(dependencies(make_graph([[], [0], [1]])))
    assert upward_ranks(before, make_costs([3.0, 2.0, 1.0], launch_us=0.5)) == pytest.approx([7.0, 3.5, 1.0])


def _longest(before: list[list[int]], costs: Costs, task: int) -> float:
    paths = [costs.launch_us + _longest(before, costs, later) for later in before[task]]
    return costs.tasks[task].us + max([0.0, *paths])
