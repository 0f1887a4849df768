"""``python -m harness.compare [BASE] [HEAD]``: judge measured variants and commits, and write reports.

Exit codes: 0, the comparison was formed; 1, ``--fail-on regression`` was given and there is one; 2, it could not be
formed or an output could not be written, with one line that says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness import render
from harness.comparison import DEFAULT_MARGIN, compare
from harness.environment import machine_name
from harness.report import ReportError, html_page
from harness.rows import Comparison
from harness.selection import ComparisonError, choose_machine
from harness.store import ResultsError, Store, write_whole

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_EPILOG = """
BASE and HEAD are git revisions (HEAD~2, a tag, a branch) or the beginning of a measured commit's hash. Without HEAD it
is the newest measured commit, without BASE the measured commit before HEAD. A commit against itself is its newest run
against its earlier ones.

The margin is the relative difference in time that does not matter: the one given, or up to 10% where a benchmark's own
noise asks for more. A variant is "faster" or "slower" if its whole 95%
interval lies beyond the margin (and not by chance, among so many rows), "same" if it lies within, and "inconclusive"
otherwise: more rounds would decide. A
regression is a Kitsune variant that is slower than at BASE by more than the margin, as a multiple of a peer measured in
the same processes (the one whose time was closest at BASE, else eager), or that could be measured at BASE and cannot at
HEAD. Kitsune on one stream or unfused is no such variant: it tells what that contributes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the value is its exit code."""
    options = _parser().parse_args(arguments)
    try:
        comparison = _comparison(options)
        sys.stdout.write(_encodable(render.text(comparison, colour=_colour())))
        _write_outputs(comparison, options)
    except (ComparisonError, ResultsError, ReportError) as error:
        print(f"harness.compare: {error}", file=sys.stderr)
        return 2
    return 1 if options.fail_on == "regression" and comparison.regressions else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.compare",
        description="Judge Kitsune against its peers at a measured commit, and against an earlier commit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", nargs="?", metavar="BASE", help="older commit (default: measured before HEAD)")
    parser.add_argument("head", nargs="?", metavar="HEAD", help="newer commit (default: the newest measured)")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write the interactive report, one offline file")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write tables for a pull request")
    parser.add_argument(
        "--machine", metavar="NAME", help="whose results (default: this machine's, else the most recently measured)"
    )
    parser.add_argument("--results", type=Path, default=_RESULTS, metavar="DIR", help="results folder (%(default)s)")
    parser.add_argument(
        "--margin", type=_margin, default=DEFAULT_MARGIN, metavar="FRACTION", help="see below (default: %(default)s)"
    )
    parser.add_argument("--fail-on", choices=["regression"], help="exit with code 1 if there is one")
    return parser


def _margin(text: str) -> float:
    try:
        margin = float(text)
    except ValueError:
        margin = 0.0
    if not 0 < margin < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction between 0 and 1, such as {DEFAULT_MARGIN}")
    return margin


def _comparison(options: argparse.Namespace) -> Comparison:
    store = Store(options.results)
    here = _this_machine()
    machine = choose_machine(store, options.machine, here)
    comparison = compare(store.load(machine), options.base, options.head, folder=options.results, margin=options.margin)
    if options.machine is None and machine != here:
        note = f"this machine ({here}) has no results; these are of {machine}, measured most recently"
        comparison = replace(comparison, notes=(note, *comparison.notes))
    return comparison


def _this_machine() -> str:
    try:
        return machine_name()
    except ValueError as error:
        raise ComparisonError(str(error)) from error


def _write_outputs(comparison: Comparison, options: argparse.Namespace) -> None:
    """Write the files asked for, each whole or not at all."""
    outputs = ((options.json, render.json_document), (options.markdown, render.markdown), (options.html, html_page))
    for path, document in outputs:
        if path is None:
            continue
        content = document(comparison).encode()
        try:
            write_whole(path, content)
        except OSError as error:
            raise ResultsError(path, f"cannot be written ({error.strerror})") from error
        print(f"wrote {path}")


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _encodable(text: str) -> str:
    """The text with what standard output cannot show replaced: "µ" in a terminal that knows only ASCII."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


if __name__ == "__main__":
    sys.exit(main())
