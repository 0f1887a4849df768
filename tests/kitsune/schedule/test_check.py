"""The check of schedules: it accepts legal ones and finds each way to break one."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph, Wait
from kitsune.schedule.assign import in_order
from kitsune.schedule.chains import chain_schedule
from kitsune.schedule.check import check
from kitsune.schedule.listing import list_schedule
from tests.kitsune.schedule.graphs import make_graph, scheduled, training_step
from tests.kitsune.schedule.oracles import enforces, ordered

_GRAPH = make_graph([[], [0], [0], [1, 2]])
_LEGAL = Schedule("by hand", (0, 1, 2, 3), (0, 0, 1, 0), (Wait(2, 0), Wait(3, 2)))


@given(scheduled())
def test_legal_schedules_pass(case: tuple[TaskGraph, Schedule]) -> None:
    assert check(*case) == []


@given(scheduled())
def test_dropping_any_one_wait_is_found(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    for wait in schedule.waits:
        rest = tuple(other for other in schedule.waits if other != wait)
        assert any("depends" in violation for violation in check(graph, replace(schedule, waits=rest)))


@given(scheduled(), st.data())
def test_adding_a_wait_is_found_if_and_only_if_it_changes_nothing(
    case: tuple[TaskGraph, Schedule], data: st.DataObject
) -> None:
    graph, schedule = case
    assume(schedule.num_streams > 1)
    places = {task: place for place, task in enumerate(schedule.order)}
    choices = [
        Wait(later, earlier)
        for later in places
        for earlier in places
        if places[earlier] < places[later] and schedule.streams[earlier] != schedule.streams[later]
    ]
    wait = data.draw(st.sampled_from(choices))
    assume(wait not in schedule.waits)
    violations = check(graph, replace(schedule, waits=tuple(sorted((*schedule.waits, wait)))))
    before = ordered(schedule, schedule.waits)
    longer = ordered(schedule, (*schedule.waits, wait))
    if before[wait.earlier][wait.later]:
        assert any(f"task {wait.later} for task {wait.earlier}" in violation for violation in violations)
    elif all(not _implied(schedule, other, wait) for other in schedule.waits):
        assert violations == []
    assert longer[wait.earlier][wait.later]


def _implied(schedule: Schedule, wait: Wait, added: Wait) -> bool:
    """Whether `wait` is implied by the other waits once `added` is there."""
    others = [other for other in schedule.waits if other != wait]
    return ordered(schedule, [*others, added])[wait.earlier][wait.later]


@given(scheduled(), st.data())
def test_moving_a_task_is_found_if_and_only_if_it_breaks_a_dependency(
    case: tuple[TaskGraph, Schedule], data: st.DataObject
) -> None:
    graph, schedule = case
    assume(schedule.order)
    moved = data.draw(st.integers(0, len(schedule.order) - 1))
    streams = list(schedule.streams)
    streams[moved] = data.draw(st.integers(0, schedule.num_streams - 1))
    assume(set(streams) == set(range(schedule.num_streams)))
    assume(all(streams[wait.earlier] != streams[wait.later] for wait in schedule.waits))
    changed = replace(schedule, streams=tuple(streams))
    lost = [violation for violation in check(graph, changed) if "implied" not in violation]
    assert bool(lost) == (not enforces(graph, changed, changed.waits))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"order": (0, 1, 2, 2)}, "does not name each of the 4 tasks once"),
        ({"order": (0, 1, 2)}, "does not name each of the 4 tasks once"),
        ({"streams": (0, 0, 1)}, "3 streams are named for 4 tasks"),
        ({"streams": (0, 0, 2, 0)}, "not numbered from 0"),
        ({"waits": (Wait(3, 2), Wait(2, 0))}, "waits ascend"),
        ({"waits": (Wait(2, 0), Wait(2, 0), Wait(3, 2))}, "waits ascend"),
        ({"waits": (Wait(2, 0), Wait(4, 2))}, "does not exist"),
        ({"order": (1, 0, 2, 3)}, "task 1 is issued before task 0, on which it depends"),
        ({"order": (0, 2, 3, 1)}, "task 3 is issued before task 1, on which it depends"),
        ({"waits": (Wait(1, 2), Wait(2, 0), Wait(3, 2))}, "task 1 is issued before task 2, for which it waits"),
        ({"waits": (Wait(2, 0), Wait(3, 1), Wait(3, 2))}, "task 3 waits for task 1 of its own stream"),
        ({"waits": (Wait(2, 0),)}, "task 3 may start before task 2 has ended, on which it depends"),
        ({"streams": (0, 0, 1, 2), "waits": (Wait(2, 0), Wait(3, 0), Wait(3, 1), Wait(3, 2))}, "task 3 for task 0"),
    ],
)
def test_a_broken_schedule_is_found(change: dict[str, tuple[object, ...]], found: str) -> None:
    assert check(_GRAPH, _LEGAL) == []
    assert any(found in violation for violation in check(_GRAPH, replace(_LEGAL, **change)))  # type: ignore[arg-type]


def test_waits_in_a_circle_are_found() -> None:
    graph = make_graph([[], [], [], []])
    circle = Schedule("by hand", (0, 1, 2, 3), (0, 0, 1, 1), (Wait(0, 3), Wait(2, 1)))
    assert check(graph, circle) == ["task 0 is issued before task 3, for which it waits"]


@pytest.mark.parametrize("num_streams", [2, 3, 8])
def test_each_wait_of_a_training_step_is_needed(num_streams: int) -> None:
    graph, costs = training_step(6)
    for schedule in (chain_schedule(graph, costs, num_streams), list_schedule(graph, costs, num_streams)):
        assert check(graph, schedule) == []
        for wait in schedule.waits:
            assert check(graph, replace(schedule, waits=tuple(other for other in schedule.waits if other != wait)))


def test_in_order_is_legal() -> None:
    assert check(_GRAPH, in_order(_GRAPH)) == []
    assert check(make_graph([]), in_order(make_graph([]))) == []
