"""Simulated times, against a simulator that looks at every task whenever anything happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Schedule, TaskGraph, Wait
from kitsune.schedule.simulate import simulate
from tests.kitsune.schedule.graphs import costs_of, make_costs, make_graph, scheduled
from tests.kitsune.schedule.oracles import simulate_naively


@given(scheduled(10), st.data())
def test_times_are_those_of_the_naive_simulator(case: tuple[TaskGraph, Schedule], data: st.DataObject) -> None:
    graph, schedule = case
    costs = data.draw(costs_of(graph))
    simulation = simulate(graph, costs, schedule)
    starts, ends = simulate_naively(graph, costs, schedule)
    assert simulation.start_us == pytest.approx(starts, abs=1e-6)
    assert simulation.end_us == pytest.approx(ends, abs=1e-6)
    assert simulation.total_us == max(simulation.end_us, default=0.0)


@given(scheduled(10), st.data())
def test_nothing_starts_before_what_it_awaits_has_ended(case: tuple[TaskGraph, Schedule], data: st.DataObject) -> None:
    graph, schedule = case
    costs = data.draw(costs_of(graph))
    simulation = simulate(graph, costs, schedule)
    for task in graph.tasks:
        for dependency in task.after:
            assert simulation.start_us[task.index] >= simulation.end_us[dependency.task] + costs.launch_us
        lasted = simulation.end_us[task.index] - simulation.start_us[task.index]
        assert lasted >= costs.tasks[task.index].us - 1e-9


def test_tasks_on_one_stream_follow_with_a_gap() -> None:
    simulation = simulate(
        make_graph([[], []]), make_costs([3.0, 2.0], launch_us=0.5), Schedule("by hand", (1, 0), (0, 0))
    )
    assert (simulation.start_us, simulation.end_us) == ((2.5, 0.0), (5.5, 2.0))


def test_tasks_that_fit_beside_each_other_do_not_slow_down() -> None:
    simulation = simulate(make_graph([[], []]), make_costs([4.0, 4.0], 0.5), Schedule("by hand", (0, 1), (0, 1)))
    assert simulation.end_us == (4.0, 4.0)


def test_tasks_that_do_not_fit_slow_each_other_down_while_both_run() -> None:
    simulation = simulate(make_graph([[], []]), make_costs([4.0, 2.0], 1.0), Schedule("by hand", (0, 1), (0, 1)))
    assert simulation.end_us == pytest.approx((6.0, 4.0))


def test_each_wait_has_its_price() -> None:
    graph = make_graph([[], [], [], [0, 1, 2]])
    schedule = Schedule("by hand", (0, 1, 2, 3), (0, 1, 2, 2), (Wait(3, 0), Wait(3, 1)))
    simulation = simulate(graph, make_costs([1.0, 2.0, 3.0, 1.0], 0.1, launch_us=0.25, sync_us=0.5), schedule)
    assert simulation.start_us == (0.0, 0.0, 0.0, 4.25)


def test_nothing_takes_no_time() -> None:
    assert simulate(make_graph([]), make_costs([]), Schedule("by hand", (), ())).total_us == 0.0
