"""The report as one HTML file that works offline: readable without scripts, interactive with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from harness import formats, render, step_tables, tables
from harness.comparison import LOSS_TOLERANCE
from harness.report import figures, markup, step_figures
from harness.report.figures import Figure
from harness.report.fusion_cards import fusion_cards
from harness.rows import SHOWN_POINTS, Comparison, Tally
from harness.stats import Verdict
from harness.tables import Table

_FOLDER = Path(__file__).resolve().parent


class ReportError(Exception):
    """The report cannot be made. The message says what to do."""


@dataclass(frozen=True)
class _Section:
    link: str
    title: str
    intro: str
    body: str

    @property
    def anchor(self) -> str:
        """The identifier that links lead to."""
        return self.link.lower().replace(" ", "-")


def html_page(comparison: Comparison) -> str:
    """The whole report, Plotly's script included.

    Raises:
        ReportError: Plotly is not installed.
    """
    charts = {
        "speedup": figures.speedups(comparison),
        "memory": figures.memory(comparison),
        "setup": figures.setups(comparison),
        "contribution": step_figures.contributions(comparison),
        "batches": step_figures.stream_gains(comparison),
        "streams": step_figures.timelines(comparison),
        "history": figures.history(comparison),
        "loss": figures.losses(comparison),
    }
    sections = [section for section in _sections(comparison, charts) if section.body]
    return Template(_asset("page.html")).substitute(
        title=escape(f"Kitsune benchmarks: {comparison.machine}, {comparison.head.short}"),
        style=_asset("page.css"),
        header=_header(comparison, sections),
        sections="\n".join(_section(section) for section in sections),
        figures=_embedded([figure for group in charts.values() for figure in group]),
        plotly=_plotly_script(),
        script=_asset("page.js"),
    )


def _sections(comparison: Comparison, charts: Mapping[str, Sequence[Figure]]) -> list[_Section]:
    """All sections in order; those without a body have nothing to say and are left out."""
    return [
        _Section("Summary", "Summary", "", _summary(comparison)),
        _Section(
            "Changes",
            "Commit against commit",
            "Kitsune's time as a multiple of that of a peer in the same processes, the control, at the older and the"
            " newer commit, and its change: above 0 is slower.",
            markup.table(tables.change_table(comparison)),
        ),
        _Section(
            "Variants",
            "All variants",
            "Click a heading to sort. Kitsune's rows are coloured, and grey where something is switched off to tell"
            " what that contributes; * marks the best peer of its precision.",
            markup.table(tables.variant_table(comparison)),
        ),
        _Section(
            "Speed-up",
            "Speed-up over eager",
            "Eager in the same precision is the line at 1×, the margin is shaded, bars are 95% intervals. The axis is"
            " logarithmic. Hollow marks rest on a single round.",
            _charts(charts["speedup"]),
        ),
        _Section(
            "Memory",
            "Peak memory",
            "Bytes allocated to tensors and, in brackets and paler, reserved by PyTorch's allocator; on a CPU,"
            " resident memory of the process.",
            _charts(charts["memory"]),
        ),
        _Section(
            "Set-up",
            "Set-up and break-even",
            "Seconds before the first step at full speed, and after how many steps they are earned back against eager.",
            _charts(charts["setup"]),
        ),
        _Section(
            "Contributions",
            "What each optimization contributes",
            "The time of a step with one optimization after the other: as it is, with forward and backward captured"
            " (drop-in), with the optimizer in the same replay (TrainStep on one stream, unfused), with those"
            " operators fused that TrainStep fuses by default, and with the streams that it chooses by measurement."
            " Each × says how many times as fast it is as the one above it: by pairs of blocks in the same process, so"
            " that it may differ from the ratio of the bars.",
            _explained_charts(charts["contribution"], step_tables.contribution_table(comparison)),
        ),
        _Section(
            "Fusion",
            "What was fused",
            "Parts of the step that were replaced by fused operators, by template: how long one takes before and after,"
            " by itself on the device, and what all of them win. The step may gain less or more than their sum.",
            fusion_cards(comparison.fusions),
        ),
        _Section(
            "Batch sizes",
            "Streams over batch sizes",
            "TrainStep with the streams that it chooses by measurement against the same step in order on one stream,"
            " which is the line at 1×; the margin is shaded, bars are 95% intervals. Solid lines are fp32, dashed ones"
            " amp; hollow marks rest on a single round. Each process chooses anew: streams and schedule are those of"
            " the process in which set-up and memory were measured.",
            _stream_gains(comparison, charts["batches"]),
        ),
        _Section(
            "Streams",
            "Streams",
            "What runs when within a step: a bar is an operator, coloured by its kind, in the row of its stream; paler"
            " rows are predicted beside measured ones. Drag to zoom in, click twice to see all. Plans of Kitsune with"
            " something switched off are in the table alone.",
            _streams(comparison, charts["streams"]),
        ),
        _Section(
            "History",
            "History",
            f"Kitsune's speed-up over eager at the last {SHOWN_POINTS} measured commits, oldest first, with its 95%"
            " interval. Solid lines are fp32, dashed ones amp. Where a dotted line stands, a level changed for three"
            " commits or more. All such changes, and those of the environment, are listed below.",
            _history(comparison, charts["history"]),
        ),
        _Section(
            "Loss",
            "Training loss",
            "The same batches in the same order for every variant. Solid lines are fp32, dotted ones tf32, dashed ones"
            " amp. Click a name in the legend to hide its curves.",
            _charts(charts["loss"]),
        ),
        _Section(
            "Not measured",
            "Not measured",
            "What could not run here, or broke, with the reason the measurement gave.",
            markup.table(tables.skip_table(comparison)),
        ),
        _Section(
            "Damage",
            "Damaged results",
            "These parts of the results could not be read and were left out. Everything else was used.",
            markup.table(tables.damage_table(comparison)),
        ),
        _Section("How to read", "How to read this", "", _reading(comparison)),
    ]


def _header(comparison: Comparison, sections: Sequence[_Section]) -> str:
    facts = {"Machine": f"{comparison.machine}: {formats.machine(comparison.facts)}"}
    facts["Commit"] = formats.commit(comparison.head)
    if comparison.base is not None:
        earlier = comparison.base == comparison.head
        facts["Against"] = "earlier runs of the same commit" if earlier else formats.commit(comparison.base)
    facts["Measured"] = f"{comparison.head.measured:%Y-%m-%d %H:%M} UTC"
    tone = "bad" if comparison.regressions else "good"
    links = "".join(f'<a href="#{section.anchor}">{escape(section.link)}</a>' for section in sections)
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return "\n".join(
        (
            "<h1>Kitsune benchmarks</h1>",
            f'<p class="outcome {tone}">{escape(render.verdict_line(comparison))}</p>',
            f'<dl class="facts">{listed}</dl>',
            f'<nav aria-label="Sections">{links}</nav>',
        )
    )


def _summary(comparison: Comparison) -> str:
    tallies = {
        "Kitsune against eager": comparison.against_eager,
        "Kitsune against the best peer": comparison.against_peers,
    }
    if comparison.base is not None:
        tallies[f"Kitsune since {comparison.base.short}"] = comparison.since_base
    tiles = "".join(_tally(title, tally) for title, tally in tallies.items())
    lost = [f"{entry.skip.variant} in {entry.case.name}: {entry.skip.reason}" for entry in comparison.lost]
    notices = [f'<p class="notice bad">No longer measured: {escape(text)}</p>' for text in lost]
    notices += [f'<p class="notice">{escape(note)}</p>' for note in comparison.notes]
    means = markup.table(tables.summary_table(comparison))
    return f'<div class="tallies">{tiles}</div>{"".join(notices)}{means}'


def _tally(title: str, tally: Tally) -> str:
    counts = "".join(
        f'<li class="{verdict.value if tally[verdict] else "none"}"><b>{tally[verdict]}</b> {verdict.value}</li>'
        for verdict in Verdict
    )
    return f'<div class="tally"><h3>{escape(title)}</h3><ul>{counts}</ul></div>'


def _explained_charts(drawn: Sequence[Figure], numbers: Table) -> str:
    if not drawn:
        return ""
    table = markup.table(numbers)
    return f"{_charts(drawn)}<details><summary>The numbers behind these charts</summary>{table}</details>"


def _history(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    """The lines, the changes of level, those of the environment; empty where there is but one commit."""
    found = (tables.level_table(comparison), tables.environment_table(comparison))
    listed = "".join(markup.table(table) for table in found if table.rows)
    return _explained_charts(drawn, tables.history_table(comparison)) + listed


def _stream_gains(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    if not drawn:
        return (
            '<p class="notice">TrainStep was not timed both on one stream and with streams of its choice, so there is'
            " nothing to compare.</p>"
        )
    return f"{_charts(drawn)}{markup.table(step_tables.stream_table(comparison))}"


def _streams(comparison: Comparison, drawn: Sequence[Figure]) -> str:
    """The timelines and, always in sight, which variants have none and why."""
    if not comparison.timelines:
        return '<p class="notice">No Kitsune variant was measured, so there is no step to show.</p>'
    return f"{_charts(drawn)}{markup.table(step_tables.plan_table(comparison))}"


def _reading(comparison: Comparison) -> str:
    text = Template(_asset("reading.html")).substitute(
        margin=f"{100 * comparison.margin:g}%", tolerance=f"{100 * LOSS_TOLERANCE:g}%"
    )
    recipes, facts = markup.table(tables.recipe_table(comparison)), markup.table(tables.facts_table(comparison))
    return (
        f"{text}<details><summary>How each variant is set up</summary>{recipes}</details>"
        f"<details><summary>Facts of the machine</summary>{facts}</details>"
    )


def _section(section: _Section) -> str:
    intro = f"<p>{escape(section.intro)}</p>" if section.intro else ""
    return f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>{intro}{section.body}</section>'


def _charts(drawn: Sequence[Figure]) -> str:
    if not drawn:
        return ""
    cards = "".join(map(_card, drawn))
    notice = '<p class="unscripted">Charts need scripts; the tables hold the numbers.</p>'
    return f'{notice}<div class="charts">{cards}</div>'


def _card(figure: Figure) -> str:
    kind = ' class="wide"' if figure.is_wide else ""
    chart = f'<div id="{figure.name}" class="chart"></div>'
    return f"<figure{kind}><figcaption>{escape(figure.title)}</figcaption>{chart}</figure>"


def _embedded(drawn: Sequence[Figure]) -> str:
    """The figures as JSON that cannot end the script element it stands in."""
    described = json.dumps([vars(figure) for figure in drawn], separators=(",", ":"), allow_nan=False)
    return described.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _plotly_script() -> str:
    try:
        from plotly.offline.offline import get_plotlyjs  # the only use of Plotly, so nothing else needs it installed
    except ImportError as error:
        raise ReportError("the HTML report needs Plotly: pip install plotly (other outputs do not)") from error
    return str(get_plotlyjs())
