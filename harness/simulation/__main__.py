"""``python -m harness.simulation``: how often steps are found and invented, as a table in ``docs/change_points.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.changepoints import find_changes
from harness.simulation import histories, rivals
from harness.simulation.histories import COMMITS, NOISES, SHAPES, UNCHANGED, History
from harness.whole_files import write_whole

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "change_points.md"
BEGIN, END = "<!-- made by python -m harness.simulation -->", "<!-- end of what it made -->"

STEPS = (0.03, 0.05)
_TOLERANCE = 2
_SEED = 2026

Finder = Callable[[npt.NDArray[np.float64]], Sequence[int]]

FINDERS: dict[str, Finder] = {
    "harness.changepoints": lambda values: [change.position for change in find_changes(values.tolist())],
    "E-divisive": rivals.e_divisive,
    "asv, threshold 5%": lambda values: rivals.asv_regressions(values, 0.05),
    "asv, threshold 2%": lambda values: rivals.asv_regressions(values, 0.02),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the value is its exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.simulation", description=__doc__)
    parser.add_argument(
        "--series", type=_positive, default=500, metavar="N", help="histories for each cell (default: %(default)s)"
    )
    parser.add_argument("--write", type=Path, nargs="?", const=DOCUMENT, metavar="PATH", help=f"update {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    lines = []
    for line in table(options.series):
        print(line, flush=True)
        lines.append(line)
    if options.write is None:
        return 0
    try:
        replace_table(options.write, [*introduction(options.series), "", *lines])
    except (OSError, ValueError) as error:
        print(f"harness.simulation: {error}", file=sys.stderr)
        return 2
    return 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def introduction(series: int) -> list[str]:
    """What the table is of."""
    return [
        f"{series} histories of {COMMITS} commits for each cell; the noise of a commit is {100 * histories.NOISE:g}%.",
        "False alarms are histories without a step in which one is found. Found means that each true step (of a",
        f"recovery: both) has one at most {_TOLERANCE} commits away.",
    ]


def table(series: int) -> Iterator[str]:
    """The lines of the table, as they are ready."""
    columns = [f"{shape.name}, {100 * step:g}%" for step in STEPS for shape in SHAPES]
    yield f"| noise | found by | false alarms | {' | '.join(columns)} |"
    yield "|---|---|" + "--:|" * (1 + len(columns))
    for noise in NOISES:
        for name, finder in FINDERS.items():
            alarms = _share(noise, UNCHANGED, 0.0, finder, series)
            found = [_share(noise, shape, step, finder, series) for step in STEPS for shape in SHAPES]
            yield f"| {noise} | {name} | {' | '.join(f'{100 * share:.1f}%' for share in (alarms, *found))} |"


def _share(noise: str, shape: histories.Shape, step: float, finder: Finder, series: int) -> float:
    """In which share of the histories all steps are found or, where there is none, any is. All finders see the same."""
    rng = np.random.default_rng((_SEED, *map(ord, noise + shape.name), round(1000 * step)))
    return sum(_hit(history, finder(history.values)) for history in _drawn(noise, shape, step, rng, series)) / series


def _drawn(noise: str, shape: histories.Shape, step: float, rng: np.random.Generator, series: int) -> Iterator[History]:
    return (histories.draw(noise, shape, step, rng) for _ in range(series))


def _hit(history: History, found: Sequence[int]) -> bool:
    if not history.places:
        return bool(found)
    return all(any(abs(place - position) <= _TOLERANCE for position in found) for place in history.places)


def replace_table(document: Path, lines: Sequence[str]) -> None:
    """Puts the lines between the two marks of a document, which is written whole or left as it was.

    Raises:
        ValueError: the marks are not there.
        OSError: the document cannot be read or written.
    """
    before, begin, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document}: the lines {BEGIN!r} and {END!r} are missing; put them where the table goes")
    content = "\n".join([before + begin, "", *lines, "", end + after])
    write_whole(document, content.encode())


if __name__ == "__main__":
    sys.exit(main())
