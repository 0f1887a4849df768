"""The numbers behind the page as files that lie in the page itself: links that need no scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from harness import render
from harness.report.packing import compact, packed
from harness.rows import Comparison


@dataclass(frozen=True)
class File:
    """A file of JSON: its name without an ending, what it holds, and that."""

    name: str
    meaning: str
    content: str


def downloads(comparison: Comparison) -> str:
    """The files of a comparison of commits."""
    return links(_files(comparison))


def links(files: Sequence[File]) -> str:
    """A list of links, each of which saves a file."""
    return f"<ul>{''.join(map(_link, files))}</ul>"


def _files(comparison: Comparison) -> Sequence[File]:
    document = json.loads(render.json_document(comparison))
    return (
        File("comparison", "all rows, changes and verdicts, as --json writes them", compact(document)),
        File("samples", "seconds per step of every block of every round at the newer commit", _samples(comparison)),
        File(
            "history", "time over its control's, with its interval, and seconds at every commit", _history(comparison)
        ),
    )


def _samples(comparison: Comparison) -> str:
    return compact(
        [{"case": vars(entry.case), "variant": entry.variant, "rounds": entry.rounds} for entry in comparison.samples]
    )


def _history(comparison: Comparison) -> str:
    return compact(
        [
            {
                "case": vars(series.case),
                "variant": series.variant,
                "control": series.control,
                "commits": [point.commit.sha for point in series.recent],
                "ratio": [point.ratio.ratio for point in series.recent],
                "low": [point.ratio.low if point.ratio.has_interval else None for point in series.recent],
                "high": [point.ratio.high if point.ratio.has_interval else None for point in series.recent],
                "seconds": [point.seconds for point in series.recent],
            }
            for series in comparison.history
        ]
    )


def _link(file: File) -> str:
    address = f"data:application/gzip;base64,{packed(file.content)}"
    return (
        f'<li><a download="{file.name}.json.gz" href="{address}">{file.name}.json.gz</a>: {escape(file.meaning)}</li>'
    )
