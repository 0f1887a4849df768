"""The charts as Plotly figures: plain dictionaries of traces and layout, made of numbers computed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from harness import formats
from harness.names import label
from harness.report import style
from harness.report.style import Spec
from harness.rows import Commit, Comparison, LossCurve, Row, Series
from harness.selection import Case
from harness.stats import Estimate

_SHARE_FOR_TEXT = 0.44
_SHARE_FOR_DEVICE_MEMORY = 0.54
_SHARE_FOR_SETUPS = 0.64
"""How much of a bar chart's width is kept for what is written at the bars' ends."""

_DRAWN_DIGITS, _TOLD_DIGITS = 4, 3
"""How many digits of a history can be seen, drawn and in words: a long one is much of the page."""

_FAINT, _FAINT_LINE = 0.3, 0.5
"""The opacity of a bar behind the one that counts, and of a line across it."""

_MOST_COMMITS, _MOST_COMMITS_IF_NARROW = 6, 3
"""How many commits a history's axis names."""

_FEW_POINTS = 40
"""Up to so many, the marks of a line are large."""


@dataclass(frozen=True)
class Figure:
    """A chart: an identifier within the page, its subject (a case, or a model on a device at all batch sizes), Plotly's
    traces and layout, what changes in each trace and, by dotted path, in the layout where the page is narrow, whether
    it takes the page's whole width, and what its title says besides the subject.
    """

    name: str
    subject: Case | tuple[str, str]
    traces: Sequence[Spec]
    layout: Spec
    narrow_trace: Spec = field(default_factory=dict)
    narrow_layout: Spec = field(default_factory=dict)
    is_wide: bool = False
    remark: str = ""

    def drawing(self) -> Spec:
        """What the page's script draws it from."""
        names = ("name", "traces", "layout", "narrow_trace", "narrow_layout")
        return {name: getattr(self, name) for name in names}

    @property
    def model(self) -> str:
        """The model that it is about."""
        return self.subject.model if isinstance(self.subject, Case) else self.subject[0]

    @property
    def title(self) -> str:
        """What stands above it. Not escaped: it is for the page, not for Plotly."""
        name = style.case_name(self.subject) if isinstance(self.subject, Case) else ", ".join(self.subject)
        return name + self.remark


def speedups(comparison: Comparison) -> list[Figure]:
    """A forest plot for each case: speed-up over eager in the same precision, with its interval."""
    figures = []
    for index, case in enumerate(comparison.cases):
        rows = [row for row in comparison.compared_rows_of(case) if row.ratio is not None]
        if rows:
            figures.append(_forest(f"speedup-{index}", case, rows, comparison.margin))
    return figures


def memory(comparison: Comparison) -> list[Figure]:
    """Bars for each case: peak bytes allocated and reserved, or resident memory on a CPU."""
    figures = []
    for index, case in enumerate(comparison.cases):
        rows = comparison.compared_rows_of(case)
        on_device = [row for row in rows if row.allocated_bytes is not None]
        resident = [row for row in rows if row.rss_bytes is not None]
        if on_device:
            reserved = _bars(on_device, lambda row: row.reserved_bytes, _device_memory, faint=lambda row: True)
            allocated = _bars(on_device, lambda row: row.allocated_bytes, None)
            figures.append(
                _long_label_chart(f"memory-{index}", case, on_device, [reserved, allocated], _SHARE_FOR_DEVICE_MEMORY)
            )
        elif resident:
            bars = _bars(resident, lambda row: row.rss_bytes, lambda row: formats.size(row.rss_bytes))
            figures.append(_bar_chart(f"memory-{index}", case, resident, [bars]))
    return figures


def setups(comparison: Comparison) -> list[Figure]:
    """Bars for each case: seconds of set-up, labelled with the steps after which they are earned back; of those with
    empty caches the paler ones, where both were measured. Lines across them mark the first replays.
    """
    figures = []
    for index, case in enumerate(comparison.cases):
        rows = [row for row in comparison.compared_rows_of(case) if {row.setup_s, row.warm_setup_s} != {None}]
        if rows:
            cold = _bars(rows, _first_setup, _setup_and_break_even, faint=_has_warm_setup)
            warm = _bars(rows, lambda row: row.warm_setup_s, None)
            first = _lines_across(rows, lambda row: row.first_replay_s, faint=_has_warm_setup)
            warm_first = _lines_across(rows, lambda row: row.warm_first_replay_s)
            if all(row.warm_setup_s is None for row in rows):
                figures.append(_bar_chart(f"setup-{index}", case, rows, [cold, first]))
            else:
                traces = [cold, warm, first, warm_first]
                figures.append(_long_label_chart(f"setup-{index}", case, rows, traces, _SHARE_FOR_SETUPS))
    return figures


def history(comparison: Comparison) -> list[Figure]:
    """Lines for each case measured at several commits: speed-ups over controls, with bands for their intervals."""
    figures = []
    for index, case in enumerate(_cases(series for series in comparison.history if len(series.points) > 1)):
        members = [series for series in comparison.history if series.case == case]
        speedups = [point.ratio.inverted() for series in members for point in series.recent]
        measured = {point.commit.sha for series in members for point in series.recent}
        shown = [commit for commit in comparison.commits if commit.sha in measured]
        shapes = [style.line_at_one("y"), *_environment_lines(shown, comparison), *_change_lines(members, shown)]
        names = [commit.short for commit in shown]
        axis: Spec = {
            "type": "category", "categoryorder": "array", "categoryarray": names, "fixedrange": True, "tickangle": 0,
            "nticks": _MOST_COMMITS,
        }  # fmt: skip
        layout = style.layout(xaxis=axis, yaxis=style.speedup_axis(speedups), shapes=shapes, legend=True)
        variants = [series.variant for series in members]
        traces = []
        for series in members:
            entry = style.legend_entry(series.variant, variants)
            traces += [_band(series) | entry | {"showlegend": False}, _line(series) | entry]
        wide = style.legend(variants, columns=2)
        narrow = style.legend(variants, columns=1) | {"xaxis.nticks": _MOST_COMMITS_IF_NARROW}
        figures.append(Figure(f"history-{index}", case, traces, layout | wide, narrow_layout=narrow))
    return figures


def losses(comparison: Comparison) -> list[Figure]:
    """The loss of every variant of each case over the steps of one training run."""
    figures = []
    for index, case in enumerate(_cases(comparison.losses)):
        curves = [curve for curve in comparison.losses if curve.case == case]
        plain: Spec = {"automargin": True, "gridcolor": style.GRID, "zeroline": False, "fixedrange": True}
        layout = style.layout(xaxis=plain | {"title": {"text": "step", "standoff": 4}}, yaxis=plain, legend=True)
        variants = [curve.variant for curve in curves]
        traces = [_curve(curve) | style.legend_entry(curve.variant, variants) for curve in curves]
        wide, narrow = style.legend(variants, columns=2), style.legend(variants, columns=1)
        figures.append(Figure(f"loss-{index}", case, traces, layout | wide, narrow_layout=narrow))
    return figures


def _cases(members: Iterable[Series | LossCurve]) -> tuple[Case, ...]:
    return tuple(dict.fromkeys(member.case for member in members))


def _forest(name: str, case: Case, rows: Sequence[Row], margin: float) -> Figure:
    marks = [(row, row.ratio.inverted()) for row in rows if row.ratio is not None]
    variants = [row.variant for row in rows]
    layout = style.layout(
        xaxis=style.speedup_axis([speedup for _, speedup in marks]),
        yaxis=style.variant_axis(variants),
        shapes=[
            style.band_around_one("x", margin),
            style.line_at_one("x"),
            *style.lines_between_precisions(variants),
        ],
    )
    traces = [_mark(row, speedup) for row, speedup in marks]
    narrow = style.names_above_rows([style.variant_name(variant) for variant in variants])
    return Figure(name, case, traces, style.height(variants, layout), narrow_layout=narrow)


def _mark(row: Row, speedup: Estimate) -> Spec:
    symbol = style.symbol(row.variant) + ("" if speedup.has_interval else "-open")
    lines = [
        f"<b>{style.variant_name(row.variant)}</b>",
        f"{formats.ratio_with_interval(speedup)} × as fast as eager",
        f"{formats.seconds(row.seconds)} per step, {formats.counted(row.rounds, 'round')}",
    ]
    if row.peer_ratio is not None and row.best_peer is not None:
        peer = formats.ratio_with_interval(row.peer_ratio.inverted())
        lines.append(f"{peer} × as fast as {style.shown(label(row.best_peer))}")
    return {
        "type": "scatter", "mode": "markers", "x": [speedup.ratio], "y": [style.variant_name(row.variant)],
        "marker": {"color": style.colour(row.variant), "size": 13 if row.is_kitsune else 9, "symbol": symbol},
        "error_x": style.whiskers([speedup], style.colour(row.variant)),
        "hoverinfo": "text", "hovertext": "<br>".join(lines),
    }  # fmt: skip


def _bar_chart(
    name: str, case: Case, rows: Sequence[Row], traces: Sequence[Spec], share_for_text: float = _SHARE_FOR_TEXT
) -> Figure:
    variants = [row.variant for row in rows]
    bare: Spec = {"showticklabels": False, "showgrid": False, "zeroline": False, "fixedrange": True}
    layout = style.layout(
        xaxis=bare | {"rangemode": "tozero", "domain": [0, 1 - share_for_text]},
        yaxis=style.variant_axis(variants) | {"showgrid": False},
        shapes=style.lines_between_precisions(variants),
    )
    layout["margin"] = {"l": 8, "r": 8, "t": 6, "b": 8}
    bars: Spec = {"offset": 0.06, "width": 0.4}
    names = style.names_above_rows([style.variant_name(variant) for variant in variants])
    return Figure(name, case, traces, style.height(variants, layout), bars, names)


def _long_label_chart(
    name: str, case: Case, rows: Sequence[Row], traces: Sequence[Spec], share_for_text: float
) -> Figure:
    """A chart of bars whose names stand above them at any width: what is written at their ends needs the room."""
    chart = _bar_chart(name, case, rows, [], share_for_text)
    layout = style.changed(chart.layout, chart.narrow_layout)
    return Figure(name, case, [{**trace, **chart.narrow_trace} for trace in traces], layout)


def _bars(
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    written: Callable[[Row], str] | None,
    *,
    faint: Callable[[Row], bool] = lambda row: False,
) -> Spec:
    """Horizontal bars, one a row, with what ``written`` gives at their ends."""
    texts = [] if written is None else [written(row) for row in rows]
    opacities = [_FAINT if faint(row) else 1 for row in rows]
    return {
        "type": "bar", "orientation": "h", "x": [value(row) for row in rows],
        "y": [style.variant_name(row.variant) for row in rows], "width": 0.66, "hoverinfo": "skip",
        "marker": {"color": [style.colour(row.variant) for row in rows], "opacity": opacities},
        "text": texts, "textposition": "outside", "textangle": 0, "cliponaxis": False,
        "textfont": {"size": 11, "color": style.INK},
    }  # fmt: skip


def _lines_across(
    rows: Sequence[Row], value: Callable[[Row], float | None], *, faint: Callable[[Row], bool] = lambda row: False
) -> Spec:
    """Lines across horizontal bars: bars without length, of which the outline is left."""
    bars = _bars(rows, lambda row: None if value(row) is None else 0, None)
    opacities = [_FAINT_LINE if faint(row) else 1 for row in rows]
    line: Spec = {"width": 2, "color": style.INK}
    return bars | {"base": [value(row) for row in rows], "marker": {"opacity": opacities, "line": line}}


def _device_memory(row: Row) -> str:
    unused = row.fragmentation_bytes
    share = "" if unused is None or not row.reserved_bytes else f", {unused / row.reserved_bytes:.0%} unused"
    return f"{formats.size(row.allocated_bytes)} ({formats.size(row.reserved_bytes)}{share})"


def _has_warm_setup(row: Row) -> bool:
    return row.warm_setup_s is not None


def _first_setup(row: Row) -> float | None:
    """The longer bar of both: where only the set-up with warm caches is known, that."""
    return row.warm_setup_s if row.setup_s is None else row.setup_s


def _setup_and_break_even(row: Row) -> str:
    """Both set-ups, the one with warm caches in brackets; shortly, as a phone is narrow."""
    steps = "" if row.break_even_steps in (None, math.inf) else " steps"
    cold = None if row.setup_s is None else _earned_back(row.setup_s, row.break_even_steps) + steps
    warm = None if row.warm_setup_s is None else f"({_earned_back(row.warm_setup_s, row.warm_break_even_steps)})"
    return " ".join(filter(None, (cold, warm)))


def _earned_back(setup_s: float, steps: float | None) -> str:
    return formats.seconds(setup_s) + ("" if steps is None else f", {formats.steps(steps)}")


def _line(series: Series) -> Spec:
    speedups = [point.ratio.inverted() for point in series.recent]
    name = style.variant_name(series.variant)
    interval = {True: " [%{customdata[0]:.3r}, %{customdata[1]:.3r}]", False: " (one round)"}
    hovers = {
        known: f"<b>{name}</b><br>%{{text}}<br>%{{y:.3r}}{words} × as fast as {label(series.control)}<br>"
        "%{customdata[2]:.3s}s per step<extra></extra>"
        for known, words in interval.items()
    }
    return {
        "type": "scatter", "mode": "lines+markers",
        "x": [point.commit.short for point in series.recent],
        "y": _rounded([speedup.ratio for speedup in speedups], _DRAWN_DIGITS),
        "line": {"color": style.colour(series.variant), "width": 2, "dash": style.dash(series.variant)},
        "marker": {"size": 8 if len(speedups) <= _FEW_POINTS else 4, "symbol": style.symbol(series.variant)},
        "text": [style.shown(formats.commit(point.commit)) for point in series.recent],
        "customdata": [
            _rounded([*_bounds(speedup), point.seconds], _TOLD_DIGITS)
            for point, speedup in zip(series.recent, speedups, strict=True)
        ],
        "hovertemplate": hovers[True] if all(speedup.has_interval for speedup in speedups)
        else [hovers[speedup.has_interval] for speedup in speedups],
    }  # fmt: skip


def _bounds(estimate: Estimate) -> tuple[float | None, float | None]:
    return (estimate.low, estimate.high) if estimate.has_interval else (None, None)


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def _change_lines(members: Iterable[Series], shown: Sequence[Commit]) -> list[Spec]:
    """A dotted line in a series' colour where its level changed, as far as the chart reaches.

    Places are numbers: Plotly would read some commits' names as such.
    """
    place = {commit.sha: index for index, commit in enumerate(shown)}
    return [
        {
            "type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1,
            "x0": place[change.first.sha], "x1": place[change.first.sha],
            "line": {"color": style.colour(series.variant), "width": 1.5, "dash": "dot"},
        }
        for series in members
        for change in series.changes
        if change.first.sha in place
    ]  # fmt: skip


def _environment_lines(shown: Sequence[Commit], comparison: Comparison) -> list[Spec]:
    """A grey line, with the facts that differ, before the first commit drawn that was measured in a new environment."""
    place = {commit.sha: index for index, commit in enumerate(shown)}
    position = {commit.sha: index for index, commit in enumerate(comparison.commits)}
    lines: dict[int, list[str]] = {}
    for change in comparison.environment_changes:
        later = [commit for commit in shown if position[commit.sha] >= position[change.commit.sha]]
        if later and place[later[0].sha] > 0:
            lines.setdefault(place[later[0].sha], []).extend(change.facts)
    return [
        {
            "type": "line", "xref": "x", "yref": "paper", "x0": index - 0.5, "x1": index - 0.5, "y0": 0, "y1": 1,
            "line": {"color": style.FAINT_INK, "width": 1.5, "dash": "longdash"},
            "label": {
                "text": style.shown(", ".join(dict.fromkeys(facts))), "textposition": "middle", "textangle": -90,
                "font": {"size": 10, "color": style.FAINT_INK}, "xanchor": "right", "yanchor": "bottom", "padding": 4,
            },
        }
        for index, facts in lines.items()
    ]  # fmt: skip


def _band(series: Series) -> Spec:
    """The interval as a closed outline: up along the upper bounds, back along the lower ones."""
    bounded = [(point.commit.short, point.ratio.inverted()) for point in series.recent if point.ratio.has_interval]
    return {
        "type": "scatter", "mode": "none", "fill": "toself",
        "x": [commit for commit, _ in bounded] + [commit for commit, _ in reversed(bounded)],
        "y": _rounded(
            [speedup.high for _, speedup in bounded] + [speedup.low for _, speedup in reversed(bounded)], _DRAWN_DIGITS
        ),
        "fillcolor": style.colour(series.variant), "opacity": 0.2, "hoverinfo": "skip",
    }  # fmt: skip


def _curve(curve: LossCurve) -> Spec:
    return {
        "type": "scatter", "mode": "lines", "hoverinfo": "x+y+text", "hovertext": style.variant_name(curve.variant),
        "x": [step for step, _ in curve.losses], "y": [loss for _, loss in curve.losses],
        "line": {"color": style.colour(curve.variant), "width": 1.6, "dash": style.dash(curve.variant)},
        "connectgaps": False,
    }  # fmt: skip
