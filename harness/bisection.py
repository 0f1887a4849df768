"""From a regression to the commit that brought it: ``asv find`` with the arguments that this takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import asv_process, context
from harness.own_models import OwnModel, WorkloadError, encoded
from harness.project import Project
from harness.revisions import has_parent, is_ancestor
from harness.rows import Change, Comparison, Contrast
from harness.run_plan import own_models
from harness.selection import ComparisonError
from harness.stats import Verdict

WORST = "worst"
"""Stands for the regression with the largest change."""

_BENCHMARKS: Mapping[str, str] = {
    "time": "track_step_seconds",
    "setup": "track_setup_seconds",
    "memory": "track_peak_memory_bytes",
}
"""What asv has of each metric: of a set-up with filled caches nothing."""


@dataclass(frozen=True)
class Search:
    """A run of ``asv find``: its command line, the variables it runs with, and the regression it looks for."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    change: Change | Contrast

    def run(self, project: Project) -> int:
        """Searches; asv's output appears as it comes. Returns asv's exit code.

        Raises:
            ProjectError: a run measures in the project's checkout.
        """
        with project.alone() as lock:
            process = asv_process.start(self.command, project.home, {**os.environ, **self.variables}, lock)
            with asv_process.ended(process):
                return process.wait()


def chosen(comparison: Comparison, which: str) -> Change | Contrast:
    """The regression to search for.

    Args:
        which: "worst", or CASE:VARIANT of one of the regressions; of several of the same name the first metric's.

    Raises:
        ComparisonError: there is no such regression.
    """
    worse = tuple(_worse(comparison))
    if not worse:
        lost = "; what can no longer be measured has no value to search by" if comparison.lost else ""
        raise ComparisonError(f"nothing that asv could search for is a regression here{lost}")
    if which == WORST:
        return max(worse, key=lambda entry: entry.ratio.ratio)
    names: dict[str, Change | Contrast] = {}
    for entry in worse:
        names.setdefault(f"{entry.case.name}:{entry.variant}", entry)
    if which not in names:
        raise ComparisonError(f"{which!r} is none of the regressions: {', '.join(names)}")
    return names[which]


def _worse(comparison: Comparison) -> Iterator[Change | Contrast]:
    yield from (change for change in comparison.changes if change.verdict is Verdict.SLOWER)
    for contrast in comparison.contrasts:
        if contrast.verdict is Verdict.SLOWER and contrast.metric in _BENCHMARKS:
            yield contrast


def search(comparison: Comparison, change: Change | Contrast, project: Project) -> Search:
    """The search for the commit between base and head that made a variant worse.

    asv is given the range from before base on, so that it measures base too (a range of git leaves its older end out);
    one benchmark with the parameters of the case and variant, which asv demands; and the harness is told to measure
    nothing but that variant and its control, if it was held against one.

    Args:
        change: one of the regressions.

    Raises:
        ComparisonError: there is no line of history from base to head, or a workload of the user's cannot be built.
    """
    assert comparison.base is not None
    base, head = comparison.base.sha, comparison.head.sha
    if base == head or not is_ancestor(base, head, project.root):
        raise ComparisonError(
            f"{base[:8]} is no earlier commit on the way to {head[:8]}: there is nothing to search between them"
        )
    commits = f"{base}^..{head}" if has_parent(base, project.root) else head
    metric, measured = "time", [change.variant]
    if isinstance(change, Contrast):
        metric = change.metric
    else:
        measured.insert(0, change.control)
    benchmark = asv_process.pattern(_BENCHMARKS[metric], change.variant, change.case.name)
    variables = {
        context.PROFILE_VARIABLE: comparison.reproduction.profile,
        context.HEAD_VARIABLE: head,
        context.CASES_VARIABLE: change.case.name,
        context.VARIANTS_VARIABLE: " ".join(measured),
    }
    if change.case.model in comparison.reproduction.workloads:
        own = _own_models(comparison.reproduction.workloads.values(), project)
        if change.case.name not in [case.name for model in own for case in model.cases()]:
            raise ComparisonError(f"no workload has the case {change.case.name} any more")
        variables[context.WORKLOADS_VARIABLE] = encoded(own)
    command = asv_process.command(project.configuration, "find", commits, benchmark, "--show-stderr")
    return Search(tuple(command), variables, change)


def _own_models(sources: Iterable[object], project: Project) -> tuple[OwnModel, ...]:
    """All of the user's models, as runs have them: asv drops what it knows of cases that are no parameters of it."""
    try:
        return own_models([_in(project.root, str(source)) for source in sources], project)
    except WorkloadError as error:
        raise ComparisonError(f"asv cannot search without the workloads that were measured: {error}") from error


def _in(root: Path, source: str) -> str:
    """A workload's source as it is found from any working directory."""
    path, found, function = source.rpartition(":")
    return f"{root / path}:{function}" if found and path.endswith(".py") else source
