"""The chart of a GPU's memory over one step, a line for each variant."""

from __future__ import annotations

from collections.abc import Sequence

from harness.memory_timeline import MemoryTimeline
from harness.names import is_diagnostic
from harness.report import style
from harness.report.figures import Figure
from harness.report.style import Spec
from harness.rows import Comparison
from harness.selection import Case

_MEBIBYTE = 2**20

_BELOW_ZERO_BYTES = 8
"""Pixels between the axis and its numbers, the first of which would lie over that of the bytes."""

Entries = Sequence[tuple[str, MemoryTimeline]]


def timelines(comparison: Comparison) -> list[Figure]:
    """For each case of which a step's memory is known: bytes allocated over the step, from its beginning to its end.

    Steps take different times, so the axis is their share.
    """
    members: dict[Case, list[tuple[str, MemoryTimeline]]] = {}
    for entry in comparison.step_memory:
        if entry.timeline is not None and not is_diagnostic(entry.variant):
            members.setdefault(entry.case, []).append((entry.variant, entry.timeline))
    return [_figure(f"allocation-{index}", case, entries) for index, (case, entries) in enumerate(members.items())]


def _figure(name: str, case: Case, entries: Entries) -> Figure:
    plain: Spec = {"automargin": True, "gridcolor": style.GRID, "zeroline": False, "fixedrange": True}
    share: Spec = {
        "title": {"text": "share of the step", "standoff": 4}, "ticksuffix": "%", "range": [0, 100],
        "ticks": "outside", "ticklen": _BELOW_ZERO_BYTES, "tickcolor": "rgba(0,0,0,0)",
    }  # fmt: skip
    layout = style.layout(
        xaxis=plain | share,
        yaxis=plain | {"ticksuffix": " MiB", "rangemode": "tozero"},
        legend=True,
    )
    variants = [variant for variant, _ in entries]
    traces = [_line(variant, timeline) | style.legend_entry(variant, variants) for variant, timeline in entries]
    wide, narrow = style.legend(variants, columns=2), style.legend(variants, columns=1)
    remark = ": bytes allocated over one step"
    return Figure(name, case, traces, layout | wide, narrow_layout=narrow, remark=remark)


def _line(variant: str, timeline: MemoryTimeline) -> Spec:
    """What is allocated stays so until the next point, the last until the step ends."""
    points = [*timeline.points, (timeline.step_us, *timeline.points[-1][1:])]
    length = timeline.step_us or 1.0
    return {
        "type": "scatter", "mode": "lines", "x": [round(100 * time / length, 2) for time, _, _ in points],
        "y": [round(allocated / _MEBIBYTE, 2) for _, allocated, _ in points],
        "customdata": [time for time, _, _ in points],
        "line": {
            "color": style.colour(variant), "width": 1.6, "dash": style.dash(variant), "shape": "hv",
        },
        "hovertemplate": (
            f"<b>{style.variant_name(variant)}</b><br>%{{y:,.0f}} MiB allocated, %{{customdata:,.0f}} µs"
            f" after the step began<extra></extra>"
        ),
    }  # fmt: skip
