"""The top of the page: the outcome, the machine, the commits, the verdicts counted, and what to show."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from harness import formats, render, tables
from harness.report import markup
from harness.rows import Comparison, Tally
from harness.stats import Verdict


@dataclass(frozen=True)
class Header:
    """The outcome in a sentence and whether it is a bad one, facts as HTML by their names, and the models to choose
    from.
    """

    outcome: str
    is_bad: bool
    facts: Mapping[str, str]
    models: Collection[str]


def top(comparison: Comparison) -> Header:
    """What stands above a comparison of commits."""
    facts = {"Machine": escape(f"{comparison.machine}: {formats.machine(comparison.facts)}")}
    facts["Commit"] = markup.commit(comparison.head)
    if comparison.base is not None:
        earlier = comparison.base == comparison.head
        facts["Against"] = "earlier runs of the same commit" if earlier else markup.commit(comparison.base)
    facts["Measured"] = f"{comparison.head.measured:%Y-%m-%d %H:%M} UTC"
    cases = [*comparison.cases, *(series.case for series in comparison.history)]
    models = dict.fromkeys(case.model for case in cases)
    return Header(render.verdict_line(comparison), comparison.regressions > 0, facts, models)


def header(above: Header, sections: Sequence[tuple[str, str]]) -> str:
    """The outcome, the facts, and a bar with links to the sections and the choice of a model.

    Args:
        sections: their identifiers, each with the text of its link.
    """
    links = "".join(f'<a href="#{anchor}">{escape(text)}</a>' for anchor, text in sections)
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in above.facts.items())
    return "\n".join(
        (
            "<h1>Kitsune benchmarks</h1>",
            f'<p class="outcome {"bad" if above.is_bad else "good"}">{escape(above.outcome)}</p>',
            f'<dl class="facts">{listed}</dl>',
            f'<nav aria-label="Sections">{_model_picker(above.models)}{links}</nav>',
        )
    )


def _model_picker(names: Collection[str]) -> str:
    """A choice that everything on the page follows; nothing where there is no choice."""
    if len(names) < 2:
        return ""
    choices = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in names)
    return f'<label>model <select id="model"><option value="">all</option>{choices}</select></label>'


def summary(comparison: Comparison) -> str:
    """Verdicts counted, what to know of the comparison, and means."""
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
    means = markup.table(tables.summary_table(comparison.summaries))
    return f'<div class="tallies">{tiles}</div>{"".join(notices)}{means}'


def _tally(title: str, tally: Tally) -> str:
    counts = "".join(
        f'<li class="{verdict.value if tally[verdict] else "none"}"><b>{tally[verdict]}</b> {verdict.value}</li>'
        for verdict in Verdict
    )
    return f'<div class="tally"><h3>{escape(title)}</h3><ul>{counts}</ul></div>'
