"""What self-tests found: rows, files, and the two error rates that a reader wants."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.selection import changed_facts
from harness.stats import Verdict
from harness.whole_files import read_whole, write_whole

SCHEMA = 2
"""Of the files. In the first one, rows had up to eight rounds, and were judged again after each."""

_ENDING = ".selftest"  # asv takes what ends with .json for results of its own, and complains
FOLDER = "selftest"
"""The folder of self-tests within that of a machine's results. asv leaves folders without a machine file alone."""

HARNESS = "harness"
"""The harness among the judges."""

METHOD = ("commit", "margin", "effort", "cases", "variants", "slowdowns")
"""What rows depend on, beside the facts of the machine. Files of earlier versions tell only the first three."""


_VERDICTS = [verdict.value for verdict in Verdict]


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
class Outcome:
    """A self-test of a machine, as its file has it.

    Attributes:
        path: the file.
        started: when its first part was, in ISO 8601.
        seconds: how long all parts took, up to the last row.
        facts: of the machine.
        method: how the rows were measured, by the names in :data:`METHOD`, as JSON has it; None for what the file does
            not tell.
        rows: those of all finished groups, in order.
    """

    path: Path
    started: str
    seconds: float
    facts: Mapping[str, object]
    method: Mapping[str, object]
    rows: tuple[JudgedRow, ...]


@dataclass(frozen=True)
class Rate:
    """How many of the rows with a slowdown (0: none) a judge called slower, faster, the same, or left open.

    ``measured`` is the slowdown that the harness measured, in the median row.
    """

    judge: str
    slowdown: float
    measured: float
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
        _rate(judge, slowdown, [row for row in rows if row.slowdown == slowdown])
        for judge in judges
        for slowdown in sorted({row.slowdown for row in rows})
    )


def _rate(judge: str, slowdown: float, rows: Sequence[JudgedRow]) -> Rate:
    counts = Counter(Verdict(row.verdicts[judge]) for row in rows)
    return Rate(
        judge,
        slowdown,
        statistics.median(row.ratio for row in rows) - 1,
        len(rows),
        slower=counts[Verdict.SLOWER],
        faster=counts[Verdict.FASTER],
        same=counts[Verdict.SAME],
        inconclusive=counts[Verdict.INCONCLUSIVE],
    )


def begun(folder: Path, started: datetime, facts: Mapping[str, object], method: Mapping[str, object]) -> Outcome:
    """A self-test without rows, of which there is no file yet.

    Args:
        folder: the machine's results.
        started: when, in UTC; the file is named after it.
        facts: of the machine.
        method: as :attr:`Outcome.method`, of anything that goes into JSON.
    """
    return Outcome(
        path=folder / FOLDER / f"{started:%Y%m%dT%H%M%SZ}{_ENDING}",
        started=started.isoformat(timespec="seconds"),
        seconds=0.0,
        facts=facts,
        method=json.loads(json.dumps(method)),
        rows=(),
    )


def write(outcome: Outcome) -> None:
    """Write the file of a self-test, whole; what was there before is replaced.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    outcome.path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        "started": outcome.started,
        "seconds": round(outcome.seconds, 1),
        "machine": outcome.path.parent.parent.name,
        "facts": dict(outcome.facts),
        **outcome.method,
        "rates": [asdict(rate) for rate in rates(outcome.rows)],
        "rows": [asdict(row) for row in outcome.rows],
    }
    write_whole(outcome.path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def load(folder: Path, facts: Mapping[str, object], margin: float) -> tuple[tuple[JudgedRow, ...], list[str]]:
    """The rows of all self-tests of a machine that were made in this environment and at this margin, and what is wrong
    with files that cannot be read.

    Args:
        folder: the machine's results.
        facts: of the machine, now.
        margin: the least margin that verdicts are given by.
    """
    outcomes, problems = _read(folder)
    alike = [found for found in outcomes if found.method["margin"] == margin and not changed_facts(found.facts, facts)]
    return tuple(row for found in alike for row in found.rows), problems


def newest_alike(folder: Path, wanted: Outcome) -> Outcome:
    """The newest self-test of a machine that was measured as another one is to be: by its method, in its environment.

    Args:
        folder: the machine's results.
        wanted: the other one.

    Raises:
        ValueError: there is none; the message says in what the newest of all differs, and what to do.
    """
    outcomes, problems = _read(folder)
    alike = [found for found in outcomes if not _differences(found, wanted)]
    if alike:
        return alike[-1]
    differs = [
        f"the newest, {found.path.name}, has another or does not tell: {', '.join(_differences(found, wanted))}"
        for found in outcomes[-1:]
    ]
    advice = "leave out --resume to begin one"
    raise ValueError(
        "; ".join([f"no self-test in {folder / FOLDER} was measured in this way", *differs, advice, *problems])
    )


def _differences(found: Outcome, wanted: Outcome) -> tuple[str, ...]:
    """Names of what rows depend on that differs between a self-test in a file and another one, or that the file does
    not tell."""
    method = [name for name in METHOD if found.method[name] is None or found.method[name] != wanted.method[name]]
    return (*method, *changed_facts(found.facts, wanted.facts))


def _read(folder: Path) -> tuple[list[Outcome], list[str]]:
    """The self-tests of a machine in files of this schema, earliest first, and what is wrong with files that cannot be
    read."""
    outcomes: list[Outcome] = []
    problems = []
    for path in sorted((folder / FOLDER).glob(f"*{_ENDING}")):
        try:
            content = json.loads(read_whole(path))
            if content["schema"] == SCHEMA:
                outcomes.append(_outcome(path, content))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: no self-test that can be read ({error}); remove it")
    return outcomes, problems


def _outcome(path: Path, content: Mapping[str, Any]) -> Outcome:
    """Of the content of a file.

    Raises:
        ValueError, KeyError, TypeError: it has not what a self-test has.
    """
    rows = tuple(JudgedRow(**fields) for fields in content["rows"])
    for number, row in enumerate(rows, start=1):
        told = {
            "slowdown": _is_number(row.slowdown),
            "ratio": _is_number(row.ratio),
            "rounds": _is_number(row.rounds),
            "verdicts": isinstance(row.verdicts, dict)
            and row.verdicts.keys() == rows[0].verdicts.keys()
            and all(verdict in _VERDICTS for verdict in row.verdicts.values()),
        }
        if not all(told.values()):
            raise ValueError(
                f"row {number} tells no {', '.join(name for name, is_told in told.items() if not is_told)}"
            )
    if not isinstance(content["facts"], dict) or not _is_number(content["seconds"]):
        raise ValueError("it tells nothing of the machine, or of the time that it took")
    method = {name: content.get(name) for name in METHOD}
    return Outcome(path, content["started"], content["seconds"], content["facts"], method, rows)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def sentence(rows: Sequence[JudgedRow], margin: float, rounds: int) -> str | None:
    """The harness's error rates in words, for verdicts that rest on so many rounds of each commit.

    None without any row in which nothing changed. Where there are rows, but none in so many rounds, it says that.
    """
    alike = [row for row in rows if row.rounds == rounds]
    known = {rate.slowdown: rate for rate in rates(alike) if rate.judge == HARNESS}
    if 0.0 not in known:
        others = sorted({row.rounds for row in rows if row.slowdown == 0})
        if not others:
            return None
        return (
            "error rates are measured on this machine for verdicts that rest on"
            f" {', '.join(map(str, others))} rounds of each commit, not for {rounds}, on which some of these rest;"
            f" harness.selftest --rounds {rounds} measures them"
        )
    unchanged = known.pop(0.0)
    found = ", ".join(
        f"{100 * rate.slowdown:g}% (measured: {rate.measured:.1%}): {rate.found / rate.rows:.0%} of {rate.rows}"
        for rate in known.values()
    )
    told = f"; planted slowdowns found, of {found}" if found else ""
    kinds = ", ".join(sorted({f"{row.case} {row.variant}" for row in alike}))
    return (
        f"error rates measured on this machine at a margin of {100 * margin:g}%, in {rounds} rounds of each commit of"
        f" {kinds}: {unchanged.found} of {unchanged.rows}"
        f" rows falsely flagged ({100 * unchanged.found / unchanged.rows:.1f}%){told}"
    )
