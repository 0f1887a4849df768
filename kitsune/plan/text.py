"""A plan as text: the figures of the whole, and a table of its tasks in the order in which they are issued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kitsune.plan.fusions import Fusion

if TYPE_CHECKING:
    from kitsune.plan.plan import Plan

_ABSENT = "-"
_COLUMNS = (
    ("task", ">"), ("name", "<"), ("operator", "<"), ("stream", ">"), ("start us", ">"), ("cost us", ">"),
    ("share", ">"), ("bound", "<"), ("waits for", "<"), ("bytes", ">"), ("offset", ">"),
)  # fmt: skip
"""Headings, and to which side their cells are aligned."""

_FUSION_COLUMNS = (("fused", "<"), ("times", ">"), ("before us", ">"), ("after us", ">"), ("outcome", "<"))


def table(plan: Plan) -> str:
    """The summary and a row for each task. It ends without a newline, as do its lines without spaces.

    The start is the predicted one. Bytes are those of the values that the task allocates, the
    offsets their places in the arena, in the same order. Where fusion was tried, another table tells what it won.
    """
    parts = [[summary(plan)], _aligned(_rows(plan), _COLUMNS)]
    if plan.fusions:
        parts.append(_aligned(_fusion_rows(plan.fusions), _FUSION_COLUMNS))
    return "\n\n".join("\n".join(lines) for lines in parts)


def summary(plan: Plan) -> str:
    """The figures of the whole plan, a line each."""
    schedule, memory = plan.schedule, plan.memory
    figures = (
        ("predicted", f"{plan.predicted_us:.2f} us, of {plan.costs.source} costs"),
        ("measured", "not measured" if plan.measured_us is None else f"{plan.measured_us:.2f} us"),
        ("waits", f"{len(schedule.waits)}"),
        ("off stream 0", f"{100 * share_off_main_stream(plan):.1f}% of the tasks' time"),
        ("arena", f"{memory.arena_bytes:,} bytes, for {_placed(plan):.0%} of the bytes that tasks make"),
        ("values", f"{memory.live_bytes:,} bytes alive at once at most"),
        *((("fusion", _fused(plan.fusions)),) if plan.fusions else ()),
    )
    counts = f"{_counted(len(plan.graph.tasks), 'task')} on {_counted(schedule.num_streams, 'stream')}"
    width = max(len(name) for name, _ in figures)
    return "\n".join(
        [f"Plan: {counts}, {_printable(schedule.strategy)}", *(f"  {name:<{width}}  {text}" for name, text in figures)]
    )


def share_off_main_stream(plan: Plan) -> float:
    """The part, from 0 to 1, of the tasks' summed costs that runs on other streams than stream 0."""
    total = sum(cost.us for cost in plan.costs.tasks)
    away = sum(cost.us for cost, stream in zip(plan.costs.tasks, plan.schedule.streams, strict=True) if stream)
    return away / total if total else 0.0


def _placed(plan: Plan) -> float:
    """The part, from 0 to 1, of the bytes that tasks allocate for which the plan has a place."""
    total = sum(value.num_bytes for value in plan.graph.values)
    placed = zip(plan.graph.values, plan.memory.offsets, strict=True)
    return sum(value.num_bytes for value, offset in placed if offset is not None) / total if total else 0.0


def _fused(fusions: Sequence[Fusion]) -> str:
    done = [fusion for fusion in fusions if fusion.refusal is None]
    won_us = sum(fusion.won_us for fusion in done)
    return f"{len(done)} parts of the graph, which by themselves take {won_us:.2f} us less"


def _fusion_rows(fusions: Sequence[Fusion]) -> list[Sequence[str]]:
    """A row for all parts of one kind with the same outcome, with their mean times."""
    alike: dict[tuple[str, str], list[Fusion]] = {}
    for fusion in fusions:
        alike.setdefault((fusion.template, fusion.refusal or "replaced"), []).append(fusion)
    rows: list[Sequence[str]] = [tuple(heading for heading, _ in _FUSION_COLUMNS)]
    for (template, outcome), group in alike.items():
        before, after = (_mean(times) for times in ([one.before_us for one in group], [one.after_us for one in group]))
        rows.append((_printable(template), f"{len(group)}", before, after, _printable(outcome)))
    return rows


def _mean(times: Sequence[float | None]) -> str:
    known = [us for us in times if us is not None]
    return f"{sum(known) / len(known):.2f}" if known else _ABSENT


def _aligned(rows: Sequence[Sequence[str]], columns: Sequence[tuple[str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, (_, side), width in zip(row, columns, widths, strict=True)).rstrip()
        for row in rows
    ]


def _rows(plan: Plan) -> list[Sequence[str]]:
    awaited: dict[int, list[int]] = {}
    for wait in plan.schedule.waits:
        awaited.setdefault(wait.later, []).append(wait.earlier)
    allocated: dict[int, list[int]] = {}
    for value in plan.graph.values:
        allocated.setdefault(value.producer, []).append(value.index)
    rows: list[Sequence[str]] = [tuple(heading for heading, _ in _COLUMNS)]
    for index in plan.schedule.order:
        rows.append(_row(plan, index, awaited.get(index, ()), allocated.get(index, ())))
    return rows


def _row(plan: Plan, index: int, awaited: Sequence[int], allocated: Sequence[int]) -> Sequence[str]:
    task, cost = plan.graph.tasks[index], plan.costs.tasks[index]
    num_bytes = sum(plan.graph.values[value].num_bytes for value in allocated)
    offsets = [plan.memory.offsets[value] for value in allocated]
    return (
        f"{index}",
        _printable(task.name),
        _printable(task.operator),
        f"{plan.schedule.streams[index]}",
        _ABSENT if plan.predicted_spans is None else f"{plan.predicted_spans[index][0]:.2f}",
        f"{cost.us:.2f}",
        f"{cost.share:.2f}",
        cost.bound,
        ", ".join(map(str, awaited)) or _ABSENT,
        f"{num_bytes:,}" if allocated else _ABSENT,
        ", ".join(_ABSENT if offset is None else f"{offset}" for offset in offsets) or _ABSENT,
    )


def _printable(text: str) -> str:
    """The text without what would break a line of the table."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
