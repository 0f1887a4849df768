"""How every chart looks: colours, symbols, axes, and text that Plotly cannot misread."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from harness.names import label, precision_of
from harness.selection import Case
from harness.stats import Estimate, margin_band

Spec = dict[str, object]

INK = "#1f2328"
FAINT_INK = "#9aa0a8"
GRID = "#e4e6ea"
BAND = "rgba(95,99,104,0.16)"
HOVER = "#ffffff"
HOVER_LINE = "#b6bbc2"

_MARKS = {
    "eager": ("#5a5e65", "square"),
    "compile": ("#00a08c", "diamond"),
    "compile_reduce_overhead": ("#003f38", "diamond-tall"),
    "handcaptured": ("#4a9fd8", "circle"),
    "handcaptured_compile": ("#0055a4", "hexagon"),
    "kitsune_dropin": ("#b24d96", "star-diamond"),
    "kitsune_deferred": ("#6d28d9", "star-square"),
    "kitsune_dropin_unfused": ("#5e2750", "diamond-wide"),
    "kitsune_trainstep": ("#d9540b", "star"),
    "kitsune_trainstep_one_stream": ("#8a2f00", "star-triangle-up"),
    "kitsune_trainstep_unfused": ("#5c4400", "star-triangle-down"),
}
"""Colour and symbol of a variant in any precision. Colours differ in lightness too, for readers who see few of them."""

DARK = {
    INK: "#e6e8eb",
    FAINT_INK: "#868d96",
    GRID: "#30353c",
    BAND: "rgba(160,166,174,0.20)",
    HOVER: "#22262c",
    HOVER_LINE: "#565d66",
    "#5a5e65": "#a0a5ab",
    "#00a08c": "#7ff5e3",
    "#003f38": "#14806f",
    "#4a9fd8": "#8cc8f0",
    "#0055a4": "#3f8fe0",
    "#b24d96": "#d926a7",
    "#6d28d9": "#9d4dff",
    "#5e2750": "#9a5a88",
    "#d9540b": "#ff8a4c",
    "#8a2f00": "#c06a3a",
    "#5c4400": "#a08a4a",
    "#8a6d00": "#c9a93a",
    "#009988": "#3ccbb8",
    "#e0a100": "#e0a100",
    "#aa3377": "#e07fb4",
    "#8c564b": "#c08a7d",
    "#7d838c": "#9aa1ab",
}
"""What every colour of a chart becomes on a dark page."""

_OTHER_MARK = ("#8a6d00", "cross")
_DASHES = {"fp32": "solid", "tf32": "dot", "amp": "dash"}
_SPEEDUP_TICKS = (
    (0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2),
    (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.2, 2.5),
    (0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 2.5),
    (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50),
    (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500),
    (0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000, 10000),
)
_MOST_TICKS = 6
_PIXELS_BELOW_ROWS = 40


def shown(text: str) -> str:
    """Text from a result file for Plotly, which reads a subset of HTML wherever it writes text."""
    return html.escape(text, quote=False)


def colour(variant: str) -> str:
    """The same in every precision."""
    return _mark(variant)[0]


def symbol(variant: str) -> str:
    """The same in every precision; colour is never the only difference."""
    return _mark(variant)[1]


def dash(variant: str) -> str:
    """By precision."""
    return _DASHES.get(precision_of(variant), "dashdot")


def variant_name(variant: str) -> str:
    """What a variant is called in charts: its name in words and its precision."""
    words = label(variant)
    return shown(variant if words == variant else f"{words} · {precision_of(variant)}")


def case_name(case: Case) -> str:
    """What a case is called above a chart. Not escaped: it is for the page, not for Plotly."""
    return f"{case.model}, batch {case.batch}, {case.device}"


def layout(*, xaxis: Spec, yaxis: Spec, shapes: Sequence[Spec] = (), legend: bool = False) -> Spec:
    """A layout on the page's own background, with its font, that scrolls under a finger instead of zooming."""
    return {
        "xaxis": {"gridcolor": GRID, "zerolinecolor": GRID} | xaxis,
        "yaxis": {"gridcolor": GRID, "zerolinecolor": GRID} | yaxis,
        "shapes": list(shapes),
        "showlegend": legend,
        "margin": {"l": 8, "r": 14, "t": 6, "b": 34},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left", "bgcolor": HOVER, "bordercolor": HOVER_LINE, "font": {"color": INK}},
        "dragmode": False,
        "barmode": "overlay",
        "hovermode": "closest",
    }


def legend(variants: Sequence[str], columns: int) -> Spec:
    """The part of a layout for a chart of these variants with a legend below it, and the height that this takes."""
    return legend_of(math.ceil(len(set(map(label, variants))) / columns))


def legend_of(rows: int) -> Spec:
    """The same for a legend of so many rows."""
    return {
        "height": 290 + 21 * rows,
        "legend": {
            "orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "font": {"size": 11},
            "maxheight": 0.9, "tracegroupgap": 0,
        },
        "margin": {"l": 8, "r": 14, "t": 6, "b": 48 + 21 * rows},
    }  # fmt: skip


def legend_entry(variant: str, variants: Sequence[str]) -> Spec:
    """The part of a trace that names it in the legend: one entry for all precisions of a variant."""
    first = next(other for other in variants if label(other) == label(variant))
    return {"name": shown(label(variant)), "legendgroup": shown(label(variant)), "showlegend": variant == first}


def batch_axis(batches: Iterable[int]) -> Spec:
    """A horizontal axis of these batch sizes, equally far from one another."""
    return {
        "type": "category", "categoryorder": "array", "categoryarray": [str(batch) for batch in sorted(set(batches))],
        "fixedrange": True, "automargin": True, "title": {"text": "batch size", "standoff": 4},
    }  # fmt: skip


def speedup_axis(speedups: Sequence[Estimate]) -> Spec:
    """A logarithmic axis of speed-ups: twice as fast and twice as slow are equally far from 1.

    It spans 1 and all intervals; its ticks are the finest that stay legible over that range.
    """
    ends = [end for speedup in speedups for end in (speedup.ratio, speedup.low, speedup.high) if 0 < end < math.inf]
    low, high = min([0.97, *ends]), max([1.03, *ends])
    room = 0.06 * math.log10(high / low)
    ticks = next((ticks for ticks in _SPEEDUP_TICKS if _suit(ticks, low, high)), _SPEEDUP_TICKS[-1])
    return {
        "type": "log",
        "range": [math.log10(low) - room, math.log10(high) + room],
        "tickvals": list(ticks),
        "ticktext": [f"{tick:g}×" for tick in ticks],
        "tickangle": 0,
        "automargin": True,
        "gridcolor": GRID,
        "zeroline": False,
        "fixedrange": True,
    }


def variant_axis(variants: Sequence[str]) -> Spec:
    """A vertical axis of variants in the tables' order, the first at the top."""
    return name_axis([variant_name(variant) for variant in variants])


def name_axis(names: Sequence[str]) -> Spec:
    """A vertical axis of named rows, the first at the top."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(names),
        "autorange": "reversed",
        "automargin": True,
        "fixedrange": True,
        "ticklen": 0,
        "gridcolor": GRID,
    }


def lines_between_precisions(variants: Sequence[str]) -> list[Spec]:
    """Dotted lines across a vertical axis of variants wherever the precision changes."""
    return [
        {
            "type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": index - 0.5, "y1": index - 0.5,
            "line": {"color": FAINT_INK, "width": 1, "dash": "dot"}, "layer": "below",
        }
        for index in range(1, len(variants))
        if precision_of(variants[index]) != precision_of(variants[index - 1])
    ]  # fmt: skip


def height(rows: Sequence[str], layout: Spec) -> Spec:
    """The layout with a height that suits these rows."""
    return layout | {"height": _PIXELS_BELOW_ROWS + 25 * len(rows)}


def names_above_rows(names: Sequence[str]) -> Spec:
    """What changes in a layout, by dotted path, where there is no room for names beside the rows."""
    return {
        "height": _PIXELS_BELOW_ROWS + 40 * len(names),
        "yaxis.showticklabels": False,
        "yaxis.showgrid": False,
        "annotations": [
            {"text": name, "xref": "paper", "x": 0, "xanchor": "left", "y": name, "yshift": 11, "showarrow": False}
            for name in names
        ],
    }


def changed(layout: Spec, changes: Spec) -> Spec:
    """A layout with changes by dotted path, as those of a narrow page."""
    made = dict(layout)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        part = made.get(name)
        made[name] = changed(part if isinstance(part, dict) else {}, {rest: value}) if rest else value
    return made


def line_at_one(axis: str) -> Spec:
    """A line where the speed-up is 1, across the other axis."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line", f"{axis}ref": axis, f"{other}ref": "paper", f"{axis}0": 1, f"{axis}1": 1, f"{other}0": 0,
        f"{other}1": 1, "line": {"color": INK, "width": 1}, "layer": "below",
    }  # fmt: skip


def band_around_one(axis: str, margin: float) -> Spec:
    """The speed-ups that count as the same, across the other axis."""
    other = "y" if axis == "x" else "x"
    least, most = margin_band(margin)
    return {
        "type": "rect", f"{axis}ref": axis, f"{other}ref": "paper", f"{axis}0": least, f"{axis}1": most,
        f"{other}0": 0, f"{other}1": 1, "fillcolor": BAND, "line": {"width": 0}, "layer": "below",
    }  # fmt: skip


def whiskers(estimates: Sequence[Estimate], colour: str) -> Spec:
    """Error bars of 95% intervals, none for an estimate without one."""
    ends = [(e.low, e.high) if e.has_interval else (e.ratio, e.ratio) for e in estimates]
    return {
        "visible": any(e.has_interval for e in estimates), "type": "data", "symmetric": False, "color": colour,
        "thickness": 2, "width": 4,
        "array": [high - e.ratio for e, (_, high) in zip(estimates, ends, strict=True)],
        "arrayminus": [e.ratio - low for e, (low, _) in zip(estimates, ends, strict=True)],
    }  # fmt: skip


def _suit(ticks: Sequence[float], low: float, high: float) -> bool:
    """Whether the ticks reach over a range and are few enough within it."""
    return ticks[0] <= low and high <= ticks[-1] and sum(low <= tick <= high for tick in ticks) <= _MOST_TICKS


def _mark(variant: str) -> tuple[str, str]:
    return _MARKS.get(variant.rpartition("_")[0], _OTHER_MARK)
