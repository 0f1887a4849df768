"""Whole documents for terminals, pull requests and programs: plain or coloured text, Markdown, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from harness import formats
from harness.fusions import StepFusions, UnreadableFusions
from harness.names import label
from harness.rows import Change, Comparison, LevelChange, Lost, Row, Series, Summary
from harness.stats import Estimate, Verdict
from harness.tables import (
    Cell,
    Medium,
    Table,
    Tone,
    change_table,
    damage_table,
    environment_table,
    level_table,
    skip_table,
    variant_table,
)

JSON_SCHEMA = 1
"""Raised when a field of the JSON document changes its meaning or goes away."""

_PAINT = {Tone.STRONG: "\x1b[1m", Tone.GOOD: "\x1b[34m", Tone.BAD: "\x1b[1;31m", Tone.FAINT: "\x1b[2m"}
_UNPAINT = "\x1b[0m"
_ENVIRONMENTS = "Changes of the environment"


def text(comparison: Comparison, *, colour: bool = False) -> str:
    """The comparison for a terminal; ``colour`` adds ANSI escapes, the words are the same."""
    parts = [
        verdict_line(comparison),
        _header(comparison),
        _text_table(variant_table(comparison).on(Medium.TEXT), colour),
    ]
    parts += _summary_lines(comparison)
    changes = change_table(comparison)
    if changes.rows:
        parts += ["", f"{_change_title(comparison)}", "", _text_table(changes.on(Medium.TEXT), colour)]
    for title, table in (("Changes of level", level_table(comparison)), (_ENVIRONMENTS, environment_table(comparison))):
        if table.rows:
            parts += ["", title, "", _text_table(table.on(Medium.TEXT), colour)]
    for title, table in (("Not measured", skip_table(comparison)), ("Damaged", damage_table(comparison))):
        if table.rows:
            parts += ["", title, "", *(_sentence(row) for row in table.rows)]
    parts += [f"\nnote: {formats.one_line(note)}" for note in comparison.notes]
    return "\n".join(parts) + "\n"


def markdown(comparison: Comparison) -> str:
    """The comparison as GitHub's Markdown, for pull requests."""
    parts = [f"## {_escaped(verdict_line(comparison))}", "", _escaped(_header(comparison)).replace("\n", "  \n")]
    changes = change_table(comparison)
    if changes.rows:
        parts += ["", f"### {_escaped(_change_title(comparison))}", "", _markdown_table(changes.on(Medium.TEXT))]
    for title, table in (("Changes of level", level_table(comparison)), (_ENVIRONMENTS, environment_table(comparison))):
        if table.rows:
            parts += ["", f"### {title}", "", _markdown_table(table.on(Medium.TEXT))]
    parts += ["", "### Variants", "", _markdown_table(variant_table(comparison).on(Medium.TEXT)), ""]
    parts += [_escaped(line) + "  " for line in _summary_lines(comparison) if line]
    for title, table in (("Not measured", skip_table(comparison)), ("Damaged", damage_table(comparison))):
        if table.rows:
            parts += ["", f"### {title}", "", _markdown_table(table)]
    parts += [f"\n> {_escaped(formats.one_line(note))}" for note in comparison.notes]
    return "\n".join(parts) + "\n"


def json_document(comparison: Comparison) -> str:
    """The comparison for programs.

    Times are seconds per step, those of fused parts microseconds (``_us``); memory is bytes. ``ratio`` objects are time
    over the reference's time, with null for bounds that cannot be claimed. ``break_even_steps`` is a number, "never",
    or null where unknown.
    """
    document = {
        "schema": JSON_SCHEMA,
        "machine": comparison.machine,
        "facts": dict(comparison.facts),
        "head": _commit_fields(comparison, comparison.head.sha),
        "base": None if comparison.base is None else _commit_fields(comparison, comparison.base.sha),
        "commits": [commit.sha for commit in comparison.commits],
        "margin": comparison.margin,
        "regressions": comparison.regressions,
        "rows": [_row_fields(row) for row in comparison.rows],
        "changes": [_change_fields(change) for change in comparison.changes],
        "level_changes": [
            _level_change_fields(series, change) for series in comparison.history for change in series.changes
        ],
        "environment_changes": [
            {"before": entry.before.sha, "commit": entry.commit.sha, "facts": entry.facts}
            for entry in comparison.environment_changes
        ],
        "lost": [_lost_fields(lost) for lost in comparison.lost],
        "summaries": [_summary_fields(summary) for summary in comparison.summaries],
        "skips": [
            {
                "status": group.status,
                "reason": group.reason,
                "variants": group.variants,
                "cases": [vars(case) for case in group.cases],
            }
            for group in comparison.skips
        ],
        "fusions": [_fusion_fields(entry) for entry in comparison.fusions],
        "notes": comparison.notes,
        "damage": [{"path": str(d.path), "line": d.line, "problem": d.problem} for d in comparison.damage],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def verdict_line(comparison: Comparison) -> str:
    """The outcome in a line: regressions where there is a base, else how Kitsune stands to eager."""
    if comparison.base is not None and (comparison.changes or comparison.lost):
        found = formats.counted(comparison.regressions, "regression") if comparison.regressions else "No regression"
        judged = formats.counted(len(comparison.changes) + len(comparison.lost), "comparison")
        unclear = comparison.since_base[Verdict.INCONCLUSIVE]
        told = f" found in {judged}" + (f", {unclear} of them inconclusive" if unclear else "")
        return f"{found}{told} ({comparison.base.short} → {comparison.head.short})"
    if not any(row.is_product for row in comparison.rows):
        return f"No variant of Kitsune was measured ({comparison.head.short})"
    tally = comparison.against_eager
    rows = formats.counted(sum(tally.values()), "row")
    return f"Kitsune faster than eager in {tally[Verdict.FASTER]} of {rows} ({comparison.head.short})"


def _header(comparison: Comparison) -> str:
    machine = formats.one_line(f"{comparison.machine}: {formats.machine(comparison.facts)}")
    lines = [f"machine  {machine}", f"commit   {formats.one_line(formats.commit(comparison.head))}"]
    if comparison.base == comparison.head:
        lines.append("against  earlier runs of the same commit")
    elif comparison.base is not None:
        lines.append(f"against  {formats.one_line(formats.commit(comparison.base))}")
    lines.append(f"margin   {100 * comparison.margin:g}% of time, or twice the noise; intervals are 95%")
    return "\n".join(lines) + "\n"


def _summary_lines(comparison: Comparison) -> list[str]:
    lines = ["* fastest in its precision among the variants that are not Kitsune's"]
    for summary in comparison.summaries:
        peer = summary.over_peer
        over_peer = "" if peer is None else f", {formats.ratio_with_interval(peer)}× over the best peer"
        lines.append(
            f"{formats.one_line(label(summary.variant))}, {summary.precision}, {summary.device}:"
            f" {formats.ratio_with_interval(summary.over_eager)}× over eager{over_peer}"
            f" (geometric mean of {formats.counted(summary.cases, 'case')})"
        )
    return lines


def _change_title(comparison: Comparison) -> str:
    assert comparison.base is not None
    since = "earlier runs" if comparison.base == comparison.head else comparison.base.short
    return f"Change since {since}, each as a multiple of its control in the same processes"


def _text_table(table: Table, colour: bool) -> str:
    headings = tuple(Cell(column.heading, tone=Tone.FAINT) for column in table.columns)
    lines = [[replace(cell, text=formats.one_line(cell.text)) for cell in line] for line in (headings, *table.rows)]
    widths = [max(len(line[index].text) for line in lines) for index in range(len(table.columns))]
    return "\n".join(_text_line(line, table, widths, colour) for line in lines)


def _text_line(line: Sequence[Cell], table: Table, widths: Sequence[int], colour: bool) -> str:
    cells = []
    for cell, column, width in zip(line, table.columns, widths, strict=True):
        padded = cell.text.rjust(width) if column.numeric else cell.text.ljust(width)
        cells.append(f"{_PAINT[cell.tone]}{padded}{_UNPAINT}" if colour and cell.tone in _PAINT else padded)
    return "  ".join(cells).rstrip()


def _sentence(row: Sequence[Cell]) -> str:
    return "  " + ": ".join(formats.one_line(cell.text) for cell in row)


def _markdown_table(table: Table) -> str:
    rows = [
        [column.heading for column in table.columns],
        ["---:" if column.numeric else "---" for column in table.columns],
        *([_markdown_cell(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _markdown_cell(cell: Cell) -> str:
    text = _escaped(formats.one_line(cell.text))
    return f"**{text}**" if text and cell.tone in (Tone.STRONG, Tone.BAD) else text


def _escaped(text: str) -> str:
    """Text with nothing left that Markdown or HTML would act on."""
    for character in "\\`*_[]|~":
        text = text.replace(character, "\\" + character)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _commit_fields(comparison: Comparison, sha: str) -> dict[str, object]:
    commit = next(entry for entry in comparison.commits if entry.sha == sha)
    return {**vars(commit), "measured": commit.measured.isoformat()}


def _row_fields(row: Row) -> dict[str, object]:
    fields: dict[str, object] = {
        **vars(row),
        "case": vars(row.case),
        "ratio": _estimate_fields(row.ratio),
        "verdict": None if row.verdict is None else row.verdict.value,
        "peer_ratio": _estimate_fields(row.peer_ratio),
        "peer_verdict": None if row.peer_verdict is None else row.peer_verdict.value,
        "parity": None if row.parity is None else row.parity.value,
        "kitsune": None if row.kitsune is None else dict(row.kitsune),
    }
    if row.break_even_steps == math.inf:
        fields["break_even_steps"] = "never"
    if row.loss_gap is not None and not math.isfinite(row.loss_gap):
        fields["loss_gap"] = None
    return fields


def _change_fields(change: Change) -> dict[str, object]:
    return {
        **vars(change),
        "case": vars(change.case),
        "base": _estimate_fields(change.base),
        "head": _estimate_fields(change.head),
        "ratio": _estimate_fields(change.ratio),
        "verdict": change.verdict.value,
    }


def _level_change_fields(series: Series, change: LevelChange) -> dict[str, object]:
    commits = {"before": change.before.sha, "first": change.first.sha, "latest": change.latest.sha}
    return {"case": vars(series.case), "variant": series.variant, **vars(change), **commits}


def _lost_fields(lost: Lost) -> dict[str, object]:
    return {
        "case": vars(lost.case),
        "variant": lost.skip.variant,
        "status": lost.skip.status,
        "reason": lost.skip.reason,
    }


def _summary_fields(summary: Summary) -> dict[str, object]:
    return {
        **vars(summary),
        "over_eager": summary.over_eager.ratio,
        "over_eager_interval": _estimate_fields(summary.over_eager),
        "over_peer": None if summary.over_peer is None else summary.over_peer.ratio,
        "over_peer_interval": _estimate_fields(summary.over_peer),
    }


def _fusion_fields(entry: StepFusions | UnreadableFusions) -> dict[str, object]:
    """``gain`` is the unfused step's time over the fused one's; all three are null where they were not measured."""
    if isinstance(entry, UnreadableFusions):
        return {**vars(entry), "case": vars(entry.case)}
    measured = entry.fused.missing is None
    return {
        "case": vars(entry.case),
        "precision": entry.precision,
        "variants": entry.variants,
        "replaced": [vars(parts) for parts in entry.replaced],
        "left": [vars(parts) for parts in entry.left],
        "won_us": entry.won_us,
        "unfused_seconds": entry.unfused.seconds if measured else None,
        "fused_seconds": entry.fused.seconds,
        "gain": _estimate_fields(entry.fused.gain),
    }


def _estimate_fields(estimate: Estimate | None) -> dict[str, object] | None:
    if estimate is None:
        return None
    low, high = (estimate.low, estimate.high) if estimate.has_interval else (None, None)
    return {**vars(estimate), "low": low, "high": high}
