"""What ran when within a step: read from the plan that Kitsune's status holds, for a chart of it.

A variant without one gets the reason instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.operators import Kind, kind_of
from harness.plan_fields import DamageError, as_list, as_object, as_text, as_us, part, plan_of
from harness.selection import Case

MOST_TASKS = 2000
"""A plan of more tasks is thinned out to its longest ones, so that the report stays small."""

_DECIMALS = 3  # nanoseconds


@dataclass(frozen=True)
class Bar:
    """A task of a step. Times are microseconds since the step began."""

    name: str
    operator: str
    kind: Kind
    stream: int
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Timeline:
    """A step of a variant as it was predicted and as it was measured, either of them empty where it is not known.

    ``num_tasks`` counts all tasks; ``shown_tasks`` are in the bars. ``off_main_share`` is the part of the tasks' time
    that streams other than the first take.
    """

    case: Case
    variant: str
    strategy: str
    num_tasks: int
    shown_tasks: int
    num_streams: int
    off_main_share: float
    predicted_us: float
    measured_us: float | None
    predicted: tuple[Bar, ...]
    measured: tuple[Bar, ...]


@dataclass(frozen=True)
class NoTimeline:
    """A Kitsune variant that was measured, but whose step cannot be shown, and why."""

    case: Case
    variant: str
    reason: str


def timeline(case: Case, variant: str, status: Mapping[str, object] | None) -> Timeline | NoTimeline:
    """The timeline in a Kitsune variant's status, of which the key ``plan`` holds the plan as decoded JSON."""
    if status is None:
        return NoTimeline(case, variant, "no profile of it was measured")
    if status.get("plan") is None:
        mode = status.get("mode")
        told = "its status holds no plan" if mode == "replay" else f"its status holds no plan: its mode was {mode!s}"
        return NoTimeline(case, variant, told)
    try:
        plan, _ = plan_of(status)
        found = _timeline(case, variant, plan)
    except DamageError as error:
        return NoTimeline(case, variant, f"its plan cannot be read: {error}")
    if not found.predicted and not found.measured:
        return NoTimeline(case, variant, "its plan holds no times of tasks")
    return found


def _timeline(case: Case, variant: str, plan: Mapping[str, object]) -> Timeline:
    tasks = [_task(entry, index) for index, entry in enumerate(as_list(part(plan, "graph").get("tasks"), "tasks"))]
    schedule = part(plan, "schedule")
    streams = [_stream(entry, len(tasks)) for entry in as_list(schedule.get("streams"), "streams", len(tasks))]
    costs = [
        as_us(as_object(entry, "a cost").get("us"), "a cost")
        for entry in as_list(part(plan, "costs").get("tasks"), "costs", len(tasks))
    ]
    predicted = _spans(plan.get("predicted_spans"), "predicted_spans", len(tasks))
    measured = _spans(plan.get("measured_spans"), "measured_spans", len(tasks))
    kept = _longest(measured or predicted)
    away = math.fsum(cost for cost, stream in zip(costs, streams, strict=True) if stream)
    return Timeline(
        case=case,
        variant=variant,
        strategy=as_text(schedule.get("strategy"), "strategy"),
        num_tasks=len(tasks),
        shown_tasks=len(kept),
        num_streams=max(streams, default=0) + 1,
        off_main_share=away / math.fsum(costs) if away else 0.0,
        predicted_us=as_us(plan.get("predicted_us"), "predicted_us"),
        measured_us=None if plan.get("measured_us") is None else as_us(plan["measured_us"], "measured_us"),
        predicted=_bars(tasks, streams, predicted, kept),
        measured=_bars(tasks, streams, measured, kept),
    )


def _longest(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The tasks that are shown, ascending."""
    by_length = sorted(range(len(spans)), key=lambda task: spans[task][0] - spans[task][1])
    return sorted(by_length[:MOST_TASKS])


def _bars(
    tasks: Sequence[tuple[str, str]],
    streams: Sequence[int],
    spans: Sequence[tuple[float, float]],
    kept: Sequence[int],
) -> tuple[Bar, ...]:
    if not spans:
        return ()
    return tuple(
        Bar(
            *tasks[task],
            kind=kind_of(tasks[task][1]),
            stream=streams[task],
            start_us=round(spans[task][0], _DECIMALS),
            duration_us=round(spans[task][1] - spans[task][0], _DECIMALS),
        )
        for task in kept
    )


def _task(entry: object, index: int) -> tuple[str, str]:
    fields = as_object(entry, f"task {index}")
    return as_text(fields.get("name"), "a name"), as_text(fields.get("operator"), "an operator")


def _stream(value: object, num_tasks: int) -> int:
    if type(value) is not int or not 0 <= value < num_tasks:
        raise DamageError(f"{value!r:.60} is not a stream")
    return value


def _spans(value: object, where: str, num_tasks: int) -> list[tuple[float, float]]:
    """Start and end of each task; empty where there are none."""
    if value is None:
        return []
    spans = []
    for entry in as_list(value, where, num_tasks):
        start, end = (as_us(time, where) for time in as_list(entry, where, 2))
        if end < start:
            raise DamageError(f"{where}: a task ends before it starts")
        spans.append((start, end))
    return spans
