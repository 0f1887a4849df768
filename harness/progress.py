"""Progress of a run: what the measuring process writes down step by step, and what its watcher makes of it.

asv keeps a benchmark's output to itself, so the two meet in a file, one JSON object a line.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.whole_files import write_whole

ROUND = "round"
"""The part of a step that times all variants of a case; of one that measures a variant alone it is its name."""


@dataclass(frozen=True)
class Step:
    """One process to wait for: a case, and the part of its measurement."""

    case: str
    part: str


def phases_step(case: str, variant: str) -> Step:
    """The step that tells the phases of a variant apart."""
    return Step(case, f"phases of {variant}")


class ProgressFile:
    """The writing end.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def begin(self, commit: str, steps: Sequence[Step]) -> None:
        """What is going to be measured of a commit."""
        self._append({"commit": commit, "steps": [[step.case, step.part] for step in steps]})

    def done(self, commit: str, step: Step, line: str, seconds: float | None) -> None:
        """A step has ended after so many seconds, None for one that falls away; ``line`` says how, for a reader."""
        self._append({"commit": commit, "case": step.case, "part": step.part, "line": line, "seconds": seconds})

    def problem(self, commit: str, text: str) -> None:
        """The measurement of a commit ended with an error. Where that cannot be written either, asv's log has it."""
        with suppress(OSError):
            self._append({"commit": commit, "problem": text})

    def _append(self, event: Mapping[str, object]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


class Watch:
    """The reading end: lines for a reader, with the time that is left by the pace so far.

    Args:
        path: the file, emptied here.
        expected: what is expected to be measured of each commit, until it begins and says so itself.
        memory: a file of how long steps took in earlier runs, which :meth:`remember` writes; what is not there or not
            readable is not known.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, expected: Mapping[str, Sequence[Step]], memory: Path) -> None:
        path.write_text("", encoding="utf-8")
        self._path = path
        self._memory = memory
        self._position = 0
        self._outstanding = {commit: list(steps) for commit, steps in expected.items()}
        self._known = _remembered(memory)
        self._seen: dict[Step, list[float]] = {}
        self.problems: list[tuple[str, str]] = []
        """Commits whose measurement ended with an error, each with what it said."""

    def new_lines(self) -> list[str]:
        """What was done since the last call, a line for each step."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._position += len(complete)
        return [line for event in map(json.loads, complete.splitlines()) if (line := self._take(event)) is not None]

    def remaining_s(self) -> float | None:
        """Seconds until all outstanding steps are done; None while no step like them has been seen."""
        times = [self._expected_s(step) for steps in self._outstanding.values() for step in steps]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def remember(self) -> None:
        """Keeps how long steps took, for the next run's first estimates. One that cannot be kept is done without."""
        times = [[step.case, step.part, seconds] for step, seconds in sorted(self._times().items(), key=_by_name)]
        with suppress(OSError):
            write_whole(self._memory, json.dumps(times).encode())

    def _take(self, event: Mapping[str, object]) -> str | None:
        commit = str(event["commit"])
        steps = event.get("steps")
        if isinstance(steps, list):
            self._outstanding[commit] = [Step(*entry) for entry in steps]
            return None
        if "problem" in event:
            self._outstanding.pop(commit, None)
            self.problems.append((commit, str(event["problem"])))
            return f"{commit[:8]} ended with an error: {str(event['problem']).splitlines()[0]}"
        step, seconds = Step(str(event["case"]), str(event["part"])), event["seconds"]
        if isinstance(seconds, float):
            self._seen.setdefault(step, []).append(seconds)
        outstanding = self._outstanding.get(commit, [])
        if step in outstanding:
            outstanding.remove(step)
        remaining = self.remaining_s()
        left = "" if remaining is None or not any(self._outstanding.values()) else f"  {_in_words(remaining)} left"
        return f"{event['line']}{left}"

    def _times(self) -> dict[Step, float]:
        return self._known | {step: statistics.median(seconds) for step, seconds in self._seen.items()}

    def _expected_s(self, step: Step) -> float | None:
        """By the same step, else by those of the same kind."""
        times = self._times()
        if step in times:
            return times[step]
        kind = [seconds for seen, seconds in times.items() if (seen.part == ROUND) == (step.part == ROUND)]
        return statistics.fmean(kind) if kind else None


def _remembered(path: Path) -> dict[Step, float]:
    """What can be read; estimates do without the rest."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, list):
        return {}
    return {
        Step(str(entry[0]), str(entry[1])): float(entry[2])
        for entry in entries
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], float) and 0 <= entry[2] < 1e9
    }


def _by_name(item: tuple[Step, float]) -> tuple[str, str]:
    return item[0].case, item[0].part


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
