"""What was found, as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tests.benchmarks.coverage.training import Row

_HEAD = """\
# Models of other libraries

Of each family of timm, and of types of models of transformers, a small one with random parameters trains {steps} steps
on a CPU, with plain PyTorch and with `kitsune.TrainStep(mode="replay")`, from equal seeds. "captured" means that all
steps but the first were replayed, and that losses, parameters, buffers and random numbers came out alike: bit by bit,
or as far as rounding explains (`verify()`). "refused" means that the model ran as plain PyTorch; the reason is that of
`status()`. This file is written by a command:

    {command}

With {versions}.
"""


def document(rows: Iterable[Row], versions: Mapping[str, str], steps: int, command: str) -> str:
    """The whole text: for each library the counts, and a table."""
    found = list(rows)
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [_HEAD.format(steps=steps, command=command, versions=told)]
    for library in dict.fromkeys(row.library for row in found):
        parts.append(_section(library, [row for row in found if row.library == library]))
    return "\n".join(parts)


def counts(rows: Iterable[Row]) -> str:
    """How many of them had which outcome, in words."""
    found = Counter(row.outcome for row in rows)
    return ", ".join(f"{number} {outcome}" for outcome, number in found.most_common())


def _section(library: str, rows: list[Row]) -> str:
    head = ["| family | model | outcome | numbers | capture, s | reason |", "|---|---|---|---|--:|---|"]
    return "\n".join([f"## {library}", "", f"Of {len(rows)}: {counts(rows)}.", "", *head, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    numbers = "" if row.exact is None else ("the same bits" if row.exact else "alike")
    if row.outcome == "differs":
        numbers = "others"
    seconds = "" if row.capture_s is None else f"{row.capture_s:.1f}"
    cells = (row.family, row.model, row.outcome, numbers, seconds, row.reason.replace("|", "\\|").replace("\n", " "))
    return "| " + " | ".join(cells) + " |"
