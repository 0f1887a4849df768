"""The charts of single samples: how they spread, and how they drift over the turns and rounds of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from harness import formats
from harness.report import style
from harness.report.figures import Figure
from harness.report.style import Spec
from harness.rows import Comparison
from harness.samples import Samples
from harness.selection import Case

_PIXELS_BELOW_ROWS = 60
"""Under the rows of a narrow chart: the axis, its numbers and its title."""

_LEAST_END = 0.01
"""How far an axis reaches at least."""


def distributions(comparison: Comparison) -> list[Figure]:
    """For each case a box and all samples of every variant, as distances from its own time."""
    return [
        _distribution(f"spread-{index}", case, members) for index, (case, members) in enumerate(_by_case(comparison))
    ]


def drifts(comparison: Comparison) -> list[Figure]:
    """For each case the same samples in the order of the turns, with lines between the rounds."""
    return [_drift(f"drift-{index}", case, members) for index, (case, members) in enumerate(_by_case(comparison))]


def _by_case(comparison: Comparison) -> list[tuple[Case, list[Samples]]]:
    return [
        (case, [entry for entry in comparison.samples if entry.case == case])
        for case in dict.fromkeys(entry.case for entry in comparison.samples)
    ]


def _distribution(name: str, case: Case, members: Sequence[Samples]) -> Figure:
    variants = [entry.variant for entry in members]
    low, high = _ends(members)
    layout = style.layout(
        xaxis=_percent_axis(low, high) | {"title": {"text": "distance from its own time", "standoff": 4}},
        yaxis=style.variant_axis(variants),
        shapes=style.lines_between_precisions(variants),
    )
    layout["margin"] = {"l": 8, "r": 14, "t": 6, "b": 44}
    traces = [_box(entry) for entry in members]
    names = style.names_above_rows([style.variant_name(variant) for variant in variants])
    narrow = names | {"height": _PIXELS_BELOW_ROWS + 46 * len(variants)}
    remark = _remark(members, low, high)
    return Figure(name, case, traces, style.height(variants, layout), {"width": 0.2}, narrow, remark=remark)


def _box(entry: Samples) -> Spec:
    deviations = [100 * share for times in entry.deviations() for share in times or ()]
    colour = style.colour(entry.variant)
    return {
        "type": "box", "orientation": "h", "x": deviations, "y": [style.variant_name(entry.variant)] * len(deviations),
        "boxpoints": "all", "jitter": 0.5, "pointpos": 0, "width": 0.6, "fillcolor": "rgba(0,0,0,0)",
        "line": {"color": colour, "width": 1.5}, "marker": {"color": colour, "size": 3, "opacity": 0.55},
        "hoverinfo": "x+y",
    }  # fmt: skip


def _drift(name: str, case: Case, members: Sequence[Samples]) -> Figure:
    lengths = [max(len(times or ()) for times in rounds) for rounds in zip(*(m.rounds for m in members), strict=True)]
    begins = [0, *accumulate(lengths)]
    turns: Spec = {
        "title": {"text": "turn", "standoff": 4}, "automargin": True, "fixedrange": True, "showgrid": False,
        "zeroline": False, "range": [0, begins[-1] + 1],
    }  # fmt: skip
    between: list[Spec] = [
        {
            "type": "line", "xref": "x", "yref": "paper", "x0": begin + 0.5, "x1": begin + 0.5, "y0": 0, "y1": 1,
            "line": {"color": style.FAINT_INK, "width": 1, "dash": "dot"}, "layer": "below",
        }
        for begin in begins[1:-1]
    ]  # fmt: skip
    low, high = _ends(members)
    layout = style.layout(xaxis=turns, yaxis=_percent_axis(low, high), shapes=between, legend=True)
    variants = [entry.variant for entry in members]
    traces = [_over_turns(entry, begins, low, high) | style.legend_entry(entry.variant, variants) for entry in members]
    wide, narrow = style.legend(variants, columns=2), style.legend(variants, columns=1)
    remark = _remark(members, low, high)
    return Figure(name, case, traces, layout | wide, narrow_layout=narrow, remark=remark)


def _over_turns(entry: Samples, begins: Sequence[int], low: float, high: float) -> Spec:
    """One line a round: a round without the variant, and the step from one process to the next, are gaps.

    What lies beyond the axis is a triangle at its end.
    """
    turns: list[int | None] = []
    shares: list[float | None] = []
    symbols: list[str] = []
    told: list[str] = []
    for number, (begin, times, deviations) in enumerate(
        zip(begins, entry.rounds, entry.deviations(), strict=False), start=1
    ):
        for turn, (seconds, share) in enumerate(zip(times or (), deviations or (), strict=True), start=1):
            turns.append(begin + turn)
            shares.append(100 * min(max(share, low), high))
            beyond = "triangle-up" if share > high else "triangle-down"
            symbols.append(style.symbol(entry.variant) if low <= share <= high else beyond)
            told.append(f"round {number}, turn {turn}: {formats.seconds(seconds)}, {formats.percent_change(1 + share)}")
        turns.append(None)
        shares.append(None)
        symbols.append(style.symbol(entry.variant))
        told.append("")
    name, colour = style.variant_name(entry.variant), style.colour(entry.variant)
    return {
        "type": "scatter", "mode": "lines+markers", "x": turns, "y": shares, "connectgaps": False,
        "line": {"color": colour, "width": 1, "dash": style.dash(entry.variant)},
        "marker": {"color": colour, "size": 5, "symbol": symbols},
        "hovertext": told, "hovertemplate": f"<b>{name}</b><br>%{{hovertext}}<extra></extra>",
    }  # fmt: skip


def _ends(members: Sequence[Samples]) -> tuple[float, float]:
    """Where the axis begins and ends: single disturbed samples, many times as long, would leave no room for others."""
    ranges = [entry.usual_range for entry in members]
    return min(-_LEAST_END, *(low for low, _ in ranges)), max(_LEAST_END, *(high for _, high in ranges))


def _remark(members: Sequence[Samples], low: float, high: float) -> str:
    shares = [share for entry in members for times in entry.deviations() for share in times or ()]
    beyond = [share for share in shares if not low <= share <= high]
    if not beyond:
        return ""
    worst = formats.percent_change(1 + max(beyond, key=abs))
    return f" ({len(beyond)} of {formats.counted(len(shares), 'block')} beyond the axis, up to {worst})"


def _percent_axis(low: float, high: float) -> Spec:
    room = 0.04 * (high - low)
    return {
        "range": [100 * (low - room), 100 * (high + room)],
        "ticksuffix": "%", "automargin": True, "gridcolor": style.GRID, "zeroline": True, "zerolinewidth": 1,
        "zerolinecolor": style.INK, "fixedrange": True,
    }  # fmt: skip
