"""What a run came to: which commits were measured, and every failure with the failing process's own output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from harness.formats import counted
from harness.store import History


@dataclass(frozen=True)
class Failures:
    """Variants of a commit's cases that failed with the same words."""

    commit: str
    places: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Summary:
    """A run over some commits.

    Attributes:
        measured: the commits of which something was measured, or tried in vain, by this run.
        failures: what failed in it.
        untouched: the others.
        with_results: commits that have results, of this run or another.
    """

    measured: tuple[str, ...]
    failures: tuple[Failures, ...]
    untouched: tuple[str, ...]
    with_results: frozenset[str] = frozenset()

    @property
    def untouched_without_results(self) -> tuple[str, ...]:
        """Commits that nothing is known of."""
        return tuple(commit for commit in self.untouched if commit not in self.with_results)

    def text(self, *, resumed: bool) -> str:
        """The summary for a terminal; empty where everything went well.

        Args:
            resumed: whether the run was to measure only what was missing.
        """
        complete = self.with_results if resumed else frozenset()
        lines = [
            f"{commit[:8]}: {'everything was measured already' if commit in complete else 'nothing was measured'}"
            for commit in self.untouched
        ]
        if self.failures:
            total = counted(sum(len(entry.places) for entry in self.failures), "failure")
            lines += ["", f"{total}:"]
        for entry in self.failures:
            lines += ["", f"{entry.commit[:8]}  {', '.join(entry.places)}"]
            lines += [f"    {line}" for line in entry.reason.splitlines()]
        return "".join(f"{line}\n" for line in lines)


def summary(history: History, commits: Sequence[str], since: datetime) -> Summary:
    """What the runs that started from a moment on came to, commit by commit in this order."""
    runs = {run.run for commit in commits for run in history.runs(commit) if run.started >= since}
    measured = tuple(commit for commit in commits if any(run.run in runs for run in history.runs(commit)))
    failures: dict[tuple[str, str], list[str]] = {}
    for commit in commits:
        for skip in history.skips(commit):
            if skip.run in runs and skip.status == "failed":
                failures.setdefault((commit, skip.reason), []).append(f"{skip.case} {skip.variant}")
        for phases in history.phases(commit):
            if phases.run in runs and phases.failure is not None:
                place = f"{phases.case} {phases.variant}, its phases"
                failures.setdefault((commit, phases.failure), []).append(place)
    return Summary(
        measured=measured,
        failures=tuple(Failures(commit, tuple(places), reason) for (commit, reason), places in failures.items()),
        untouched=tuple(commit for commit in commits if commit not in measured),
        with_results=frozenset(commit for commit in commits if history.rounds(commit)),
    )
