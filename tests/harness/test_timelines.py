import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from harness import timelines
from harness.operators import Kind
from harness.selection import Case
from harness.timelines import NoTimeline, Timeline, timeline
from kitsune.plan import Plan
from tests.harness import plans
from tests.kitsune.plan.plans import plans as random_plans

CASE = Case("mlp-b64", "mlp", 64, "cuda")
VARIANT = "kitsune_trainstep_fp32"


def read(document: object) -> Timeline | NoTimeline:
    return timeline(CASE, VARIANT, {"mode": "replay", "plan": document})


def known(document: object) -> Timeline:
    found = read(document)
    assert isinstance(found, Timeline), found
    return found


@given(random_plans())
def test_what_kitsune_writes_is_read(plan: Plan) -> None:
    """The bars are those of the plan's own spans, whatever the plan."""
    found = read(plans.decoded(plan))
    if not plan.graph.tasks or (plan.predicted_spans is None and plan.measured_spans is None):
        assert found == NoTimeline(CASE, VARIANT, "its plan holds no times of tasks")
        return
    assert isinstance(found, Timeline)
    for bars, spans in ((found.predicted, plan.predicted_spans), (found.measured, plan.measured_spans)):
        assert len(bars) == len(spans or ())
        for bar, task, stream, (start, end) in zip(
            bars, plan.graph.tasks, plan.schedule.streams, spans or (), strict=bool(spans)
        ):
            assert (bar.name, bar.operator, bar.stream) == (task.name, task.operator, stream)
            assert math.isclose(bar.start_us, start, abs_tol=5.01e-4)
            assert math.isclose(bar.duration_us, end - start, abs_tol=6e-4)
    assert (found.num_tasks, found.num_streams) == (len(plan.graph.tasks), plan.schedule.num_streams)
    assert (found.predicted_us, found.measured_us) == (plan.predicted_us, plan.measured_us)


def test_figures_of_a_plan() -> None:
    found = known(plans.document(num_tasks=7, num_streams=2))
    assert found.strategy == "list"
    assert [bar.stream for bar in found.predicted] == [0, 1, 0, 1, 0, 1, 0]
    assert found.off_main_share == pytest.approx((2 + 4 + 6) / 28)
    assert found.predicted[6].kind is Kind.OPTIMIZER
    assert found.shown_tasks == found.num_tasks == 7


def test_predicted_times_alone_are_enough() -> None:
    found = known(plans.document(num_tasks=3, measured=False))
    assert len(found.predicted) == 3
    assert found.measured == ()
    assert found.measured_us is None


def test_a_large_plan_keeps_its_longest_tasks() -> None:
    num_tasks = timelines.MOST_TASKS + 1000
    found = known(plans.document(num_tasks, num_streams=3))
    assert (found.num_tasks, found.shown_tasks) == (num_tasks, timelines.MOST_TASKS)
    assert len(found.predicted) == len(found.measured) == timelines.MOST_TASKS
    names = [bar.name for bar in found.measured]
    assert names == [bar.name for bar in found.predicted]
    lengths = sorted((1.25 * (1 + i % 7) for i in range(num_tasks)), reverse=True)[: timelines.MOST_TASKS]
    assert sorted((bar.duration_us for bar in found.measured), reverse=True) == lengths
    assert [int(name.removeprefix("node_")) for name in names] == sorted(
        int(name.removeprefix("node_")) for name in names
    )


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (None, "no profile of it was measured"),
        ({"mode": "replay"}, "its status holds no plan"),
        ({"mode": "replay", "plan": None}, "its status holds no plan"),
        ({"mode": "eager"}, "its status holds no plan: its mode was eager"),
        ({"mode": "replay", "plan": []}, "its plan cannot be read: the plan is not an object"),
        ({"mode": "replay", "plan": {}}, "its plan cannot be read: it is not of format 'kitsune plan', version 1 or 2"),
        (
            {"mode": "replay", "plan": {"format": "kitsune plan", "version": 3}},
            "its plan cannot be read: it is not of format 'kitsune plan', version 1 or 2",
        ),
    ],
)
def test_without_a_plan_there_is_a_reason(status: dict[str, object] | None, reason: str) -> None:
    assert timeline(CASE, VARIANT, status) == NoTimeline(CASE, VARIANT, reason)


def _put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(target: Any) -> None:
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_put("graph", value=3), "graph is not an object"),
        (_put("graph", "tasks", value={}), "tasks is not a list"),
        (_put("graph", "tasks", 1, value=None), "task 1 is not an object"),
        (_put("graph", "tasks", 1, "operator", value=7), "an operator is not a text"),
        (_put("schedule", "streams", value=[0]), "streams has 1 entries instead of 4"),
        (_put("schedule", "streams", 1, value=4), "4 is not a stream"),
        (_put("schedule", "streams", 1, value=True), "True is not a stream"),
        (_put("schedule", "streams", 1, value=10**9), "1000000000 is not a stream"),
        (_put("schedule", "strategy", value=None), "strategy is not a text"),
        (_put("costs", "tasks", 0, value=1.0), "a cost is not an object"),
        (_put("costs", "tasks", 0, "us", value=-1.0), "a cost: -1.0 cannot be a time"),
        (_put("predicted_us", value="1"), "predicted_us: '1' cannot be a time"),
        (_put("predicted_us", value=10**400), "predicted_us: 1000"),
        (_put("measured_us", value=float("nan")), "measured_us: nan cannot be a time"),
        (_put("predicted_spans", 1, value=[2.0, 1.0]), "predicted_spans: a task ends before it starts"),
        (_put("measured_spans", 1, value=[2.0]), "measured_spans has 1 entries instead of 2"),
        (_put("measured_spans", 1, 0, value=math.inf), "measured_spans: inf cannot be a time"),
    ],
)
def test_a_damaged_plan_gives_a_reason(change: Callable[[dict[str, Any]], None], problem: str) -> None:
    document = plans.document(num_tasks=4)
    change(document["plan"])
    found = read(document)
    assert isinstance(found, NoTimeline)
    assert found.reason.startswith(f"its plan cannot be read: {problem}")
    assert len(found.reason) < 150


def test_a_missing_part_gives_a_reason() -> None:
    for part in ("graph", "schedule", "costs", "predicted_us"):
        document = plans.document(num_tasks=4)
        del document["plan"][part]
        assert isinstance(read(document), NoTimeline), part
