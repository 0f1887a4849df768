"""Schedules that keep to a bound of memory."""

from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph
from kitsune.schedule.assign import in_order
from kitsune.schedule.chains import chain_schedule
from kitsune.schedule.check import check
from kitsune.schedule.live_bytes import peak_bytes
from kitsune.schedule.throttle import segments, throttle
from tests.kitsune.schedule.graphs import make_graph, scheduled, training_step
from tests.kitsune.schedule.oracles import enforces, peak_on_any_interleaving


def serial_peak(graph: TaskGraph, schedule: Schedule) -> int:
    return peak_bytes(graph, Schedule("by hand", schedule.order, (0,) * len(schedule.order)))


@given(scheduled(9), st.integers(0, 12))
def test_the_bound_is_kept_wherever_the_order_allows_it(case: tuple[TaskGraph, Schedule], slack: int) -> None:
    graph, schedule = case
    max_bytes = serial_peak(graph, schedule) + slack
    throttled = throttle(graph, schedule, max_bytes)
    assert throttled is not None
    assert peak_bytes(graph, throttled) <= max_bytes
    assert peak_on_any_interleaving(graph, throttled) <= max_bytes
    assert check(graph, throttled) == []
    assert enforces(graph, throttled, throttled.waits)
    assert (throttled.order, throttled.streams) == (schedule.order, schedule.streams)


@given(scheduled(9))
def test_a_bound_below_the_order_s_own_need_is_refused(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    assert throttle(graph, schedule, serial_peak(graph, schedule) - 1) is None


@given(scheduled(9))
def test_a_schedule_that_fits_is_left_alone(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    assert throttle(graph, schedule, peak_bytes(graph, schedule)) is schedule


@given(scheduled(9), st.integers(0, 40))
def test_segments_are_the_order_cut(case: tuple[TaskGraph, Schedule], max_bytes: int) -> None:
    graph, schedule = case
    runs = segments(graph, schedule, max_bytes)
    assert [task for run in runs for task in run] == list(schedule.order)
    assert all(runs)


def test_only_what_must_be_is_cut() -> None:
    graph = make_graph([[], [], [0], [1]], [(8, 0, [2], False), (8, 1, [3], False)])
    schedule = Schedule("by hand", (0, 2, 1, 3), (0, 1, 0, 1))
    assert segments(graph, schedule, 16) == [[0, 2, 1, 3]]
    assert segments(graph, schedule, 15) == [[0, 2], [1, 3]]


def test_a_training_step_on_streams_can_have_the_peak_of_one_stream() -> None:
    graph, costs = training_step(30)
    bound = peak_bytes(graph, in_order(graph))
    chained = chain_schedule(graph, costs, 4)
    throttled = throttle(graph, chained, bound)
    assert throttled is not None
    assert peak_bytes(graph, throttled) <= bound < peak_bytes(graph, chained)
    assert check(graph, throttled) == []
