"""What self-tests found: rows, files, and the two error rates that a reader wants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.selection import changed_facts
from harness.stats import Verdict
from harness.whole_files import write_whole

SCHEMA = 2
"""Of the files. In the first one, rows had up to eight rounds, and were judged again after each."""

_ENDING = ".selftest"  # asv takes what ends with .json for results of its own, and complains
FOLDER = "selftest"
"""The folder of self-tests within that of a machine's results. asv leaves folders without a machine file alone."""

HARNESS = "harness"
"""The harness among the judges."""


@dataclass(frozen=True)
class JudgedRow:
    """One benchmark measured twice: ``slowdown`` is by which share of its step it was slower the second time.

    ``verdicts`` are those of all judges by name; ratio, bounds (None where there are none), margin and rounds are the
    harness's.
    """

    case: str
    variant: str
    slowdown: float
    ratio: float
    low: float | None
    high: float | None
    margin: float
    rounds: int
    verdicts: Mapping[str, str]


@dataclass(frozen=True)
class Rate:
    """How many of the rows with a slowdown (0: none) a judge called slower, faster, the same, or left open."""

    judge: str
    slowdown: float
    rows: int
    slower: int
    faster: int
    same: int
    inconclusive: int

    @property
    def found(self) -> int:
        """Rows that were called slower or faster where nothing changed, else those called slower."""
        return self.slower + self.faster if self.slowdown == 0 else self.slower


def rates(rows: Sequence[JudgedRow]) -> tuple[Rate, ...]:
    """For each judge, and each slowdown in rising order."""
    judges = dict.fromkeys(name for row in rows for name in row.verdicts)
    return tuple(
        _rate(judge, slowdown, [row.verdicts[judge] for row in rows if row.slowdown == slowdown])
        for judge in judges
        for slowdown in sorted({row.slowdown for row in rows})
    )


def _rate(judge: str, slowdown: float, verdicts: Sequence[str]) -> Rate:
    counts = {verdict: verdicts.count(verdict.value) for verdict in Verdict}
    return Rate(
        judge,
        slowdown,
        len(verdicts),
        slower=counts[Verdict.SLOWER],
        faster=counts[Verdict.FASTER],
        same=counts[Verdict.SAME],
        inconclusive=counts[Verdict.INCONCLUSIVE],
    )


def write(folder: Path, name: str, document: Mapping[str, object], rows: Sequence[JudgedRow]) -> Path:
    """Write a self-test of a machine, whole.

    Args:
        folder: the machine's results.
        name: of the file, without its ending.
        document: what there is to say beside the rows: facts, options, times.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / FOLDER / f"{name}{_ENDING}"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        **document,
        "rates": [asdict(rate) for rate in rates(rows)],
        "rows": [asdict(row) for row in rows],
    }
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return path


def load(
    folder: Path, facts: Mapping[str, object], margin: float, rounds: int
) -> tuple[tuple[JudgedRow, ...], list[str]]:
    """The rows of all self-tests of a machine that were made in this environment, at this margin and in so many rounds
    of each commit, and what is wrong with files that cannot be read.

    Args:
        folder: the machine's results.
        facts: of the machine, now.
        margin: the least margin that verdicts are given by.
        rounds: of each commit.
    """
    rows: list[JudgedRow] = []
    problems = []
    for path in sorted((folder / FOLDER).glob(f"*{_ENDING}")):
        try:
            content = json.loads(path.read_bytes())
            if (
                content["schema"] == SCHEMA
                and content["margin"] == margin
                and not changed_facts(content["facts"], facts)
            ):
                rows += [row for row in (JudgedRow(**fields) for fields in content["rows"]) if row.rounds == rounds]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: no self-test that can be read ({error}); remove it")
    return tuple(rows), problems


def sentence(rows: Sequence[JudgedRow], margin: float) -> str | None:
    """The harness's error rates in words, of rows of equally many rounds; None without any in which nothing changed."""
    known = {rate.slowdown: rate for rate in rates(rows) if rate.judge == HARNESS}
    if 0.0 not in known:
        return None
    unchanged = known.pop(0.0)
    found = ", ".join(
        f"{100 * slowdown:g}%: {100 * rate.found / rate.rows:.0f}% of {rate.rows}" for slowdown, rate in known.items()
    )
    told = f"; planted slowdowns found, of {found}" if found else ""
    return (
        f"error rates measured on this machine at a margin of {100 * margin:g}%, in {rows[0].rounds} rounds of each"
        f" commit: {unchanged.found} of {unchanged.rows}"
        f" rows falsely flagged ({100 * unchanged.found / unchanged.rows:.1f}%){told}"
    )
