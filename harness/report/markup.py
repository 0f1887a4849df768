"""Tables as HTML: all text escaped, sortable where scripts run."""

from __future__ import annotations

from html import escape

from harness.tables import Cell, Column, Medium, Table


def table(whole: Table) -> str:
    """The table's columns for a page; nothing where it has no rows."""
    shown = whole.on(Medium.PAGE)
    if not shown.rows:
        return ""
    headings = "".join(_heading(column) for column in shown.columns)
    rows = "".join(
        f"<tr>{''.join(_cell(cell, column) for cell, column in zip(row, shown.columns, strict=True))}</tr>"
        for row in shown.rows
    )
    return (
        f'<div class="scroller"><table class="sortable"><thead><tr>{headings}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _heading(column: Column) -> str:
    kind = ' class="numeric"' if column.numeric else ""
    return f'<th scope="col"{kind} title="{escape(column.meaning)}">{escape(column.heading)}</th>'


def _cell(cell: Cell, column: Column) -> str:
    classes = " ".join(filter(None, ("numeric" if column.numeric else "", cell.tone.value)))
    key = "" if cell.key is None else f' data-key="{cell.key!r}"'
    detail = "" if cell.detail is None else f"<small>{escape(cell.detail)}</small>"
    title = "" if cell.words is None else f' title="{escape(cell.text)}"'
    return f'<td class="{classes}"{key}{title}><span>{escape(cell.words or cell.text)}</span>{detail}</td>'
