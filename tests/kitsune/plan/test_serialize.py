import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kitsune.plan import Plan, Wait
from kitsune.plan.serialize import VERSION
from tests.kitsune.plan import plans


@given(plans.plans())
def test_a_plan_comes_back_exactly(plan: Plan) -> None:
    document = plan.to_json()
    again = Plan.from_json(document)
    assert again == plan
    assert repr(again) == repr(plan), "equal numbers may differ in type or sign"
    assert again.to_json() == document


def test_the_form_of_the_text() -> None:
    """A golden file of the parts whose change would be a new version."""
    document = json.loads(plans.small().to_json())
    plan = document.pop("plan")
    assert document == {"format": "kitsune plan", "version": 2}
    assert plan["graph"]["tasks"][2] == {
        "index": 2, "name": "mm", "operator": "aten.mm.default", "nodes": ["permute", "mm"],
        "after": [{"task": 1, "kind": "true"}],
    }  # fmt: skip
    assert plan["graph"]["values"][3] == {
        "index": 3, "name": "sum_1", "num_bytes": 64, "producer": 3, "users": [4], "is_output": True,
    }  # fmt: skip
    assert plan["schedule"] == {
        "strategy": "list", "order": [0, 1, 3, 2, 4], "streams": [0, 0, 0, 1, 0],
        "waits": [{"later": 3, "earlier": 1}, {"later": 4, "earlier": 3}],
    }  # fmt: skip
    assert plan["memory"] == {"offsets": [0, 4096, 8192, 0], "arena_bytes": 24576, "live_bytes": 20544}
    assert plan["costs"]["tasks"][0] == {"us": 3.5, "share": 0.5, "bound": "compute"}
    assert {name: plan["costs"][name] for name in ("launch_us", "sync_us", "source")} == {
        "launch_us": 0.5, "sync_us": 1.0, "source": "measured",
    }  # fmt: skip
    assert sorted(plan) == [
        "costs", "fusions", "graph", "measured_spans", "measured_us", "memory", "predicted_spans", "predicted_us",
        "schedule",
    ]  # fmt: skip
    assert plan["predicted_spans"][0] == [0.0, 3.5]


def test_whole_numbers_become_floats() -> None:
    plan = replace(plans.small(), predicted_us=16)
    assert repr(Plan.from_json(plan.to_json()).predicted_us) == "16.0"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_not_written(number: float) -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        replace(plans.small(), predicted_us=number).to_json()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("null", "format 'kitsune plan'"),
        ('{"format": "another"}', "format 'kitsune plan'"),
        ('{"format": "kitsune plan"}', f"version None; this Kitsune reads version {VERSION}"),
        ('{"format": "kitsune plan", "version": 1, "plan": {}}', f"version 1; this Kitsune reads version {VERSION}"),
        ('{"format": "kitsune plan", "version": true, "plan": {}}', "version True"),
        ('{"format": "kitsune plan", "version": 2}', "plan: expected an object that describes a Plan, got None"),
        ('{"format": "kitsune plan", "version": 2, "plan": {}}', "plan: expected the fields graph, schedule"),
    ],
)
def test_text_that_is_no_plan(document: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Plan.from_json(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("predicted_us", "16", "plan.predicted_us: expected a number, got '16'"),
        ("predicted_us", True, "plan.predicted_us: expected a number, got True"),
        ("predicted_us", None, "plan.predicted_us: expected a number, got None"),
        ("predicted_us", 10**400, "plan.predicted_us: expected a finite number"),
        ("schedule.order", None, "plan.schedule.order: expected an array"),
        ("schedule.order.1", 1.0, "plan.schedule.order[1]: expected a value of type int, got 1.0"),
        ("schedule.order.1", False, "plan.schedule.order[1]: expected a value of type int, got False"),
        ("schedule.strategy", 3, "plan.schedule.strategy: expected a value of type str"),
        ("schedule.waits.0", [3, 1], "plan.schedule.waits[0]: expected an object that describes a Wait"),
        ("schedule.extra", 1, "plan.schedule: expected the fields strategy, order, streams, waits"),
        ("costs.tasks.0.bound", "luck", "expected 'memory' or 'compute' or 'latency', got 'luck'"),
        ("costs.source", [], "plan.costs.source: expected 'measured' or 'analytic', got []"),
        ("predicted_spans.1", [1.0], "plan.predicted_spans[1]: expected an array of 2"),
        ("graph.values.3.is_output", 1, "plan.graph.values[3].is_output: expected a value of type bool"),
    ],
)
def test_damaged_fields_are_named(path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match="not a plan: ") as caught:
        Plan.from_json(plans.changed(path, value))
    assert message in str(caught.value)


@given(plans.plans(), st.data())
def test_cut_text_is_refused(plan: Plan, data: st.DataObject) -> None:
    document = plan.to_json()
    with pytest.raises(ValueError, match="not valid JSON"):
        Plan.from_json(document[: data.draw(st.integers(0, len(document) - 1))])


@given(plans.plans(), st.data())
def test_a_changed_character_is_refused_or_gives_a_plan_that_can_be_shown(plan: Plan, data: st.DataObject) -> None:
    document = plan.to_json()
    place = data.draw(st.integers(0, len(document) - 1))
    character = data.draw(st.sampled_from('0123456789-.e"[]{},:ntu'))
    assume(document[place] != character)
    try:
        changed = Plan.from_json(document[:place] + character + document[place + 1 :])
    except ValueError:
        return
    assert changed.schedule.clocks is not None
    assert str(changed)
    assert changed.to_dot()


def test_equal_plans_have_equal_text_and_others_differ() -> None:
    plan = plans.small()
    other = replace(plan, schedule=replace(plan.schedule, waits=(Wait(3, 1),)))
    assert plan.to_json() == plans.small().to_json()
    assert other.to_json() != plan.to_json()
