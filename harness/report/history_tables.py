"""The history's numbers as plain tables, one for each case: a row a commit, a column for each of Kitsune's forms.

There may be tens of thousands of numbers, so a cell is as little HTML as it can be, and nothing sorts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness import formats
from harness.names import label
from harness.report import markup, style
from harness.rows import LISTED_POINTS, Commit, Comparison, Series


def history_tables(comparison: Comparison) -> str:
    """Speed-ups over their controls with their intervals at the last measured commits, the latest first."""
    cases = dict.fromkeys(series.case for series in comparison.history if len(series.points) > 1)
    return "".join(
        f"<details{markup.models(case.model)}><summary>{escape(style.case_name(case))}</summary>"
        f"{_table([series for series in comparison.history if series.case == case], comparison.commits)}</details>"
        for case in cases
    )


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{text}" for text in texts)


def _named(commit: Commit) -> str:
    return commit.short if commit.url is None else markup.linked(commit.short, commit.url)


def _table(members: Sequence[Series], commits: Sequence[Commit]) -> str:
    values = [
        {
            point.commit.sha: formats.ratio_with_interval(point.ratio.inverted())
            for point in series.recent[-LISTED_POINTS:]
        }
        for series in members
    ]
    headings = "".join(
        f"<th scope=col>{escape(f'{label(entry.variant)} over {label(entry.control)}, {entry.precision}')}"
        for entry in members
    )
    rows = "".join(
        f"<tr><th scope=row>{_named(commit)}{_cells([entry.get(commit.sha, formats.ABSENT) for entry in values])}"
        for commit in reversed(commits)
        if any(commit.sha in entry for entry in values)
    )
    return (
        '<div class="scroller" tabindex="0"><table class="plain"><thead><tr><th scope=col>commit'
        f"{headings}<tbody>{rows}</table></div>"
    )
