"""Transitive reductions, against their definition."""

from hypothesis import given

from kitsune.plan import Schedule, TaskGraph, Wait
from kitsune.schedule.edges import dependencies
from kitsune.schedule.reduce import Issuing, reduce_edges, reduce_waits
from tests.kitsune.schedule.graphs import graphs, make_graph, scheduled, training_step
from tests.kitsune.schedule.oracles import dependency_pairs, enforces, reduction


@given(scheduled())
def test_waits_enforce_every_dependency(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    assert enforces(graph, schedule, schedule.waits)


@given(scheduled())
def test_every_wait_is_needed(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    for wait in schedule.waits:
        assert not enforces(graph, schedule, [other for other in schedule.waits if other != wait])


@given(scheduled())
def test_waits_are_dependencies_in_ascending_order(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    assert {(wait.earlier, wait.later) for wait in schedule.waits} <= dependency_pairs(graph)
    assert list(schedule.waits) == sorted(set(schedule.waits))


def test_a_wait_implied_by_another_of_the_same_task_is_left_out() -> None:
    after = [[], [0], [0, 1]]
    assert reduce_waits(after, range(3), [0, 1, 2]) == (Wait(1, 0), Wait(2, 1))


def test_a_wait_implied_by_what_the_stream_knows_is_left_out() -> None:
    after = [[], [], [1], [0, 2]]
    assert reduce_waits(after, range(4), [0, 0, 1, 1]) == (Wait(2, 1),)


def test_only_the_latest_task_of_a_stream_is_awaited() -> None:
    assert reduce_waits([[], [], [0, 1]], range(3), [0, 0, 1]) == (Wait(2, 1),)


def test_the_order_of_issue_counts_not_the_index() -> None:
    assert reduce_waits([[], [], [0, 1]], [1, 0, 2], [0, 0, 1]) == (Wait(2, 0),)


def test_waits_are_known_before_a_task_is_issued() -> None:
    issuing = Issuing([[], [0]], 2)
    issuing.issue(0, 0)
    assert (issuing.waits(1, 0), issuing.waits(1, 1)) == ([], [0])
    issuing.issue(1, 1)
    assert issuing.schedule("by hand") == Schedule("by hand", (0, 1), (0, 1), (Wait(1, 0),))


@given(graphs())
def test_the_reduction_of_a_graph_is_the_one_of_the_definition(graph: TaskGraph) -> None:
    kept = {(earlier, task) for task, tasks in enumerate(reduce_edges(dependencies(graph))) for earlier in tasks}
    assert kept == reduction(len(graph.tasks), dependency_pairs(graph))


def test_a_shortcut_over_a_long_way_is_found() -> None:
    after: list[list[int]] = [[]] + [[task] for task in range(200)]
    after[200] = [0, 100, 199]
    assert reduce_edges(after) == [[]] + [[task] for task in range(200)]


def test_a_training_step_has_few_implied_dependencies() -> None:
    graph, _ = training_step(20)
    kept = {(earlier, task) for task, tasks in enumerate(reduce_edges(dependencies(graph))) for earlier in tasks}
    assert kept == reduction_by_search(graph)
    assert kept < dependency_pairs(graph)


def reduction_by_search(graph: TaskGraph) -> set[tuple[int, int]]:
    """The pairs that no longer path connects, each looked for by itself."""
    before: dict[int, set[int]] = {task.index: set() for task in graph.tasks}
    for first, second in dependency_pairs(graph):
        before[first].add(second)
    return {pair for pair in dependency_pairs(graph) if not _leads_around(before, *pair)}


def _leads_around(before: dict[int, set[int]], first: int, second: int) -> bool:
    frontier = before[first] - {second}
    while frontier:
        if second in frontier:
            return True
        frontier = {later for task in frontier for later in before[task]}
    return False


def test_nothing_has_nothing() -> None:
    assert reduce_waits([], [], []) == ()
    assert reduce_edges(dependencies(make_graph([]))) == []
