"""Tables and commands as HTML: all text escaped; sorted, filtered and copied where scripts run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from urllib.parse import quote

from harness import formats
from harness.rows import Commit
from harness.selection import Case
from harness.tables import Cell, Column, Medium, Subject, Table, Tone

_HARMLESS = re.compile(r"(?i:https?)://[!-~]+|[A-Za-z0-9._~%/-]+")

Commands = Mapping[tuple[Case, str], str]
"""For variants of cases the command that measures them again."""


def table(whole: Table, *, anchor: str | None = None, commands: Commands | None = None) -> str:
    """The table's columns for a page; nothing where it has no rows.

    Args:
        anchor: what the identifiers of rows begin with, by which links lead to them; None for rows without.
        commands: of these, each row shows the one of its subject; None for a table without commands.
    """
    shown = whole.on(Medium.PAGE)
    if not shown.rows:
        return ""
    headings = "".join(_heading(column) for column in shown.columns)
    if commands is not None:
        headings += '<th scope="col" class="again" title="the command that measures this row again">again</th>'
    subjects = shown.subjects or (None,) * len(shown.rows)
    rows = "".join(
        f"<tr{_about(subject, anchor)}>"
        f"{''.join(_cell(cell, column) for cell, column in zip(row, shown.columns, strict=True))}"
        f"{'' if commands is None else _again(subject, anchor, commands)}"
        for row, subject in zip(shown.rows, subjects, strict=True)
    )
    return (
        f'<div class="scroller" tabindex="0"><table class="sortable"><thead><tr>{headings}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def models(*names: str) -> str:
    """The attribute by which an element is shown and hidden with these models."""
    return f' data-models="{escape(json.dumps(names))}"'


def identifier(anchor: str, subject: Subject) -> str:
    """Where links to a row lead: of ASCII alone, different for different subjects, the same in every report."""
    case = subject.case
    return "-".join([anchor, *(quote(part, safe="") for part in (case.name, case.device, subject.variant))])


def linked(text: str, address: str) -> str:
    """A link to an address of http or https or a path, encoded; anything else, such as a script, is no link."""
    if not _HARMLESS.fullmatch(address):
        return escape(text)
    return f'<a href="{escape(address)}" rel="noopener noreferrer">{escape(text)}</a>'


def commit(entry: Commit) -> str:
    """A commit as text writes it, its hash leading to its page where it has one."""
    text = formats.commit(entry)
    if entry.url is None:
        return escape(text)
    return linked(entry.short, entry.url) + escape(text.removeprefix(entry.short))


def command(text: str) -> str:
    """A command to copy: by hand, or by the button that scripts add."""
    return f'<code class="command">{escape(text)}</code>'


def _about(subject: Subject | None, anchor: str | None) -> str:
    if subject is None:
        return ""
    named = "" if anchor is None else f' id="{escape(identifier(anchor, subject))}"'
    return named + models(subject.case.model)


def _again(subject: Subject | None, anchor: str | None, commands: Commands) -> str:
    known = None if subject is None else commands.get((subject.case, subject.variant))
    if subject is None or known is None:
        return '<td class="again">'
    # A fragment is decoded once before it is compared with identifiers, whose percent signs are meant.
    link = f"#{quote(identifier(anchor, subject))}" if anchor is not None else ""
    row = f'<a href="{escape(link)}" title="link to this row">#</a>' if link else ""
    return f'<td class="again">{row}<details><summary title="the command">show</summary>{command(known)}</details>'


def _heading(column: Column) -> str:
    kind = ' class="numeric"' if column.numeric else ""
    return f'<th scope="col"{kind} title="{escape(column.meaning)}">{escape(column.heading)}</th>'


def _cell(cell: Cell, column: Column) -> str:
    """As little HTML as it can be: there may be tens of thousands."""
    tone = "" if cell.tone is Tone.PLAIN else cell.tone.value
    classes = " ".join(filter(None, ("numeric" if column.numeric else "", tone)))
    kind = f' class="{classes}"' if classes else ""
    key = "" if cell.key is None else f' data-key="{cell.key:.6g}"'
    detail = "" if cell.detail is None else f"<small>{escape(cell.detail)}</small>"
    title = "" if cell.words is None else f' title="{escape(cell.text)}"'
    shown = escape(cell.words or cell.text) if cell.link is None else linked(cell.words or cell.text, cell.link)
    return f"<td{kind}{key}{title}><span>{shown}</span>{detail}"
