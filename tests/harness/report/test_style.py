"""Colours that can be told apart: on light and on dark pages, and by readers who see few of them."""

import itertools
import math
import re
from pathlib import Path

import pytest

from harness.comparison import compare
from harness.report import figures, page, sample_figures, step_figures, style
from harness.store import Store
from tests.harness import sample

LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171b"
CHARTED = (
    "eager_amp", "compile_amp", "compile_reduce_overhead_amp", "handcaptured_amp", "handcaptured_compile_amp",
    "kitsune_dropin_amp", "kitsune_deferred_amp", "kitsune_trainstep_amp",
)  # fmt: skip

Linear = tuple[float, float, float]

# Viénot, Brettel & Mollon, "Digital video colourmaps for checking the legibility of displays by dichromats" (1999), as
# matrices on linear RGB.
DICHROMATS = {
    "protanope": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deuteranope": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


def linear(colour: str) -> Linear:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(light: Linear) -> Linear:
    red, green, blue = (min(max(part, 0.0), 1.0) for part in light)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(colour: str, matrix: tuple[Linear, Linear, Linear]) -> Linear:
    light = linear(colour)
    red, green, blue = (sum(factor * part for factor, part in zip(row, light, strict=True)) for row in matrix)
    return lab((red, green, blue))


@pytest.mark.parametrize("variant", CHARTED)
def test_marks_stand_out_from_the_page(variant: str) -> None:
    assert contrast(style.colour(variant), LIGHT_PAPER) >= 2.5
    assert contrast(style.DARK[style.colour(variant)], DARK_PAPER) >= 3


def test_text_stands_out_from_the_page() -> None:
    assert contrast(style.INK, LIGHT_PAPER) >= 7
    assert contrast(style.DARK[style.INK], DARK_PAPER) >= 7
    assert f"--paper: {DARK_PAPER}" in (Path(page.__file__).parent / "page.css").read_text()


@pytest.mark.parametrize("reader", DICHROMATS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_variants_differ_for_readers_who_see_few_colours(reader: str, is_dark: bool) -> None:
    """By colour or, where that is close, by symbol."""
    for one, other in itertools.combinations(CHARTED, 2):
        colours = [style.DARK[style.colour(name)] if is_dark else style.colour(name) for name in (one, other)]
        distance = math.dist(*(seen(colour, DICHROMATS[reader]) for colour in colours))
        assert distance > 15, (one, other)
        assert style.symbol(one) != style.symbol(other)


def test_every_colour_of_a_chart_has_its_dark_one(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    gpu = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    draws = (
        figures.speedups, figures.memory, figures.setups, figures.history, figures.losses, step_figures.contributions,
        step_figures.stream_gains, step_figures.timelines, sample_figures.distributions, sample_figures.drifts,
    )  # fmt: skip
    used = set(re.findall(r"#[0-9a-f]{6}\b", str([figure.drawing() for draw in draws for figure in draw(gpu)])))
    assert used <= set(style.DARK)
