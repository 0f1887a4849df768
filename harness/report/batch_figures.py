"""The charts of what Kitsune gains at each batch size of a model: over eager, and over the best peer."""

from __future__ import annotations

from collections.abc import Sequence

from harness import formats
from harness.batch_gains import BatchGains, Speedups, batch_gains, gain_end
from harness.names import label, precision_of
from harness.report import style
from harness.report.figures import Figure
from harness.report.style import Spec
from harness.rows import Comparison, Row
from harness.stats import Estimate


def batch_speedups(comparison: Comparison) -> list[Figure]:
    """For each model measured at several batch sizes, two charts with a line for each of Kitsune's forms."""
    models: dict[tuple[str, str], list[BatchGains]] = {}
    for entry in batch_gains(comparison.rows):
        models.setdefault((entry.model, entry.device), []).append(entry)
    return [
        _figure(f"sweep-{index}-{name}", subject, lines, words, comparison.margin)
        for index, (subject, entries) in enumerate(models.items())
        for name, words, lines in (
            ("eager", "over eager", [(entry.variant, entry.over_eager) for entry in entries]),
            ("peer", "over the best peer", [(entry.variant, entry.over_peer) for entry in entries]),
        )
        if any(speedups for _, speedups in lines)
    ]


def _figure(
    name: str, subject: tuple[str, str], lines: Sequence[tuple[str, Speedups]], against: str, margin: float
) -> Figure:
    drawn = [(variant, speedups) for variant, speedups in lines if speedups]
    layout = style.layout(
        xaxis=style.batch_axis(row.case.batch for _, speedups in drawn for row, _ in speedups),
        yaxis=style.speedup_axis([speedup for _, speedups in drawn for _, speedup in speedups]),
        shapes=[style.band_around_one("y", margin), style.line_at_one("y")],
        legend=True,
    )
    traces = [_line(variant, speedups, against) for variant, speedups in drawn]
    layout |= style.legend_of(len(drawn)) | {"scattermode": "group", "scattergap": 0.8}
    ends = "; ".join(f"{label(variant)}, {precision_of(variant)}: {gain_end(speedups)}" for variant, speedups in drawn)
    return Figure(name, subject, traces, layout, remark=f": gain {against} ({ends})")


def _line(variant: str, speedups: Speedups, against: str) -> Spec:
    estimates = [speedup for _, speedup in speedups]
    colour, symbol = style.colour(variant), style.symbol(variant)
    symbols = [symbol + ("" if estimate.has_interval else "-open") for estimate in estimates]
    return {
        "type": "scatter", "mode": "lines+markers", "name": style.variant_name(variant), "showlegend": True,
        "x": [str(row.case.batch) for row, _ in speedups], "y": [estimate.ratio for estimate in estimates],
        "line": {"color": colour, "width": 2, "dash": style.dash(variant)},
        "marker": {"size": 10, "symbol": symbols}, "error_y": style.whiskers(estimates, colour),
        "hoverinfo": "text", "hovertext": [_hover(row, speedup, against) for row, speedup in speedups],
    }  # fmt: skip


def _hover(row: Row, speedup: Estimate, against: str) -> str:
    peer = f": {style.shown(label(row.best_peer))}" if "peer" in against and row.best_peer is not None else ""
    return (
        f"<b>{style.variant_name(row.variant)}, batch {row.case.batch}</b><br>"
        f"{formats.speedup(speedup)} {against}{peer}<br>{formats.seconds(row.seconds)} per step"
    )
