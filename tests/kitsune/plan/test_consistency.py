import pytest
from hypothesis import given

from kitsune.plan import Plan, consistency
from tests.kitsune.plan import plans


@given(plans.plans())
def test_plans_that_fit_together_have_no_problem(plan: Plan) -> None:
    assert consistency.problem(plan) is None
    assert consistency.problem(plans.small()) is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("graph.tasks.1.index", 2, "task 1 has the index 2"),
        ("graph.tasks.1.name", "addmm", "two tasks are called 'addmm'"),
        ("graph.tasks.1.after.0.task", 1, "task 1 depends on a task that is not before it"),
        ("graph.tasks.1.after.0.task", -1, "task 1 depends on a task that is not before it"),
        ("graph.tasks.4.after.1.task", 3, "the dependencies of task 4 are not ascending"),
        ("graph.values.1.index", 0, "value 1 has the index 0"),
        ("graph.values.1.num_bytes", -1, "value 1 has -1 bytes"),
        ("graph.values.1.producer", 5, "value 1 belongs to a task that does not exist"),
        ("graph.values.1.users", [3, 2], "the users of value 1 are not ascending"),
        ("graph.values.1.users", [1, 2], "the users of value 1 are not ascending"),
        ("schedule.order.0", 1, "the order does not name each of 5 tasks once"),
        ("schedule.streams", [0, 0], "2 tasks have a stream, of 5"),
        ("schedule.streams.3", 2, r"the streams [0, 2] are not numbered"),
        ("schedule.waits.0.earlier", 9, "names a task that does not exist"),
        ("schedule.waits.0.later", 0, "is within one stream"),
        ("schedule.waits.1.earlier", 0, "is within one stream"),
        ("schedule.waits.0", {"later": 4, "earlier": 3}, "the waits are not ascending"),
        ("schedule.waits.0.earlier", 2, "is for a task that is issued later"),
        ("memory.offsets", [0], "1 values have a place, of 4"),
        ("memory.offsets.1", -1, "value 1 does not lie within the arena"),
        ("memory.arena_bytes", 24575, "value 2 does not lie within the arena"),
        ("memory.live_bytes", -1, "the arena has a negative size"),
        ("costs.tasks", [], "0 tasks have a cost, of 5"),
        ("costs.tasks.2.us", -1.0, "task 2 costs -1.0 us"),
        ("costs.tasks.2.share", 1.5, "task 2 costs 4.25 us of 1.5 of the device"),
        ("costs.sync_us", -1.0, "launching or waiting takes negative time"),
        ("measured_us", -1.0, "the whole takes negative time"),
        ("predicted_spans", [], "0 tasks have predicted times, of 5"),
        ("measured_spans.1", [5.0, 4.0], "task 1 ends before it starts (measured)"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match="not a plan: ") as caught:
        Plan.from_json(plans.changed(path, value))
    assert message in str(caught.value)
