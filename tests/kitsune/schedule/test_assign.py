"""Strategies within a bound of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph
from kitsune.schedule.assign import StreamStrategy, in_order, on_streams
from kitsune.schedule.check import check
from kitsune.schedule.live_bytes import peak_bytes
from tests.kitsune.schedule.graphs import costs_of, graphs, make_graph, training_step


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
