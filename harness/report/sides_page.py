"""Two variants or two machines side by side as one HTML file: the counterpart of :mod:`harness.report.page`."""

from __future__ import annotations

import json
from html import escape

from harness import formats, render_sides, tables
from harness.metrics import word
from harness.report import markup, style
from harness.report.document import Section, cards, document
from harness.report.downloads import File, links
from harness.report.figures import Figure
from harness.report.header import Header
from harness.report.packing import compact
from harness.report.style import Spec
from harness.rows import Contrast, SideBySide
from harness.selection import Case
from harness.stats import Verdict
from harness.tables import Table


def sides_page(sides: SideBySide) -> str:
    """The whole page.

    Raises:
        ReportError: Plotly is not installed.
    """
    drawn = _forests(sides)
    base, head = sides.base.label, sides.head.label
    numbers = json.loads(render_sides.json_document(sides))
    return document(
        f"Kitsune benchmarks: {head} against {base}",
        Header(
            render_sides.outcome(sides),
            sides.regressions > 0,
            _facts(sides),
            dict.fromkeys(entry.case.model for entry in sides.contrasts),
        ),
        [
            Section("Summary", "Summary", "", _summary(sides), folds=False),
            Section(
                "Rows",
                "All rows",
                "Click a heading to sort. What became worse comes first.",
                markup.table(_table(sides)),
            ),
            Section(
                "Ratios",
                f"{head} against {base}",
                f"How many times as little {head} takes as {base}, which is the line at 1×; bars are 95% intervals, and"
                " hollow marks have none. The axis is logarithmic.",
                cards(drawn),
            ),
            Section(
                "Damage",
                "Damaged results",
                "These parts of the results could not be read and were left out. Everything else was used.",
                markup.table(tables.damage_table(sides.damage)),
            ),
            Section(
                "Raw data",
                "Raw data",
                "It is part of this page: nothing is fetched.",
                links([File("sides", "all rows and verdicts, as --json writes them", compact(numbers))]),
            ),
        ],
        drawn,
    )


def _table(sides: SideBySide) -> Table:
    table = tables.contrast_table(sides.contrasts, sides.base.label, sides.head.label)
    return table.without("variant") if sides.kind == "variants" else table


def _facts(sides: SideBySide) -> dict[str, str]:
    machines = {side.machine: side.facts for side in (sides.base, sides.head)}
    told = [f"{name}: {formats.machine(facts)}" for name, facts in machines.items()]
    margins = ", ".join(f"{formats.share(margin)} of {metric}" for metric, margin in sides.margins.items())
    return {
        "Machines" if len(told) > 1 else "Machine": "<br>".join(map(escape, told)),
        "Commit": markup.commit(sides.head.commit),
        "Margin": escape(f"{margins}, or twice the noise"),
    }


def _summary(sides: SideBySide) -> str:
    """Verdicts counted for each metric, and what to know of the comparison."""
    tiles = "".join(_tally(sides, metric) for metric in dict.fromkeys(entry.metric for entry in sides.contrasts))
    notices = "".join(f'<p class="notice">{escape(note)}</p>' for note in sides.notes)
    return f'<div class="tallies">{tiles}</div>{notices}'


def _tally(sides: SideBySide, metric: str) -> str:
    verdicts = [entry.verdict for entry in sides.contrasts if entry.metric == metric]
    counts = "".join(
        f'<li class="{judged.value if verdicts.count(judged) else "none"}"><b>{verdicts.count(judged)}</b>'
        f" {escape(word(metric, judged))}</li>"
        for judged in Verdict
    )
    title = f"{metric.capitalize()} of {sides.head.label}"
    return f'<div class="tally"><h3>{escape(title)}</h3><ul>{counts}</ul></div>'


def _forests(sides: SideBySide) -> list[Figure]:
    """For each case a mark a row: how many times as little the side of head takes, with its interval."""
    cases = dict.fromkeys(entry.case for entry in sides.contrasts)
    return [
        _forest(f"ratio-{index}", case, [entry for entry in sides.contrasts if entry.case == case])
        for index, case in enumerate(cases)
    ]


def _forest(name: str, case: Case, members: list[Contrast]) -> Figure:
    names = [f"{style.variant_name(entry.variant)}, {entry.metric}" for entry in members]
    gains = [entry.ratio.inverted() for entry in members]
    layout = style.layout(
        xaxis=style.speedup_axis(gains), yaxis=style.name_axis(names), shapes=[style.line_at_one("x")]
    )
    traces: list[Spec] = [
        {
            "type": "scatter", "mode": "markers", "x": [gain.ratio], "y": [row],
            "marker": {
                "color": style.colour(entry.variant), "size": 11,
                "symbol": style.symbol(entry.variant) + ("" if gain.has_interval else "-open"),
            },
            "error_x": style.whiskers([gain], style.colour(entry.variant)), "hoverinfo": "text",
            "hovertext": f"<b>{row}</b><br>{formats.ratio_with_interval(gain)}: {word(entry.metric, entry.verdict)}",
        }
        for entry, gain, row in zip(members, gains, names, strict=True)
    ]  # fmt: skip
    return Figure(name, case, traces, style.height(names, layout), narrow_layout=style.names_above_rows(names))
