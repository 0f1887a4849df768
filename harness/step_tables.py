"""The tables of what happens within a step: what each optimization contributes, what was fused, and the plans."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from harness import formats
from harness.breakdown import StageTime
from harness.fusions import Parts, StepFusions
from harness.names import label, precision_of
from harness.phases import PHASES
from harness.rows import Comparison
from harness.selection import Case
from harness.stats import Estimate
from harness.step_phases import NoPhases, StepPhases
from harness.tables import Cell, Column, Subject, Table, variant_tone, verdict_cell
from harness.timelines import NoTimeline, Timeline

_CASE_COLUMNS = (
    Column("model", "the workload"),
    Column("batch", "samples per step", numeric=True),
    Column("device", "where it ran", needless_if_same=True),
    Column("precision", "fp32: PyTorch's defaults; amp: bfloat16 autocast"),
)


def contribution_table(comparison: Comparison) -> Table:
    """Every stage of every breakdown, those that were not measured included."""
    columns = (
        *_CASE_COLUMNS,
        Column("stage", "what is added to the last row above that was measured"),
        Column("time", "seconds per training step", numeric=True),
        Column("over eager", "speed-up over eager in the same precision", numeric=True),
        Column("over the stage before", "speed-up over the last stage above that was measured", numeric=True),
        Column("remark", "why there is no time, or what to know of it"),
    )
    rows = [
        (
            *_case_cells(breakdown.case, breakdown.precision),
            Cell(stage.added, position, detail=stage.variant),
            Cell(formats.seconds(stage.seconds), stage.seconds),
            _speedup(stage.speedup),
            _speedup(stage.gain),
            _remark(stage),
        )
        for breakdown in comparison.breakdowns
        for position, stage in enumerate(breakdown.stages)
    ]
    subjects = [
        Subject(breakdown.case, stage.variant) for breakdown in comparison.breakdowns for stage in breakdown.stages
    ]
    return Table(columns, tuple(rows), tuple(subjects))


def fused_table(fusions: StepFusions) -> Table:
    """The replaced parts of a step, one row for each template."""
    columns = (
        *_parts_columns("how many parts were replaced by it"),
        Column("won in all", "what replacing all of them saves, each by itself", numeric=True),
    )
    return Table(columns, tuple((*_parts_cells(parts), _microseconds(parts.won_us)) for parts in fusions.replaced))


def unfused_table(fusions: StepFusions) -> Table:
    """What was tried in vain, one row for each template and reason."""
    columns = (*_parts_columns("how often it was tried"), Column("reason", "why these parts were left as they are"))
    rows = ((*_parts_cells(parts), Cell(formats.one_line(parts.refusal or ""))) for parts in fusions.left)
    return Table(columns, tuple(rows))


def stream_table(comparison: Comparison) -> Table:
    """Every case and precision that was timed on one stream and by the plan that Kitsune chose."""
    columns = (
        *_CASE_COLUMNS,
        Column("in order", "seconds per training step on one stream", numeric=True),
        Column("chosen plan", "seconds per training step with the streams that Kitsune chose", numeric=True),
        Column("over one stream", "speed-up of the chosen plan, with its 95% interval", numeric=True),
        Column("verdict", "whether the whole interval lies beyond the margin"),
        Column(
            "plans", "what the rounds chose, × in how many; where they do not tell, what the profiled process chose"
        ),
    )
    rows = [
        (
            *_case_cells(entry.case, entry.precision),
            Cell(formats.seconds(entry.one_stream_seconds), entry.one_stream_seconds),
            Cell(formats.seconds(entry.chosen_seconds), entry.chosen_seconds),
            _speedup(entry.gain),
            verdict_cell(entry.verdict),
            Cell(formats.plans(entry)),
        )
        for entry in comparison.stream_gains
    ]
    return Table(columns, tuple(rows), tuple(Subject(entry.case, entry.variant) for entry in comparison.stream_gains))


def plan_table(comparison: Comparison) -> Table:
    """Every Kitsune variant with the figures of its plan, or with the reason why there is no timeline of it."""
    columns = (
        *_CASE_COLUMNS,
        Column("variant", "what was measured"),
        Column("schedule", "the strategy that made the plan, and why there is no timeline where there is none"),
        Column("tasks", "operators that run on the device in a step", numeric=True),
        Column("streams", "how many streams they run on", numeric=True),
        Column("off the first stream", "the part of the tasks' time that other streams take", numeric=True),
        Column("predicted", "the simulated time of a step on the device", numeric=True),
        Column(
            "measured",
            "the device's time of one replay, without events between its operators and without what the loop around it"
            " does",
            numeric=True,
        ),
    )
    return Table(
        columns,
        tuple(_plan_cells(entry) for entry in comparison.timelines),
        tuple(Subject(entry.case, entry.variant) for entry in comparison.timelines),
    )


def phase_table(comparison: Comparison, beside: Path | None = None) -> Table:
    """Every variant whose phases were to be told apart: how long each takes, or why that is not known.

    Args:
        beside: the folder of the page that links to the traces; None for a page of no known place, without links.
    """
    shown = [phase for phase in PHASES if any(phase in entry.seconds for entry in _divided(comparison))]
    columns = (
        *_CASE_COLUMNS,
        Column("variant", "what was measured"),
        Column("step", "the profiled step; profiling makes the host slower", numeric=True),
        *(Column(phase, _PHASE_MEANINGS[phase], numeric=True) for phase in shown),
        Column("host gap", "the device is idle, because the host has not launched its next work yet", numeric=True),
        Column("trace", "the last steps, for chrome://tracing and ui.perfetto.dev"),
        Column("remark", "what to know of it"),
    )
    return Table(
        columns,
        tuple(_phase_cells(entry, shown, beside) for entry in comparison.phases),
        tuple(Subject(entry.case, entry.variant) for entry in comparison.phases),
    )


_PHASE_MEANINGS = {
    "data": "taking the next batch, which lies on the device already",
    "forward": "the model and its loss",
    "backward": "the gradients",
    "optimizer": "zero_grad and step",
    "whole step": "of a step that runs as one thing: its parts cannot be told apart",
    "other": "the loop itself",
}


def _divided(comparison: Comparison) -> list[StepPhases]:
    return [entry for entry in comparison.phases if isinstance(entry, StepPhases)]


def _phase_cells(entry: StepPhases | NoPhases, shown: list[str], beside: Path | None) -> tuple[Cell, ...]:
    begin = (
        *_case_cells(entry.case, precision_of(entry.variant)),
        Cell(entry.variant, tone=variant_tone(entry.variant), words=label(entry.variant)),
    )
    if isinstance(entry, NoPhases):
        absent = [Cell(formats.ABSENT)] * (len(shown) + 3)
        return (*begin, *absent, Cell(f"failed: {formats.one_line(entry.reason)}"))
    gap = entry.host_gap_s
    return (
        *begin,
        Cell(formats.seconds(entry.total_s), entry.total_s),
        *(_part(entry.seconds.get(phase), entry.total_s) for phase in shown),
        _part(gap, entry.total_s),
        _trace_cell(entry, beside),
        Cell(_phase_remark(entry)),
    )


def _part(seconds: float | None, total: float) -> Cell:
    if seconds is None:
        return Cell(formats.ABSENT)
    return Cell(formats.seconds(seconds), seconds, detail=f"{seconds / total:.0%}" if total else None)


def _trace_cell(entry: StepPhases, beside: Path | None) -> Cell:
    if entry.trace is None:
        return Cell(formats.ABSENT)
    link = None if beside is None else quote(os.path.relpath(entry.trace, beside))
    below_machine = "/".join(entry.trace.parts[-3:])
    return Cell(below_machine, words=None if link is None else "open", link=link)


def _phase_remark(entry: StepPhases) -> str:
    told = [
        "one phase: the step runs as one thing" if entry.is_whole else None,
        "the host's time" if entry.host_gap_s is None else None,
        None if None in (entry.trace, entry.trace_shortened) else f"the trace has {entry.trace_shortened}",
        None if entry.trace_missing is None else f"no trace: {formats.one_line(entry.trace_missing)}",
    ]
    return "; ".join(part for part in told if part)


def _plan_cells(entry: Timeline | NoTimeline) -> tuple[Cell, ...]:
    begin = (
        *_case_cells(entry.case, precision_of(entry.variant)),
        Cell(entry.variant, tone=variant_tone(entry.variant), words=label(entry.variant)),
    )
    if isinstance(entry, NoTimeline):
        return (*begin, Cell(f"no timeline: {formats.one_line(entry.reason)}"), *[Cell(formats.ABSENT)] * 5)
    return (
        *begin,
        Cell(formats.one_line(entry.strategy)),
        Cell(f"{entry.num_tasks:,}", entry.num_tasks),
        Cell(str(entry.num_streams), entry.num_streams),
        Cell(f"{entry.off_main_share:.0%}", entry.off_main_share),
        _microseconds(entry.predicted_us),
        _microseconds(entry.measured_us),
    )


def _parts_columns(counted: str) -> tuple[Column, ...]:
    return (
        Column("template", "what is fused"),
        Column("parts", counted, numeric=True),
        Column("before", "device time of such a part by itself, the mean of those timed", numeric=True),
        Column("after", "the same of its replacement", numeric=True),
    )


def _parts_cells(parts: Parts) -> tuple[Cell, ...]:
    return (
        Cell(formats.one_line(parts.template)),
        Cell(f"{parts.num_parts:,}", parts.num_parts),
        _microseconds(parts.before_us),
        _microseconds(parts.after_us),
    )


def _speedup(estimate: Estimate | None) -> Cell:
    return Cell(formats.ratio_with_interval(estimate), None if estimate is None else estimate.ratio)


def _microseconds(value: float | None) -> Cell:
    return Cell(formats.ABSENT) if value is None else Cell(formats.seconds(value * 1e-6), value)


def _remark(stage: StageTime) -> Cell:
    if stage.missing is not None:
        return Cell(formats.one_line(stage.missing))
    return Cell("ran eagerly" if stage.mode == "eager" else "")


def _case_cells(case: Case, precision: str) -> tuple[Cell, ...]:
    return Cell(case.model), Cell(str(case.batch), case.batch), Cell(case.device), Cell(precision)
