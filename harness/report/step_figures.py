"""The charts of what happens within a step: what each optimization and several streams contribute, its phases, and
what runs when on which stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import formats
from harness.breakdown import Breakdown, Stage, StageTime
from harness.names import is_diagnostic, is_product, label, order, precision_of
from harness.operators import Kind
from harness.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES, WHOLE
from harness.report import style
from harness.report.figures import Figure
from harness.report.style import Spec
from harness.rows import Comparison
from harness.selection import Case
from harness.step_phases import StepPhases
from harness.stream_gains import StreamGain, largest_gain
from harness.timelines import Bar, Timeline

_SHARE_FOR_TEXT = 0.5
"""How much of a chart of contributions is kept for what is written at the bars' ends."""

_COLOURS = {
    Kind.PRODUCT: "#0055a4",
    Kind.NORMALIZATION: "#009988",
    Kind.ELEMENTWISE: "#e0a100",
    Kind.OPTIMIZER: "#aa3377",
    Kind.COPY: "#8c564b",
    Kind.OTHER: "#7d838c",
}
_PALE = 0.5

_HOST_GAP = "host gap"
_PHASE_COLOURS = {
    DATA: "#009988",
    FORWARD: "#0055a4",
    BACKWARD: "#e0a100",
    OPTIMIZER: "#aa3377",
    WHOLE: "#4a9fd8",
    OTHER: "#7d838c",
}
_SHARE_FOR_TOTAL = 0.3
"""How much of a chart of phases is kept for what is written at the bars' ends."""

_PRECISION_MARKS = {"fp32": ("#0055a4", "circle"), "amp": ("#d9540b", "diamond")}
"""Colour and symbol of a precision, where one variant is shown in several."""


def contributions(comparison: Comparison) -> list[Figure]:
    """Bars for each case and measured precision: the time of a step with one optimization after the other added.

    Stages that were not measured anywhere are left out.
    """
    timed = {stage.stage for part in comparison.breakdowns for stage in part.stages if stage.seconds is not None}
    measured = [
        replace(part, stages=tuple(stage for stage in part.stages if stage.stage in timed))
        for part in comparison.breakdowns
        if any(stage.seconds is not None for stage in part.stages)
    ]
    figures = []
    for index, case in enumerate(comparison.cases):
        members = [breakdown for breakdown in measured if breakdown.case == case]
        if members:
            figures.append(_contributions(f"contribution-{index}", case, members))
    return figures


def stream_gains(comparison: Comparison) -> list[Figure]:
    """Lines for each model over its batch sizes: the speed-up of the chosen plan over one stream, with its interval."""
    models: dict[tuple[str, str], list[StreamGain]] = {}
    for gain in comparison.stream_gains:
        models.setdefault((gain.case.model, gain.case.device), []).append(gain)
    return [
        _stream_gains(f"batches-{index}", subject, gains, comparison.margin)
        for index, (subject, gains) in enumerate(models.items())
    ]


def phases(comparison: Comparison) -> list[Figure]:
    """For each case a bar for each variant whose phases were told apart: one phase after the other, then the gap."""
    known = [entry for entry in comparison.phases if isinstance(entry, StepPhases) and not is_diagnostic(entry.variant)]
    return [
        _phases(f"phases-{index}", case, [entry for entry in known if entry.case == case])
        for index, case in enumerate(dict.fromkeys(entry.case for entry in known))
    ]


def timelines(comparison: Comparison) -> list[Figure]:
    """For each of Kitsune's forms whose plan holds times, the tasks of a step over time, with rows for the streams."""
    known = [entry for entry in comparison.timelines if isinstance(entry, Timeline) and is_product(entry.variant)]
    return [_timeline(f"streams-{index}", entry) for index, entry in enumerate(known)]


def _contributions(name: str, case: Case, breakdowns: Sequence[Breakdown]) -> Figure:
    entries = [(_row_name(stage, part.precision), stage) for part in breakdowns for stage in part.stages]
    rows = [row for row, _ in entries]
    bare: Spec = {"showticklabels": False, "showgrid": False, "zeroline": False, "fixedrange": True}
    layout = style.layout(
        xaxis=bare | {"rangemode": "tozero", "domain": [0, 1 - _SHARE_FOR_TEXT]},
        yaxis=style.name_axis(rows) | {"showgrid": False},
        shapes=style.lines_between_precisions([stage.variant for _, stage in entries]),
    )
    layout["margin"] = {"l": 8, "r": 8, "t": 6, "b": 8}
    bars: Spec = {
        "type": "bar", "orientation": "h", "x": [stage.seconds or 0 for _, stage in entries], "y": rows, "width": 0.66,
        "marker": {"color": [style.colour(stage.variant) for _, stage in entries]},
        "text": [_written(stage) for _, stage in entries], "textposition": "outside", "textangle": 0,
        "cliponaxis": False, "textfont": {"size": 11, "color": style.INK}, "hoverinfo": "text",
        "hovertext": [_explained(stage) for _, stage in entries],
    }  # fmt: skip
    narrow: Spec = {"offset": 0.06, "width": 0.4}
    return Figure(name, case, [bars], style.height(rows, layout), narrow, style.names_above_rows(rows))


def _row_name(stage: StageTime, precision: str) -> str:
    plus = "" if stage.stage is Stage.EAGER else "+ "
    return style.shown(f"{plus}{stage.added} · {precision}")


def _written(stage: StageTime) -> str:
    if stage.seconds is None:
        return "not measured"
    gain = None if stage.gain is None else f"{formats.ratio(stage.gain.ratio)}×"
    told = [formats.seconds(stage.seconds), gain, "ran eagerly" if stage.mode == "eager" else None]
    return ", ".join(part for part in told if part)


def _explained(stage: StageTime) -> str:
    lines = [f"<b>{style.variant_name(stage.variant)}</b>"]
    if stage.missing is not None:
        return "<br>".join([*lines, style.shown(formats.one_line(stage.missing))])
    lines.append(f"{formats.seconds(stage.seconds)} per step")
    if stage.speedup is not None:
        lines.append(f"{formats.ratio_with_interval(stage.speedup)} × as fast as eager")
    if stage.gain is not None:
        lines.append(f"{formats.ratio_with_interval(stage.gain)} × as fast as the stage before")
    return "<br>".join(lines)


def _stream_gains(name: str, subject: tuple[str, str], gains: Sequence[StreamGain], margin: float) -> Figure:
    variants = sorted({gain.variant for gain in gains}, key=order)
    layout = style.layout(
        xaxis=style.batch_axis(gain.case.batch for gain in gains),
        yaxis=style.speedup_axis([gain.gain for gain in gains]),
        shapes=[style.band_around_one("y", margin), style.line_at_one("y")],
        legend=True,
    )
    traces = [_gain_line(variant, [gain for gain in gains if gain.variant == variant]) for variant in variants]
    layout |= style.legend(variants, columns=len(variants)) | {"scattermode": "group", "scattergap": 0.8}
    return Figure(name, subject, traces, layout, remark=_where_gains_end(gains))


def _where_gains_end(gains: Sequence[StreamGain]) -> str:
    """For each precision with several batch sizes, the largest at which streams gain; empty without any."""
    told = []
    for precision in dict.fromkeys(gain.precision for gain in gains):
        members = [gain for gain in gains if gain.precision == precision]
        end, most = largest_gain(members), max(gain.case.batch for gain in members)
        if len(members) < 2:
            continue
        told.append(f"{precision} {'nowhere faster' if end is None else f'faster up to batch {end} of {most}'}")
    return f" ({', '.join(told)})" if told else ""


def _gain_line(variant: str, gains: Sequence[StreamGain]) -> Spec:
    estimates = [gain.gain for gain in gains]
    colour, symbol = _PRECISION_MARKS[precision_of(variant)]
    symbols = [symbol + ("" if estimate.has_interval else "-open") for estimate in estimates]
    return {
        "type": "scatter", "mode": "lines+markers", "name": style.shown(precision_of(variant)), "showlegend": True,
        "x": [str(gain.case.batch) for gain in gains], "y": [estimate.ratio for estimate in estimates],
        "line": {"color": colour, "width": 2, "dash": style.dash(variant)},
        "marker": {"size": 10, "symbol": symbols}, "error_y": style.whiskers(estimates, colour),
        "hoverinfo": "text", "hovertext": [_gained(gain) for gain in gains],
    }  # fmt: skip


def _gained(gain: StreamGain) -> str:
    lines = [
        f"<b>{style.shown(gain.precision)}, batch {gain.case.batch}</b>",
        f"{formats.ratio_with_interval(gain.gain)} × as fast as on one stream: {gain.verdict.value}",
        f"{formats.seconds(gain.one_stream_seconds)} on one stream, {formats.seconds(gain.chosen_seconds)} as chosen",
    ]
    if (plans := formats.plans(gain)) != formats.ABSENT:
        lines.append(style.shown(plans))
    return "<br>".join(lines)


def _phases(name: str, case: Case, entries: Sequence[StepPhases]) -> Figure:
    variants = [entry.variant for entry in entries]
    bare: Spec = {"showticklabels": False, "showgrid": False, "zeroline": False, "fixedrange": True}
    layout = style.layout(
        xaxis=bare | {"rangemode": "tozero", "domain": [0, 1 - _SHARE_FOR_TOTAL]},
        yaxis=style.variant_axis(variants) | {"showgrid": False},
        shapes=style.lines_between_precisions(variants),
        legend=True,
    )
    present = [phase for phase in PHASES if any(phase in entry.seconds for entry in entries)]
    traces = [_phase_bars(phase, _PHASE_COLOURS[phase], entries) for phase in present]
    if any(entry.host_gap_s is not None for entry in entries):
        gap = _phase_bars(_HOST_GAP, style.HOVER_LINE, entries)
        gap["marker"] = {"color": style.HOVER_LINE, "pattern": {"shape": "/", "size": 6, "fgcolor": style.INK}}
        traces.append(gap)
    traces.append(_phase_totals(entries))
    layout |= {"barmode": "stack", "height": 80 + 25 * len(variants)}
    layout["legend"] = {
        "orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0, "font": {"size": 11},
        "traceorder": "normal",
    }  # fmt: skip
    layout["margin"] = {"l": 8, "r": 8, "t": 44, "b": 8}
    names = style.names_above_rows([style.variant_name(variant) for variant in variants])
    narrow = names | {"height": 110 + 40 * len(variants), "margin.t": 72}
    return Figure(name, case, traces, layout, {"offset": 0.06, "width": 0.4}, narrow)


def _phase_bars(phase: str, colour: str, entries: Sequence[StepPhases]) -> Spec:
    times = [entry.host_gap_s if phase == _HOST_GAP else entry.seconds.get(phase) for entry in entries]
    return {
        "type": "bar", "orientation": "h", "name": phase, "x": [seconds or 0 for seconds in times],
        "y": [style.variant_name(entry.variant) for entry in entries], "width": 0.66, "marker": {"color": colour},
        "hoverinfo": "text",
        "hovertext": [_phase_hover(phase, seconds, entry) for seconds, entry in zip(times, entries, strict=True)],
    }  # fmt: skip


def _phase_hover(phase: str, seconds: float | None, entry: StepPhases) -> str:
    share = "" if not seconds else f", {seconds / entry.total_s:.0%} of the step"
    return f"<b>{style.variant_name(entry.variant)}</b><br>{phase}: {formats.seconds(seconds or 0.0)}{share}"


def _phase_totals(entries: Sequence[StepPhases]) -> Spec:
    """Bars without length behind the others, for what is written at their ends."""
    texts = []
    for entry in entries:
        gap = entry.host_gap_s
        told = "" if gap is None or not entry.total_s else f", {gap / entry.total_s:.0%} gap"
        texts.append(f"{formats.seconds(entry.total_s)}{told}")
    return {
        "type": "bar", "orientation": "h", "x": [0] * len(entries), "width": 0.66, "hoverinfo": "skip",
        "y": [style.variant_name(entry.variant) for entry in entries], "showlegend": False,
        "text": texts, "textposition": "outside", "textangle": 0, "cliponaxis": False,
        "textfont": {"size": 11, "color": style.INK},
    }  # fmt: skip


def _timeline(name: str, timeline: Timeline) -> Figure:
    sides = [
        (side, bars) for side, bars in (("predicted", timeline.predicted), ("measured", timeline.measured)) if bars
    ]
    rows = [f"stream {stream} {side}" for stream in range(timeline.num_streams) for side, _ in sides]
    kinds = [kind for kind in Kind if any(bar.kind is kind for _, bars in sides for bar in bars)]
    traces = [
        _bars(kind, side, [bar for bar in bars if bar.kind is kind])
        | {"showlegend": side == sides[-1][0], "opacity": _PALE if side == "predicted" and len(sides) > 1 else 1}
        for kind in kinds
        for side, bars in sides
    ]
    time: Spec = {
        "title": {"text": "µs since the step began", "standoff": 4}, "rangemode": "tozero", "automargin": True,
        "gridcolor": style.GRID, "zeroline": False,
    }  # fmt: skip
    layout = style.layout(
        xaxis=time,
        yaxis=style.name_axis(rows) | {"showgrid": False},
        legend=True,
        shapes=_lines_between(rows, len(sides)),
    )
    layout |= {"height": 120 + 30 * len(rows), "dragmode": "zoom"}
    layout["legend"] = {
        "orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0, "font": {"size": 11},
        "itemclick": "toggle",
    }  # fmt: skip
    layout["margin"] = {"l": 8, "r": 14, "t": 40, "b": 44}
    narrow = style.names_above_rows(rows) | {
        "height": 190 + 46 * len(rows), "dragmode": False, "margin.t": 96, "xaxis.fixedrange": True,
    }  # fmt: skip
    thin: Spec = {"offset": 0.02, "width": 0.4}
    return Figure(name, timeline.case, traces, layout, thin, narrow, is_wide=True, remark=_remark(timeline))


def _bars(kind: Kind, side: str, bars: Sequence[Bar]) -> Spec:
    return {
        "type": "bar", "orientation": "h", "name": kind.value, "legendgroup": kind.name,
        "base": [bar.start_us for bar in bars], "x": [bar.duration_us for bar in bars],
        "y": [f"stream {bar.stream} {side}" for bar in bars], "width": 0.8,
        "marker": {"color": _COLOURS[kind], "line": {"width": 0.5, "color": "#ffffff"}},
        "hoverinfo": "text", "hovertext": [_hover(bar) for bar in bars],
    }  # fmt: skip


def _hover(bar: Bar) -> str:
    times = f"{bar.duration_us:g} µs, from {bar.start_us:g} µs"
    return f"<b>{style.shown(bar.operator)}</b><br>{style.shown(bar.name)}<br>{times}"


def _lines_between(rows: Sequence[str], num_sides: int) -> list[Spec]:
    """Lines across the chart wherever the stream changes."""
    return [
        {
            "type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": index - 0.5, "y1": index - 0.5,
            "line": {"color": style.GRID, "width": 1}, "layer": "below",
        }
        for index in range(num_sides, len(rows), num_sides)
    ]  # fmt: skip


def _remark(timeline: Timeline) -> str:
    told = []
    if timeline.measured and timeline.measured_us is not None:
        end_us = max(bar.start_us + bar.duration_us for bar in timeline.measured)
        drawn, replayed = (formats.seconds(us * 1e-6) for us in (end_us, timeline.measured_us))
        told.append(f"drawn to {drawn} with an event around each operator; a replay without them takes {replayed}")
    if timeline.shown_tasks != timeline.num_tasks:
        told.append(f"only the {timeline.shown_tasks:,} longest of {timeline.num_tasks:,} tasks are drawn")
    remark = f": {label(timeline.variant)}, {precision_of(timeline.variant)}"
    return f"{remark} ({'; '.join(told)})" if told else remark
