"""Chains: what Nimble promises, and their place on few streams."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph
from kitsune.schedule.chains import chain_schedule, chains
from kitsune.schedule.check import check
from kitsune.schedule.edges import dependencies
from kitsune.schedule.reduce import reduce_waits
from tests.kitsune.schedule.graphs import costs_of, graphs, make_costs, make_graph, training_step
from tests.kitsune.schedule.oracles import closure, dependency_pairs, enforces, largest_matching, reduction


@given(graphs(9), st.data())
def test_chains_part_the_graph_into_paths(graph: TaskGraph, data: st.DataObject) -> None:
    parts = chains(graph, data.draw(costs_of(graph)))
    assert sorted(task for part in parts for task in part) == list(range(len(graph.tasks)))
    assert [part[0] for part in parts] == sorted(part[0] for part in parts)
    assert {pair for part in parts for pair in pairwise(part)} <= reduction(len(graph.tasks), dependency_pairs(graph))


@given(graphs(9), st.data())
def test_chains_need_the_fewest_synchronizations(graph: TaskGraph, data: st.DataObject) -> None:
    parts = chains(graph, data.draw(costs_of(graph)))
    needed = reduction(len(graph.tasks), dependency_pairs(graph))
    schedule = _each_on_its_own(graph, parts)
    assert enforces(graph, schedule, schedule.waits)
    assert len(schedule.waits) == len(needed) - largest_matching(needed)


@given(graphs(9), st.data())
def test_independent_tasks_are_never_on_one_chain(graph: TaskGraph, data: st.DataObject) -> None:
    reached = closure(len(graph.tasks), dependency_pairs(graph))
    for part in chains(graph, data.draw(costs_of(graph))):
        assert all(reached[first][second] for first, second in combinations(part, 2))


@given(graphs(), st.integers(1, 8), st.data())
def test_a_schedule_of_chains_is_legal(graph: TaskGraph, num_streams: int, data: st.DataObject) -> None:
    schedule = chain_schedule(graph, data.draw(costs_of(graph)), num_streams)
    assert check(graph, schedule) == []
    assert enforces(graph, schedule, schedule.waits)
    assert schedule.num_streams <= num_streams
    assert schedule.order == tuple(range(len(graph.tasks)))


def test_the_longer_branch_continues_the_chain() -> None:
    graph = make_graph([[], [0], [0], [1], [2]])
    assert chains(graph, make_costs([1.0, 1.0, 9.0, 1.0, 1.0])) == [(0, 2, 4), (1, 3)]


def test_long_branches_get_streams_of_their_own() -> None:
    graph = make_graph([[], [0], [0], [0], [1], [2], [3], [4, 5, 6]])
    schedule = chain_schedule(graph, make_costs([1.0] + [20.0] * 6 + [1.0], 0.2), 3)
    assert {schedule.streams[task] for task in (1, 2, 3)} == {0, 1, 2}
    assert all(schedule.streams[task] == schedule.streams[task + 3] for task in (1, 2, 3))


def test_a_chain_follows_on_a_stream_that_is_free() -> None:
    graph = make_graph([[], [0], [0], [1], [3], [3]])
    schedule = chain_schedule(graph, make_costs([10.0, 10.0, 1.0, 10.0, 10.0, 1.0]), 8)
    assert schedule.streams == (0, 0, 1, 0, 0, 1)


def test_a_training_step_needs_one_wait_for_each_branch() -> None:
    graph, costs = training_step(12)
    schedule = chain_schedule(graph, costs, 4)
    assert check(graph, schedule) == []
    assert len(schedule.waits) <= 2 * 12


def _each_on_its_own(graph: TaskGraph, parts: list[tuple[int, ...]]) -> Schedule:
    streams = [0] * len(graph.tasks)
    for stream, part in enumerate(parts):
        for task in part:
            streams[task] = stream
    order = tuple(range(len(streams)))
    return Schedule("each on its own", order, tuple(streams), reduce_waits(dependencies(graph), order, streams))
