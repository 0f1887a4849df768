"""What was fused, a card for each case and precision: a sentence on what it is worth, and tables of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness import formats, step_tables
from harness.fusions import StepFusions, UnreadableFusions
from harness.names import label, precision_of
from harness.report import markup, style

_UNBROKEN_SPACE = "\u00a0"


def fusion_cards(fusions: Sequence[StepFusions | UnreadableFusions]) -> str:
    """The cards, and below them which plans cannot be read; nothing where nothing is known of fusion."""
    cards = "".join(_card(entry) for entry in fusions if isinstance(entry, StepFusions))
    grid = f'<div class="cards">{cards}</div>' if cards else ""
    return grid + "".join(_notice(entry) for entry in fusions if isinstance(entry, UnreadableFusions))


def _card(fusions: StepFusions) -> str:
    title = f"{style.case_name(fusions.case)}, {fusions.precision}"
    names = " and ".join(formats.one_line(label(variant)) for variant in fusions.variants)
    worth = f"{_by_themselves(fusions)} {_in_the_step(fusions)}"
    text = f"<p><small>{escape(names)}</small>{escape(worth)}</p>"
    replaced, left = markup.table(step_tables.fused_table(fusions)), markup.table(step_tables.unfused_table(fusions))
    tried = f"<details><summary>Tried and left: {fusions.num_left:,}</summary>{left}</details>" if left else ""
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return f"<figure{markup.models(fusions.case.model)}>{caption}{text}{replaced}{tried}</figure>"


def _by_themselves(fusions: StepFusions) -> str:
    if not fusions.num_replaced:
        return "Nothing was fused."
    parts = f"{formats.counted(fusions.num_replaced, 'part')} fused"
    if fusions.won_us is None:
        return f"{parts}, none of them timed by itself."
    return f"{parts}, which by themselves take {formats.seconds(fusions.won_us * 1e-6)} less."


def _in_the_step(fusions: StepFusions) -> str:
    stage = fusions.fused
    if stage.missing is not None:
        return f"What the step gains was not measured: {formats.one_line(stage.missing)}."
    times = f"{formats.seconds(fusions.unfused.seconds)} before, {formats.seconds(stage.seconds)} after"
    eagerly = ", which ran eagerly" if stage.mode == "eager" else ""
    if stage.gain is None:
        return f"The step on one stream took {times}{eagerly}, but not in the same processes."
    gain = f"{formats.ratio_with_interval(stage.gain)} ×".replace(" ", _UNBROKEN_SPACE)
    return f"The step on one stream is {gain} as fast: {times}{eagerly}."


def _notice(entry: UnreadableFusions) -> str:
    name = f"{style.case_name(entry.case)}, {label(entry.variant)}, {precision_of(entry.variant)}"
    told = f"{formats.one_line(name)}: {formats.one_line(entry.reason)}"
    return f'<p class="notice"{markup.models(entry.case.model)}>{escape(told)}</p>'
