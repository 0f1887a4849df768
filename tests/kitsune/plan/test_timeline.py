"""A trace is judged by the rules of the Trace Event Format, by a checker that knows nothing of plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Plan, timeline
from tests.kitsune.plan import plans

Event = dict[str, Any]


def broken_rule(document: dict[str, Any]) -> str | None:
    """The first rule that `document` breaks, of the format or of how viewers read it; None if it keeps all."""
    events: list[Event] = document["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    if [event["ts"] for event in timed] != sorted(event["ts"] for event in timed):
        return "events are not ascending"
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    if {(event["pid"], event["tid"]) for event in timed} - named:
        return "a thread has no name"
    if any(not isinstance(event[key], int) or event[key] < 1 for event in timed for key in ("pid", "tid")):
        return "an identifier is not a whole number from 1"
    for thread in named:
        slices = [event for event in timed if event["ph"] == "X" and (event["pid"], event["tid"]) == thread]
        for index, event in enumerate(slices):
            if _ns(event["dur"]) < 0:
                return "a duration is negative"
            if any(_end(other) > _ns(event["ts"]) for other in slices[:index]):
                return "slices overlap"
    return _broken_flow(timed)


def _broken_flow(timed: list[Event]) -> str | None:
    tails = [event for event in timed if event["ph"] == "s"]
    heads = [event for event in timed if event["ph"] == "f"]
    keys = [(event["cat"], event["name"], event["id"]) for event in tails]
    if len(set(keys)) < len(keys) or sorted(keys) != sorted((head["cat"], head["name"], head["id"]) for head in heads):
        return "flows are not pairs"
    for tail in tails:
        head = next(head for head in heads if head["id"] == tail["id"])
        if _ns(tail["ts"]) > _ns(head["ts"]) or head.get("bp") != "e":
            return "a flow ends before it begins, or not in the slice around it"
        if not _enclosing(timed, tail) or not _enclosing(timed, head):
            return "a flow is in no slice"
    return None


def _enclosing(timed: list[Event], flow: Event) -> list[Event]:
    """The slices in which a flow event lies; a slice without duration is a point."""
    at = _ns(flow["ts"])
    return [
        event
        for event in timed
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
        if _ns(event["ts"]) <= at < max(_end(event), _ns(event["ts"]) + 1)
    ]


def _ns(us: float) -> int:
    return round(1000 * us)


def _end(event: Event) -> int:
    return _ns(event["ts"]) + _ns(event["dur"])


@given(plans.plans(), st.lists(st.floats(0, 1e6), min_size=16, max_size=16))
def test_every_trace_keeps_the_rules_and_shows_every_task(plan: Plan, numbers: list[float]) -> None:
    if plan.predicted_spans is None and plan.measured_spans is None:
        plan = replace(plan, measured_spans=plans.spans(plan.schedule, numbers))
    document = json.loads(json.dumps(timeline.trace(plan), allow_nan=False))
    assert broken_rule(document) is None
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for pid, spans in ((1, plan.predicted_spans), (2, plan.measured_spans)):
        shown = {event["args"]["task"]: event for event in slices if event["pid"] == pid}
        assert sorted(shown) == (list(range(len(spans))) if spans is not None else [])
        for task, (start, end) in enumerate(spans or ()):
            assert _ns(shown[task]["ts"]) == _ns(start)
            assert _end(shown[task]) == _ns(end)
            assert shown[task]["tid"] == plan.schedule.streams[task] + 1
            assert shown[task]["args"]["operator"] == plan.graph.tasks[task].operator


@given(plans.plans(), st.lists(st.floats(0.01, 1e3), min_size=16, max_size=16))
def test_arrows_join_the_tasks_of_the_waits(plan: Plan, numbers: list[float]) -> None:
    plan = replace(plan, predicted_spans=plans.spans(plan.schedule, numbers))
    events = timeline.trace(plan)["traceEvents"]
    assert isinstance(events, list)
    flows = {event["id"]: [] for event in events if event["ph"] == "s" and event["pid"] == 1}
    for event in events:
        if event["ph"] in "sf" and event["pid"] == 1:
            (task,) = _enclosing(events, event)
            flows[event["id"]].append(task["args"]["task"])
    assert sorted(flows.values()) == sorted([wait.earlier, wait.later] for wait in plan.schedule.waits)


def test_the_written_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    plans.small().timeline(str(path))
    document = json.loads(path.read_text())
    assert [event["args"]["name"] for event in document["traceEvents"] if event["name"].endswith("_name")] == [
        "predicted", "stream 0", "stream 1", "measured", "stream 0", "stream 1",
    ]  # fmt: skip
    (backward,) = [event for event in document["traceEvents"] if event["name"] == "mm" and event["pid"] == 2]
    assert backward == {
        "ph": "X", "name": "mm", "cat": "task", "ts": 7.0, "dur": 4.5, "pid": 2, "tid": 1,
        "args": {"task": 2, "operator": "aten.mm.default", "cost_us": 4.25, "share": 1.0, "bound": "latency"},
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        plans.small().timeline(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_times_there_is_no_timeline(tmp_path: Path) -> None:
    plan = replace(plans.small(), predicted_spans=None, measured_spans=None)
    with pytest.raises(ValueError, match="neither predicted nor measured"):
        plan.timeline(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_contradictions_within_the_clocks_resolution_are_cut() -> None:
    """Task 3 seems to end after task 4, which waits for it, and task 1 begins before task 0 has ended."""
    spans = ((0.0, 4.25), (4.0, 6.5), (7.0, 11.5), (8.0, 12.5), (12.25, 12.375))
    document = timeline.trace(replace(plans.small(), measured_spans=spans))
    assert broken_rule(document) is None
    events = document["traceEvents"]
    assert isinstance(events, list)
    shown = {event["args"]["task"]: event for event in events if event["ph"] == "X" and event["pid"] == 2}
    assert (shown[1]["ts"], shown[1]["dur"]) == (4.25, 2.25)
    assert (shown[4]["ts"], shown[4]["dur"]) == (12.5, 0.0)


@pytest.mark.parametrize(
    ("task", "span", "message"),
    [
        (1, (2.0, 6.0), "predicted times: task 1 starts before the end of task 0, which precedes it"),
        (4, (11.25, 11.0), "predicted times: task 4 ends before it starts"),
        (3, (4.5, 10.0), "predicted times: task 3 starts before the end of task 1"),
    ],
)
def test_times_that_contradict_the_schedule_are_refused(task: int, span: tuple[float, float], message: str) -> None:
    plan = plans.small()
    assert plan.predicted_spans is not None
    spans = (*plan.predicted_spans[:task], span, *plan.predicted_spans[task + 1 :])
    with pytest.raises(ValueError, match=message):
        timeline.trace(replace(plan, predicted_spans=spans))


def test_too_few_times_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tasks, but measured times of 1"):
        timeline.trace(replace(plans.small(), measured_spans=((0.0, 1.0),)))


@pytest.mark.parametrize(
    ("phase", "change", "rule"),
    [
        ("X", {"dur": 1000.0}, "slices overlap"),
        ("X", {"dur": -1.0}, "a duration is negative"),
        ("X", {"tid": 9}, "a thread has no name"),
        ("X", {"ts": 1e6}, "events are not ascending"),
        ("s", {"id": 77}, "flows are not pairs"),
        ("f", {"bp": "n"}, "a flow ends before it begins, or not in the slice around it"),
        ("s", {"tid": 2}, "a flow is in no slice"),
    ],
)
def test_the_checker_finds_what_is_broken(phase: str, change: Event, rule: str) -> None:
    document = json.loads(json.dumps(timeline.trace(plans.small())))
    next(event for event in document["traceEvents"] if event["ph"] == phase).update(change)
    assert broken_rule(document) == rule
