"""Two variants or two machines side by side, as text, Markdown and JSON: the counterpart of :mod:`harness.render`."""

from __future__ import annotations

from harness import formats
from harness.render import (
    JSON_SCHEMA,
    contrast_fields,
    damage_fields,
    encoded,
    escaped,
    markdown_table,
    text_table,
)
from harness.rows import Side, SideBySide
from harness.stats import Verdict
from harness.tables import Medium, Table, contrast_table


def text(sides: SideBySide, *, shown: SideBySide | None = None, colour: bool = False) -> str:
    """The sides for a terminal; ``shown`` are the rows listed, the outcome is of all. None lists all."""
    parts = [outcome(sides), *_header(sides), "", text_table(_table(shown or sides), colour)]
    parts += [f"\ndamaged: {entry.path}: {formats.one_line(entry.problem)}" for entry in sides.damage]
    parts += [f"\nnote: {formats.one_line(note)}" for note in sides.notes]
    return "\n".join(parts) + "\n"


def markdown(sides: SideBySide, *, shown: SideBySide | None = None) -> str:
    """The sides as GitHub's Markdown; ``shown`` as in :func:`text`."""
    parts = [f"## {escaped(outcome(sides))}", "", *(escaped(line) + "  " for line in _header(sides)), ""]
    parts.append(markdown_table(_table(shown or sides)))
    parts += [f"\n> damaged: {escaped(f'{entry.path}: {formats.one_line(entry.problem)}')}" for entry in sides.damage]
    parts += [f"\n> {escaped(formats.one_line(note))}" for note in sides.notes]
    return "\n".join(parts) + "\n"


def json_document(sides: SideBySide, *, shown: SideBySide | None = None) -> str:
    """The sides for programs, as docs/compare.schema.json describes them; ``shown`` as in :func:`text`."""
    document = {
        "schema": JSON_SCHEMA,
        "kind": sides.kind,
        "base": _side_fields(sides.base),
        "head": _side_fields(sides.head),
        "margins": sides.margins,
        "regressions": sides.regressions,
        "contrasts": [contrast_fields(entry) for entry in (shown or sides).contrasts],
        "notes": sides.notes,
        "damage": damage_fields(sides.damage),
    }
    return encoded(document)


def outcome(sides: SideBySide) -> str:
    """In how many rows the second side takes less, in how many more, and in how many that is open."""
    verdicts = [entry.verdict for entry in sides.contrasts]
    less, more, unclear = map(verdicts.count, (Verdict.FASTER, Verdict.SLOWER, Verdict.INCONCLUSIVE))
    counts = f"less than {sides.base.label} in {less} of {formats.counted(len(verdicts), 'row')}, more in {more}"
    return f"{sides.head.label} takes {counts}; {unclear} inconclusive"


def _header(sides: SideBySide) -> list[str]:
    lines = []
    if sides.kind == "variants":
        lines.append(f"machine  {sides.head.machine}: {formats.machine(sides.head.facts)}")
    else:
        lines += [f"machine  {side.machine}: {formats.machine(side.facts)}" for side in (sides.base, sides.head)]
    lines.append(f"commit   {formats.commit(sides.head.commit)}")
    margins = ", ".join(f"{100 * margin:g}% of {metric}" for metric, margin in sides.margins.items())
    lines.append(f"margin   {margins}, or twice the noise; intervals are 95%")
    return [formats.one_line(line) for line in lines]


def _table(sides: SideBySide) -> Table:
    table = contrast_table(sides.contrasts, sides.base.label, sides.head.label)
    return (table.without("variant") if sides.kind == "variants" else table).on(Medium.TEXT)


def _side_fields(side: Side) -> dict[str, object]:
    return {
        "label": side.label,
        "machine": side.machine,
        "facts": dict(side.facts),
        "commit": {**vars(side.commit), "measured": side.commit.measured.isoformat()},
    }
