"""What became worse, a card for each: by how much against what is allowed, since when, and how to measure it again."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness import formats
from harness.metrics import samples_of
from harness.names import label
from harness.regressions import Regression
from harness.report import markup, style
from harness.rows import LISTED_CHANGES
from harness.stats import Estimate, Verdict
from harness.tables import Subject

_WIDTH = 240
_HEIGHT = 26


def regression_list(found: Sequence[Regression], judged: Sequence[Verdict], growth: str | None = None) -> str:
    """The cards, or a sentence that there is nothing to list. Of lasting changes the first ones have a card.

    Args:
        found: as :func:`harness.regressions.regressions` orders them.
        judged: the verdicts of the comparison of two commits; empty where there was none.
        growth: what takes more memory, if that was not judged.
    """
    besides = [] if growth is None else [f"Beside what was judged, {escape(growth)}."]
    if not found:
        return _notice([_none_found(judged), *besides])
    lasting = [entry for entry in found if entry.is_level]
    shown = [*(entry for entry in found if not entry.is_level), *lasting[:LISTED_CHANGES]]
    notices = _notice(_unlisted(len(found) - len(shown))) + _notice(besides)
    return f'<ol class="regressions">{"".join(map(_card, shown))}</ol>{notices}'


def _notice(sentences: Sequence[str]) -> str:
    return f'<p class="notice">{" ".join(sentences)}</p>' if sentences else ""


def _unlisted(number: int) -> list[str]:
    if not number:
        return []
    told = f"Beside these, {formats.counted(number, 'smaller change')} for the worse lasted"
    return [f'{told}: they are among the "level_changes" of comparison.json.gz, under "Raw data".']


def _none_found(judged: Sequence[Verdict]) -> str:
    """What was looked at, and what of it is not known: an inconclusive comparison may hide a regression."""
    if not judged:
        return "None found in the history; no form of Kitsune was compared between the two commits."
    told = f"None found in {formats.counted(len(judged), 'comparison')} and in the history."
    unclear = judged.count(Verdict.INCONCLUSIVE)
    return f"{told} {unclear} of them inconclusive: more rounds would decide." if unclear else told


def _card(entry: Regression) -> str:
    kind = f"{'level' if entry.is_level else 'regression'}-{entry.metric}"
    if entry.is_level:
        kind += f"-{entry.after.short}"
    place = markup.identifier(kind, Subject(entry.case, entry.variant))
    title = f"{style.case_name(entry.case)}: {label(entry.variant)}, {entry.precision}"
    return (
        f'<li id="{escape(place)}"{markup.models(entry.case.model)}><h3>{escape(title)}</h3>{_contrast(entry)}'
        f"<p>{_since(entry)}</p>{markup.command(entry.command)}</li>"
    )


def _contrast(entry: Regression) -> str:
    if entry.ratio is None or entry.limit is None or entry.beyond is None:
        return f'<p class="worse">no longer measured<small>{escape(entry.reason or "")}</small></p>'
    allowed = f"{formats.percent_change(entry.limit)} allowed"
    if entry.ratio.has_interval:
        told = f"{formats.change(entry.ratio)} {entry.metric}"
        beyond = f"{allowed}, so at least {100 * entry.beyond:.1f} points beyond it"
    elif entry.p_value is not None:
        told = f"{formats.percent_change(entry.ratio.ratio)} {entry.metric}, lasting"
        beyond = f"{allowed}, and by chance with a probability of {entry.p_value:.2g}"
    else:
        told = f"{formats.change(entry.ratio, samples_of(entry.metric))} {entry.metric}"
        beyond = f"{allowed}, so {100 * entry.beyond:.1f} points beyond it"
    drawing = _drawing(entry.ratio, entry.limit)
    return f'<p class="worse">{escape(told)}<small>{escape(beyond)}</small></p>{drawing}'


def _since(entry: Regression) -> str:
    begin = "after" if entry.is_level else "against"
    return f"{markup.commit(entry.after)}, {begin} {markup.commit(entry.before)}"


def _drawing(ratio: Estimate, limit: float) -> str:
    """The interval of the change beside the band of what does not matter; readable without scripts."""
    low, high = (ratio.low, ratio.high) if ratio.has_interval else (ratio.ratio, ratio.ratio)
    least, most = min(1 / limit, low), max(high, limit)
    room = 0.08 * (most - least)

    def at(value: float) -> str:
        return f"{_WIDTH * (value - least + room) / (most - least + 2 * room):.1f}"

    middle = _HEIGHT / 2
    band = f'<rect class="band" x="{at(1 / limit)}" y="0" width="{float(at(limit)) - float(at(1 / limit)):.1f}"'
    return (
        f'<svg class="contrast" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="the change beside its margin">'
        f'{band} height="{_HEIGHT}"/><path class="none" d="M{at(1)} 0V{_HEIGHT}"/>'
        f'<path class="interval" d="M{at(low)} {middle}H{at(high)}"/>'
        f'<circle class="centre" cx="{at(ratio.ratio)}" cy="{middle}" r="4.5"/></svg>'
    )
