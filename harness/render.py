"""Whole documents for terminals, pull requests and programs: plain or coloured text, Markdown, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness import formats
from harness.continuation import Continuation
from harness.fusions import StepFusions, UnreadableFusions
from harness.metrics import word
from harness.names import label
from harness.rows import Change, Comparison, Contrast, LevelChange, Lost, Row, Series, Summary
from harness.stats import Estimate, Verdict
from harness.step_phases import NoPhases, StepPhases
from harness.step_tables import phase_table
from harness.store import Damage
from harness.tables import (
    Cell,
    Medium,
    Table,
    Tone,
    change_table,
    contrast_table,
    damage_table,
    environment_table,
    level_table,
    level_title,
    skip_table,
    variant_table,
)
from harness.zoo_tables import zoo_table

JSON_SCHEMA = 2
"""Raised when a field of the JSON document changes its meaning or goes away."""

_PAINT = {Tone.STRONG: "\x1b[1m", Tone.GOOD: "\x1b[34m", Tone.BAD: "\x1b[1;31m", Tone.FAINT: "\x1b[2m"}
_UNPAINT = "\x1b[0m"
_PEER_MARK_MEANS = "* fastest in its precision among the variants that are not Kitsune's"
_ZOO_TITLE = "The zoo: models of many kinds, each beside its best peer"


def text(
    comparison: Comparison, *, shown: Comparison | None = None, colour: bool = False, commands: bool = False
) -> str:
    """The comparison for a terminal.

    Args:
        shown: the part of it whose rows are listed; the outcome and the means are of the whole. None lists all.
        colour: adds ANSI escapes; the words are the same.
        commands: lists for every row the command that measures it again; without it, those of regressions alone.
    """
    shown = shown or comparison
    variants = variant_table(shown)
    parts = [verdict_line(comparison), _header(comparison)]
    if variants.rows:
        parts += [text_table(variants.on(Medium.TEXT), colour), _PEER_MARK_MEANS, *_summary_lines(comparison.summaries)]
    zoo = zoo_table(shown)
    if zoo.rows:
        parts += ["", _ZOO_TITLE, "", text_table(zoo.on(Medium.TEXT), colour)]
        parts += _summary_lines(comparison.zoo_summaries)
    for title, table in _change_tables(shown):
        parts += ["", title, "", text_table(table.on(Medium.TEXT), colour)]
    divided = phase_table(shown)
    if divided.rows:
        parts += ["", "Phases of a step, profiled", "", text_table(divided.on(Medium.TEXT), colour)]
    again = _commands(shown, every=commands)
    if again:
        parts += ["", "To measure again", "", *(f"  {formats.one_line(line)}" for line in again)]
    for title, table in (("Not measured", skip_table(comparison)), ("Damaged", damage_table(comparison.damage))):
        if table.rows:
            parts += ["", title, "", *(_sentence(row) for row in table.rows)]
    parts += [f"\nnote: {formats.one_line(note)}" for note in comparison.notes]
    return "\n".join(parts) + "\n"


def markdown(comparison: Comparison, *, shown: Comparison | None = None, commands: bool = False) -> str:
    """The comparison as GitHub's Markdown, for pull requests; the arguments are those of :func:`text`."""
    shown = shown or comparison
    parts = [f"## {escaped(verdict_line(comparison))}", "", escaped(_header(comparison)).replace("\n", "  \n")]
    for title, table in _change_tables(shown):
        parts += ["", f"### {escaped(title)}", "", markdown_table(table.on(Medium.TEXT))]
    again = _commands(shown, every=commands)
    if again:
        parts += ["", "### To measure again", "", *(f"    {formats.one_line(line)}" for line in again)]
    variants = variant_table(shown)
    if variants.rows:
        parts += ["", "### Variants", "", markdown_table(variants.on(Medium.TEXT)), ""]
        parts += [escaped(line) + "  " for line in (_PEER_MARK_MEANS, *_summary_lines(comparison.summaries))]
    zoo = zoo_table(shown)
    if zoo.rows:
        parts += ["", f"### {_ZOO_TITLE}", "", markdown_table(zoo.on(Medium.TEXT)), ""]
        parts += [escaped(line) + "  " for line in _summary_lines(comparison.zoo_summaries)]
    for title, table in (("Not measured", skip_table(comparison)), ("Damaged", damage_table(comparison.damage))):
        if table.rows:
            parts += ["", f"### {title}", "", markdown_table(table)]
    parts += [f"\n> {escaped(formats.one_line(note))}" for note in comparison.notes]
    return "\n".join(parts) + "\n"


def json_document(comparison: Comparison, *, shown: Comparison | None = None) -> str:
    """The comparison for programs, as docs/compare.schema.json describes it; ``shown`` as in :func:`text`.

    Times are seconds per step, those of fused parts microseconds (``_us``); memory is bytes. ``ratio`` objects are time
    over the reference's time, with null for bounds that cannot be claimed. Break-even is a number of steps, "never", or
    null where unknown.
    """
    shown = shown or comparison
    again, since_base = comparison.commands(), comparison.commands_since_base()
    document = {
        "schema": JSON_SCHEMA,
        "kind": "commits",
        "machine": comparison.machine,
        "facts": dict(comparison.facts),
        "head": _commit_fields(comparison, comparison.head.sha),
        "base": None if comparison.base is None else _commit_fields(comparison, comparison.base.sha),
        "commits": [commit.sha for commit in comparison.commits],
        "margin": comparison.margin,
        "margins": comparison.margins,
        "regressions": comparison.regressions,
        "rows": [{**_row_fields(row), "reproduce": again[row.case, row.variant]} for row in shown.rows],
        "changes": [
            {**_change_fields(change), "reproduce": since_base[change.case, change.variant]} for change in shown.changes
        ],
        "lost": [{**_lost_fields(lost), "reproduce": since_base[lost.case, lost.skip.variant]} for lost in shown.lost],
        "contrasts": [
            {**contrast_fields(entry), "reproduce": since_base[entry.case, entry.variant]} for entry in shown.contrasts
        ],
        "level_changes": [
            _level_change_fields(series, change) for series in shown.history for change in series.changes
        ],
        "environment_changes": [
            {"before": entry.before.sha, "commit": entry.commit.sha, "facts": entry.facts}
            for entry in comparison.environment_changes
        ],
        "summaries": [_summary_fields(summary) for summary in comparison.summaries],
        "zoo_summaries": [_summary_fields(summary) for summary in comparison.zoo_summaries],
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
        "phases": [_phase_fields(entry) for entry in shown.phases],
        "notes": comparison.notes,
        "damage": damage_fields(comparison.damage),
    }
    return encoded(document)


def encoded(document: Mapping[str, object]) -> str:
    """JSON without NaN and infinities, which are none."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def verdict_line(comparison: Comparison) -> str:
    """The outcome in a line: regressions where there is a base, else how Kitsune stands to eager."""
    judgements = comparison.judgements
    if comparison.base is not None and (judgements or comparison.lost):
        found = formats.counted(comparison.regressions, "regression") if comparison.regressions else "No regression"
        judged = formats.counted(len(judgements) + len(comparison.lost), "comparison")
        unclear = judgements.count(Verdict.INCONCLUSIVE)
        told = f" found in {judged}" + (f", {unclear} of them inconclusive" if unclear else "")
        return f"{found}{told} ({comparison.base.short} → {comparison.head.short})"
    if not any(row.is_product for row in comparison.rows):
        return f"No variant of Kitsune was measured ({comparison.head.short})"
    tally = comparison.against_eager
    rows = formats.counted(sum(tally.values()), "row")
    unclear = tally[Verdict.INCONCLUSIVE]
    told = f", {unclear} of them inconclusive" if unclear else ""
    return f"Kitsune faster than eager in {tally[Verdict.FASTER]} of {rows}{told} ({comparison.head.short})"


def _header(comparison: Comparison) -> str:
    machine = formats.one_line(f"{comparison.machine}: {formats.machine(comparison.facts)}")
    lines = [f"machine  {machine}", f"commit   {formats.one_line(formats.commit(comparison.head))}"]
    if comparison.base == comparison.head:
        lines.append("against  earlier runs of the same commit")
    elif comparison.base is not None:
        lines.append(f"against  {formats.one_line(formats.commit(comparison.base))}")
    margins = {"ratio": comparison.margin, **comparison.margins}
    told = ", ".join(f"{100 * margin:g}% of {name}" for name, margin in margins.items())
    lines.append(f"margin   {told}, or twice the noise; intervals are 95%")
    return "\n".join(lines) + "\n"


def _summary_lines(summaries: Sequence[Summary]) -> list[str]:
    lines = []
    for summary in summaries:
        peer = summary.over_peer
        over_peer = "" if peer is None else f", {formats.speedup(peer)} over the best peer"
        lines.append(
            f"{formats.one_line(label(summary.variant))}, {summary.precision}, {summary.device}:"
            f" {formats.speedup(summary.over_eager)} over eager{over_peer}"
            f" (geometric mean of {formats.counted(summary.cases, 'case')})"
        )
    return lines


def _change_tables(shown: Comparison) -> list[tuple[str, Table]]:
    """The tables of changes that have rows, each with its title."""
    tables = [*_tables_since_base(shown), (level_title(shown), level_table(shown))]
    tables.append(("Changes of the environment", environment_table(shown)))
    return [(title, table) for title, table in tables if table.rows]


def _tables_since_base(shown: Comparison) -> list[tuple[str, Table]]:
    if shown.base is None:
        return []
    base = "earlier runs" if shown.base == shown.head else shown.base.short
    return [
        (_change_title(shown), change_table(shown)),
        (_metrics_title(shown, base), contrast_table(shown.contrasts, base, shown.head.short)),
    ]


def _metrics_title(shown: Comparison, base: str) -> str:
    return f"Change since {base} in {', '.join(dict.fromkeys(entry.metric for entry in shown.contrasts))}"


def _commands(shown: Comparison, *, every: bool) -> list[str]:
    """How to measure again what regressed, or everything that is shown; what one command measures is there once."""
    wanted = [(lost.case, lost.skip.variant) for lost in shown.lost]
    judged = [(change.case, change.variant, change.verdict) for change in shown.changes]
    judged += [(contrast.case, contrast.variant, contrast.verdict) for contrast in shown.contrasts]
    wanted += [(case, variant) for case, variant, verdict in judged if every or verdict is Verdict.SLOWER]
    since_base = shown.commands_since_base()
    found = [since_base[key] for key in wanted]
    return list(dict.fromkeys([*found, *(shown.commands().values() if every else ())]))


def _change_title(comparison: Comparison) -> str:
    assert comparison.base is not None
    since = "earlier runs" if comparison.base == comparison.head else comparison.base.short
    return f"Change since {since}, each as a multiple of its control in the same processes"


def text_table(table: Table, colour: bool) -> str:
    """A table in columns of equal width, one line a row."""
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


def markdown_table(table: Table) -> str:
    """A table as GitHub's Markdown."""
    rows = [
        [column.heading for column in table.columns],
        ["---:" if column.numeric else "---" for column in table.columns],
        *([_markdown_cell(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _markdown_cell(cell: Cell) -> str:
    text = escaped(formats.one_line(cell.text))
    return f"**{text}**" if text and cell.tone in (Tone.STRONG, Tone.BAD) else text


def escaped(text: str) -> str:
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
        "ratio": estimate_fields(row.ratio),
        "verdict": None if row.verdict is None else row.verdict.value,
        "peer_ratio": estimate_fields(row.peer_ratio),
        "peer_verdict": None if row.peer_verdict is None else row.peer_verdict.value,
        "parity": None if row.parity is None else row.parity.value,
        "continuation": _continuation_fields(row.continuation),
        "kitsune": None if row.kitsune is None else dict(row.kitsune),
        "modes": dict(row.modes),
        "fragmentation_bytes": row.fragmentation_bytes,
    }
    for name in ("break_even_steps", "warm_break_even_steps"):
        if fields[name] == math.inf:
            fields[name] = "never"
    if row.loss_gap is not None and not math.isfinite(row.loss_gap):
        fields["loss_gap"] = None
    return fields


def _continuation_fields(found: Continuation | None) -> dict[str, object] | None:
    """The losses and what is made of them; a difference that is infinite is null."""
    if found is None:
        return None
    derived = {"gap": found.gap, "noise": found.noise}
    finite = {name: value if math.isfinite(value) else None for name, value in derived.items()}
    return {**vars(found), **finite, "agrees": found.agrees}


def _change_fields(change: Change) -> dict[str, object]:
    return {
        **vars(change),
        "case": vars(change.case),
        "base": estimate_fields(change.base),
        "head": estimate_fields(change.head),
        "ratio": estimate_fields(change.ratio),
        "verdict": change.verdict.value,
    }


def _level_change_fields(series: Series, change: LevelChange) -> dict[str, object]:
    commits = {"before": change.before.sha, "first": change.first.sha, "latest": change.latest.sha}
    named = {"case": vars(series.case), "variant": series.variant, "control": series.control}
    return {**named, **vars(change), **commits}


def contrast_fields(entry: Contrast) -> dict[str, object]:
    """A metric on two sides, for programs."""
    return {
        **vars(entry),
        "case": vars(entry.case),
        "ratio": estimate_fields(entry.ratio),
        "verdict": word(entry.metric, entry.verdict),
    }


def damage_fields(damage: Sequence[Damage]) -> list[dict[str, object]]:
    """What could not be read, for programs."""
    return [{"path": str(entry.path), "line": entry.line, "problem": entry.problem} for entry in damage]


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
        "over_eager_interval": estimate_fields(summary.over_eager),
        "over_peer": None if summary.over_peer is None else summary.over_peer.ratio,
        "over_peer_interval": estimate_fields(summary.over_peer),
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
        "gain": estimate_fields(entry.fused.gain),
    }


def _phase_fields(entry: StepPhases | NoPhases) -> dict[str, object]:
    """Either the phases, or the ``reason`` why there are none."""
    fields: dict[str, object] = {**vars(entry), "case": vars(entry.case)}
    if isinstance(entry, StepPhases):
        fields |= {"seconds": dict(entry.seconds), "trace": None if entry.trace is None else str(entry.trace)}
    return fields


def estimate_fields(estimate: Estimate | None) -> dict[str, object] | None:
    """An estimate for programs: bounds that cannot be claimed are null."""
    if estimate is None:
        return None
    low, high = (estimate.low, estimate.high) if estimate.has_interval else (None, None)
    return {**vars(estimate), "low": low, "high": high}
