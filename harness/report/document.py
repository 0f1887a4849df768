"""The shell of a page: one HTML file with its style, scripts and charts in it, of sections that may be folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from harness.report import markup, style
from harness.report.figures import Figure
from harness.report.header import Header, header
from harness.report.packing import compact, packed

_FOLDER = Path(__file__).resolve().parent
_SCRIPTS = ("charts.js", "tables.js", "views.js")


class ReportError(Exception):
    """The report cannot be made. The message says what to do."""


@dataclass(frozen=True)
class Section:
    """A part of the page with a link to it; without a body it has nothing to say."""

    link: str
    title: str
    intro: str
    body: str
    folds: bool = True

    @property
    def anchor(self) -> str:
        """The identifier that links lead to."""
        return self.link.lower().replace(" ", "-")


def document(title: str, top: Header, sections: Sequence[Section], figures: Sequence[Figure]) -> str:
    """The whole page, Plotly's script included. Sections without a body are left out.

    Args:
        figures: all that sections have cards for, by :func:`cards` or :func:`card`.

    Raises:
        ReportError: Plotly is not installed.
    """
    shown = [section for section in sections if section.body]
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=asset("page.css"),
        header=header(top, [(section.anchor, section.link) for section in shown]),
        sections="\n".join(map(_section, shown)),
        dark=compact(style.DARK),
        figures=packed(compact([figure.drawing() for figure in figures])),
        plotly=packed(_plotly_script()),
        script="\n".join(map(asset, _SCRIPTS)),
    )


def _section(section: Section) -> str:
    """Open, so that it can be read and folded without scripts; those fold it on a phone."""
    title = f"<h2>{escape(section.title)}</h2>"
    content = (f"<p>{escape(section.intro)}</p>" if section.intro else "") + section.body
    if section.folds:
        return (
            f'<section id="{section.anchor}"><details class="fold" open><summary>{title}</summary>{content}</details>'
            "</section>"
        )
    return f'<section id="{section.anchor}">{title}{content}</section>'


def cards(drawn: Sequence[Figure]) -> str:
    """Cards side by side, as many as there is room for; nothing where there are none."""
    if not drawn:
        return ""
    each = "".join(map(card, drawn))
    notice = '<p class="unscripted">Charts need scripts; the tables hold the numbers.</p>'
    return f'{notice}<div class="charts">{each}</div>'


def card(figure: Figure) -> str:
    """The place where a chart is drawn, under its title."""
    kind = ' class="wide"' if figure.is_wide else ""
    title = escape(figure.title)
    height = figure.layout["height"]
    heights = f"--height: {height}px; --narrow: {figure.narrow_layout.get('height', height)}px"
    chart = f'<div id="{figure.name}" class="chart" role="img" aria-label="{title}" style="{heights}"></div>'
    return f"<figure{kind}{markup.models(figure.model)}><figcaption>{title}</figcaption>{chart}</figure>"


def asset(name: str) -> str:
    """The text of a file of the page's."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _plotly_script() -> str:
    try:
        from plotly.offline.offline import get_plotlyjs  # the only use of Plotly, so nothing else needs it installed
    except ImportError as error:
        raise ReportError("the HTML report needs Plotly: pip install plotly (other outputs do not)") from error
    return str(get_plotlyjs())
