"""Strategies within a bound of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from kitsune.passes import pipeline
from kitsune.plan import Schedule, TaskGraph, task_graph
from kitsune.schedule.assign import StreamStrategy, in_order, on_streams
from kitsune.schedule.check import check
from kitsune.schedule.cost import analytic_costs
from kitsune.schedule.limits import cuda_limits
from kitsune.schedule.live_bytes import peak_bytes
from tests.kitsune.schedule.graphs import costs_of, graphs, make_graph, training_step
from tests.kitsune.schedule.oracles import dependency_pairs, enforces, redundant
from tests.kitsune.steps import model_step


def test_in_order_is_one_stream_in_graph_order() -> None:
    assert in_order(make_graph([[], [0], [0]])) == Schedule("in order", (0, 1, 2), (0, 0, 0))


@given(graphs(9), st.sampled_from(["chains", "list"]), st.integers(0, 50), st.data())
def test_what_is_found_keeps_to_the_bound(
    graph: TaskGraph, strategy: StreamStrategy, max_bytes: int, data: st.DataObject
) -> None:
    schedule = on_streams(graph, data.draw(costs_of(graph)), strategy, 3, max_bytes)
    assert schedule is None or check(graph, schedule) == []
    assert schedule is None or peak_bytes(graph, schedule) <= max_bytes
    if strategy == "chains" and peak_bytes(graph, in_order(graph)) <= max_bytes:
        assert schedule is not None


@pytest.mark.parametrize("strategy", ["chains", "list"])
def test_a_training_step_keeps_streams_at_the_peak_of_one(strategy: StreamStrategy) -> None:
    graph, costs = training_step(20)
    schedule = on_streams(graph, costs, strategy, 4, peak_bytes(graph, in_order(graph)))
    assert schedule is not None
    assert (schedule.strategy, schedule.num_streams > 1) == (strategy, True)


@pytest.mark.parametrize("name", models.names())
def test_schedules_of_real_steps_hold_by_the_definition(name: str) -> None:
    """All dependencies are on a path of waits and of the order on streams; no wait has such a path around it."""
    split = pipeline.run(model_step(name).module, pipeline.splitting(4))
    graph = task_graph(split.graph)
    costs = analytic_costs(split.graph, graph, cuda_limits("a GPU", (9, 0)))
    strategies: tuple[StreamStrategy, ...] = ("chains", "list")
    schedules = [on_streams(graph, costs, strategy, count, None) for strategy in strategies for count in (2, 4)]
    for schedule in (in_order(graph), *schedules):
        assert schedule is not None
        assert enforces(graph, schedule, schedule.waits)
        assert redundant(schedule) == []
        assert {(wait.earlier, wait.later) for wait in schedule.waits} <= dependency_pairs(graph)
        assert schedule.waits or schedule.num_streams == 1
