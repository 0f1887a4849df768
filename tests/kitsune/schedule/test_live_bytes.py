"""Peaks, against all interleavings."""

from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph, Wait
from kitsune.schedule.live_bytes import IssuedBytes, peak_bytes
from tests.kitsune.schedule.graphs import make_graph, scheduled, training_step
from tests.kitsune.schedule.oracles import ordered, peak_on_any_interleaving


@given(scheduled(8))
def test_no_interleaving_needs_more(case: tuple[TaskGraph, Schedule]) -> None:
    assert peak_bytes(*case) >= peak_on_any_interleaving(*case)


@given(scheduled(8, max_streams=1))
def test_on_one_stream_the_peak_is_exact(case: tuple[TaskGraph, Schedule]) -> None:
    assert peak_bytes(*case) == peak_on_any_interleaving(*case)


@given(scheduled())
def test_the_peak_is_that_of_the_definition(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    before = ordered(schedule, schedule.waits)
    weights = [
        sum(
            value.num_bytes
            for value in graph.values
            if not before[task.index][value.producer]
            and (value.is_output or not all(before[user][task.index] for user in (value.producer, *value.users)))
        )
        for task in graph.tasks
    ]
    assert peak_bytes(graph, schedule) == max(weights, default=0)


@given(scheduled(8))
def test_bytes_in_the_order_of_issue_are_those_on_one_stream(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    issued = IssuedBytes(graph)
    for task in schedule.order:
        issued.issue(task)
    serial = Schedule("by hand", schedule.order, (0,) * len(schedule.order))
    assert issued.peak == peak_bytes(graph, serial)
    assert issued.held == sum(value.num_bytes for value in graph.values if value.is_output)
    assert peak_bytes(graph, schedule) >= issued.peak


def test_a_value_lives_from_its_producer_to_its_last_user() -> None:
    graph = make_graph([[], [0], [1], [2]], [(8, 0, [1], False), (4, 1, [2], False), (2, 2, [], False)])
    assert peak_bytes(graph, Schedule("by hand", (0, 1, 2, 3), (0,) * 4)) == 12


def test_what_is_returned_lives_to_the_end() -> None:
    graph = make_graph([[], [0]], [(8, 0, [], True), (4, 1, [], False)])
    assert peak_bytes(graph, Schedule("by hand", (0, 1), (0, 0))) == 12


def test_a_stream_may_lag_unless_it_is_awaited() -> None:
    values = [(8, 0, [1], False), (8, 2, [3], False)]
    graph = make_graph([[], [0], [], [2]], values)
    lagging = Schedule("by hand", (0, 1, 2, 3), (0, 1, 0, 0), (Wait(1, 0),))
    awaited = Schedule("by hand", (0, 1, 2, 3), (0, 1, 0, 0), (Wait(1, 0), Wait(2, 1)))
    assert (peak_bytes(graph, lagging), peak_bytes(graph, awaited)) == (16, 8)


def test_activations_of_a_training_step_pile_up() -> None:
    graph, _ = training_step(4)
    serial = Schedule("in order", tuple(range(len(graph.tasks))), (0,) * len(graph.tasks))
    assert peak_bytes(graph, serial) > sum(value.num_bytes for value in graph.values) / 4
    assert peak_bytes(make_graph([]), Schedule("by hand", (), ())) == 0


@given(scheduled(8), st.data())
def test_a_dropped_wait_never_lowers_the_peak(case: tuple[TaskGraph, Schedule], data: st.DataObject) -> None:
    graph, schedule = case
    waits = tuple(wait for wait in schedule.waits if data.draw(st.booleans()))
    looser = Schedule("looser", schedule.order, schedule.streams, waits)
    assert peak_bytes(graph, looser) >= peak_bytes(graph, schedule)
