"""The scheduler: its options, its choice, its candidates."""

import gc
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph
from kitsune.schedule import DataflowScheduler, check, peak_bytes, simulate
from kitsune.schedule.assign import StreamStrategy, in_order
from kitsune.schedule.scheduler import Strategy
from tests.kitsune.schedule.graphs import costs_of, graphs, make_costs, make_graph, training_step

_STRATEGIES: tuple[Strategy, ...] = ("auto", "in order", "chains", "list")


@pytest.mark.parametrize("num_streams", [0, 9, -1, 2.0, True, "4"])
def test_a_number_of_streams_that_is_not_allowed_is_named(num_streams: object) -> None:
    with pytest.raises(ValueError, match=r"num_streams is .*; it must be a whole number from 1 to 8"):
        DataflowScheduler(num_streams)  # type: ignore[arg-type]


def test_a_strategy_that_is_not_allowed_is_named() -> None:
    with pytest.raises(
        ValueError, match="strategy is 'greedy'; it must be one of 'auto', 'in order', 'chains', 'list'"
    ):
        DataflowScheduler(strategy="greedy")  # type: ignore[arg-type]


def test_a_bound_that_is_not_allowed_is_named() -> None:
    with pytest.raises(ValueError, match="max_bytes is -1; it must be at least 0"):
        DataflowScheduler(max_bytes=-1)


@given(graphs(9), st.integers(1, 8), st.sampled_from(_STRATEGIES), st.none() | st.integers(0, 60), st.data())
def test_every_schedule_is_legal(
    graph: TaskGraph, num_streams: int, strategy: Strategy, max_bytes: int | None, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(graph))
    scheduler = DataflowScheduler(num_streams, strategy, max_bytes)
    schedule = scheduler.schedule(graph, costs)
    for made in (schedule, *scheduler.candidates(graph, costs)):
        assert check(graph, made) == []
        assert made.num_streams <= num_streams
    assert scheduler.schedule(graph, costs) == schedule


@given(graphs(9), st.integers(2, 4), st.sampled_from(_STRATEGIES), st.data())
def test_the_peak_of_one_stream_is_always_possible(
    graph: TaskGraph, num_streams: int, strategy: Strategy, data: st.DataObject
) -> None:
    bound = peak_bytes(graph, in_order(graph))
    costs = data.draw(costs_of(graph))
    scheduler = DataflowScheduler(num_streams, strategy, bound)
    for schedule in (scheduler.schedule(graph, costs), *scheduler.candidates(graph, costs)):
        assert peak_bytes(graph, schedule) <= bound


@given(graphs(9), st.integers(1, 4), st.data())
def test_auto_is_never_slower_than_any_other(graph: TaskGraph, num_streams: int, data: st.DataObject) -> None:
    costs = data.draw(costs_of(graph))
    chosen = simulate(graph, costs, DataflowScheduler(num_streams).schedule(graph, costs)).total_us
    for strategy in _STRATEGIES:
        other = DataflowScheduler(num_streams, strategy).schedule(graph, costs)
        assert chosen <= simulate(graph, costs, other).total_us


@given(graphs(9), st.integers(1, 8), st.data())
def test_candidates_are_in_order_first_and_then_by_time(
    graph: TaskGraph, num_streams: int, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(graph))
    first, *others = DataflowScheduler(num_streams).candidates(graph, costs)
    times = [simulate(graph, costs, schedule).total_us for schedule in others]
    assert first == in_order(graph)
    assert times == sorted(times)
    assert len(others) <= 2 * (num_streams - 1)
    assert len({(other.streams, other.positions, other.waits) for other in others}) == len(others)
    assert all(other.num_streams > 1 for other in others)


@given(graphs(9), st.integers(1, 4), st.none() | st.integers(0, 60), st.data())
def test_what_is_known_is_no_candidate_again(
    graph: TaskGraph, num_streams: int, max_bytes: int | None, data: st.DataObject
) -> None:
    """Nor what looks the same to a device, by whichever strategy; the others are as they would be."""
    costs = data.draw(costs_of(graph))
    known = DataflowScheduler(num_streams, max_bytes=max_bytes).candidates(graph, costs)
    looser = DataflowScheduler(num_streams, "list")
    seen = [(made.streams, made.positions, made.waits) for made in known]
    first, *others = looser.candidates(graph, costs)
    new = [made for made in others if (made.streams, made.positions, made.waits) not in seen]
    assert looser.candidates(graph, costs, known) == (first, *new)


def test_a_strategy_has_its_own_candidates() -> None:
    graph, costs = training_step(6)
    names = {
        strategy: {made.strategy for made in DataflowScheduler(4, strategy).candidates(graph, costs)}
        for strategy in _STRATEGIES
    }
    assert names == {
        "auto": {"in order", "chains", "list"},
        "in order": {"in order"},
        "chains": {"in order", "chains"},
        "list": {"in order", "list"},
    }


def test_the_simulation_leaves_no_candidate_out() -> None:
    """It ranks them; which is the fastest, measurements say."""
    graph, costs = training_step(12)
    candidates = DataflowScheduler(8).candidates(graph, costs)
    assert {made.strategy for made in candidates} == {"in order", "chains", "list"}
    found = {(made.streams, made.positions, made.waits) for made in candidates}
    for strategy in get_args(StreamStrategy):
        for num_streams in range(2, 9):
            made = DataflowScheduler(num_streams, strategy).schedule(graph, costs)
            assert (made.streams, made.positions, made.waits) in found


def test_streams_that_gain_nothing_are_not_used() -> None:
    graph = make_graph([[], [0], [1]])
    assert DataflowScheduler().schedule(graph, make_costs([5.0, 5.0, 5.0])) == in_order(graph)


def test_a_graph_that_fits_no_bound_runs_in_order() -> None:
    graph = make_graph([[], []], [(8, 0, [], True), (8, 1, [], True)])
    for strategy in _STRATEGIES:
        assert DataflowScheduler(2, strategy, 15).schedule(graph, make_costs([5.0, 5.0], 0.1)) == in_order(graph)


def test_a_bound_that_only_a_list_keeps_is_kept() -> None:
    """In order, both branches are open at once; a list closes one before it opens the other."""
    graph = make_graph([[], [], [0], [1]], [(8, 0, [2], False), (8, 1, [3], False)])
    schedule = DataflowScheduler(2, max_bytes=8).schedule(graph, make_costs([5.0] * 4, 0.2))
    assert peak_bytes(graph, in_order(graph)) == 16
    assert peak_bytes(graph, schedule) == 8


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_nothing_is_scheduled_to_nothing(strategy: Strategy) -> None:
    scheduler = DataflowScheduler(strategy=strategy)
    assert scheduler.schedule(make_graph([]), make_costs([])).order == ()
    assert scheduler.candidates(make_graph([]), make_costs([])) == (Schedule("in order", (), ()),)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_left_as_it_was(enabled: bool) -> None:
    graph, costs = training_step(2)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        DataflowScheduler().schedule(graph, costs)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
