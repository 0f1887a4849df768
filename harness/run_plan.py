"""What a run measures: commits, cases and variants, from what was asked for on the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import asv_process, context, environment, profiles, project, variants
from harness.own_models import OwnModel, encoded
from harness.progress import ROUND, Step, phases_step
from harness.project import Project
from harness.revisions import commits_of, history_order
from harness.worktree import snapshot


class RunError(Exception):
    """Nothing can be measured as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What is measured: ``commits`` are full hashes, the newest, which counts as HEAD, first."""

    project: Project
    machine: str
    device_type: profiles.DeviceType
    profile: profiles.Name
    commits: tuple[str, ...]
    selection: profiles.Selection
    resume: bool
    until: profiles.Until = "rounds"
    own: tuple[OwnModel, ...] = ()
    phases: bool = False

    @property
    def results(self) -> Path:
        """Where raw samples go: those of a check are not for keeps."""
        return self.project.check if self.profile == "check" else self.project.results

    def variables(self, progress: Path) -> dict[str, str]:
        """What the measuring process is told."""
        return {
            context.PROFILE_VARIABLE: self.profile,
            context.HEAD_VARIABLE: self.commits[0],
            context.CASES_VARIABLE: " ".join(self.selection.cases),
            context.VARIANTS_VARIABLE: " ".join(self.selection.variants),
            context.WORKLOADS_VARIABLE: encoded(self.own),
            context.RESUME_VARIABLE: "1" if self.resume else "",
            context.UNTIL_VARIABLE: self.until,
            context.PHASES_VARIABLE: "1" if self.phases else "",
            context.RESULTS_VARIABLE: str(self.results),
            context.PROGRESS_VARIABLE: str(progress),
        }

    def command(self, listed: Path) -> list[str]:
        """asv's command line.

        The benchmarks are named down to their parameters: without that asv would start a process for every other one,
        only to be told to skip it.
        """
        patterns = [word for pattern in self.patterns() for word in ("--bench", pattern)]
        arguments = ["run", f"HASHFILE:{listed}", "--show-stderr", *patterns]
        if self.profile == "check":
            return asv_process.command(self.project.check_configuration, *arguments, "--dry-run")
        return asv_process.command(self.project.configuration, *arguments)

    def patterns(self) -> list[str]:
        """Regular expressions for asv's benchmarks of what may be measured at one of the commits."""
        found = []
        for case in profiles.selected_cases(self.profile, self.device_type, self.selection):
            for variant in self._variants(case, at_head=True):
                is_profiled = profiles.needs_profile(self.profile, variant, at_head=True)
                track = r"track_\w+" if is_profiled else "track_step_seconds"
                found.append(asv_process.pattern(track, variant.name, case.name))
        return found

    def expected(self) -> dict[str, list[Step]]:
        """The steps of each commit, as far as can be told before it is known what can run here."""
        return {commit: self._steps(at_head=commit == self.commits[0]) for commit in self.commits}

    def _steps(self, *, at_head: bool) -> list[Step]:
        steps = []
        rounds = profiles.effort(self.profile, self.device_type).rounds
        for case in profiles.selected_cases(self.profile, self.device_type, self.selection):
            chosen = self._variants(case, at_head=at_head)
            profiled = [entry for entry in chosen if profiles.needs_profile(self.profile, entry, at_head=at_head)]
            steps += [Step(case.name, variant.name) for variant in profiled]
            steps += [Step(case.name, ROUND)] * rounds
            steps += [phases_step(case.name, variant.name) for variant in chosen if self.phases]
        return steps

    def _variants(self, case: profiles.Case, *, at_head: bool) -> list[variants.Variant]:
        return [
            variant
            for variant in variants.VARIANTS.values()
            if profiles.selected_out(self.profile, case, variant, self.selection, at_head=at_head) is None
        ]


def plan_of(options: argparse.Namespace) -> Plan:
    """What was asked for.

    Raises:
        RunError, ValueError: a revision, case or variant does not exist.
    """
    measured = project.here()
    profile: profiles.Name = "check" if options.check else options.profile
    own = own_models(options.workload, measured)
    own_cases = tuple(case for model in own for case in model.cases())
    device_type: profiles.DeviceType = "cpu" if environment.visible_gpu() is None else "cuda"
    models = [name for given in options.model for name in given.split(",")]
    cases = profiles.cases_of_models(profile, device_type, models, own_cases) if models else tuple(options.case)
    selection = profiles.Selection(cases, tuple(options.variant), own_cases)
    profiles.check_selection(selection)
    if not profiles.selected_cases(profile, device_type, selection):
        named = ", ".join(selection.cases or [model.name for model in own])
        raise RunError(f"{named}: nothing to measure on this machine, which measures on {device_type}")
    return Plan(
        project=measured,
        machine=environment.write_asv_machine_file(),
        device_type=device_type,
        profile=profile,
        commits=_commits(options, measured, profile),
        selection=selection,
        resume=options.resume,
        until=options.until,
        own=own,
        phases=options.phases,
    )


def own_models(sources: Sequence[str], measured: Project) -> tuple[OwnModel, ...]:
    """The user's own models, each built once to see that it works, with the code of the working tree.

    Raises:
        WorkloadError: one does not.
        RunError: two have the same name.
    """
    if not sources:
        return ()
    from harness.workloads import own_model  # imports torch, which no other run has to wait for

    sys.path[:0] = map(str, measured.code_folders)
    found = tuple(own_model(source, measured.root) for source in dict.fromkeys(sources))
    names = [model.name for model in found]
    for model in found:
        if names.count(model.name) > 1:
            raise RunError(f"several workloads are called {model.name!r}: give each a name of its own")
    return found


def _commits(options: argparse.Namespace, measured: Project, profile: profiles.Name) -> tuple[str, ...]:
    commits: list[str] = []
    if options.worktree:
        now = snapshot(measured.root, measured.measured_paths)
        if not now.is_changed:
            print(f"The working tree is {now.head[:8]}: nothing that is measured was changed.", flush=True)
        commits.append(now.commit)
    for revision in options.revisions:
        found = commits_of(revision, measured.root)
        if not found:
            raise RunError(f"{revision!r} names no commit of {measured.root}")
        commits += found
    if not commits:
        commits += last_commits(measured.root, options.commits or profiles.COMMITS[profile])
    position = history_order(commits, measured.root)
    return tuple(sorted(dict.fromkeys(commits), key=lambda commit: -position.get(commit, -1)))


def last_commits(root: Path, count: int) -> tuple[str, ...]:
    """Full hashes of HEAD and the commits before it, newest first: as many as there are, at most ``count``.

    Raises:
        RunError: ``root`` is no git checkout, or one without a commit.
    """
    command = ["git", "-C", str(root), "rev-list", "--first-parent", f"--max-count={count}", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except OSError as error:
        raise RunError(f"git cannot be run ({error}); commits are measured from a git checkout") from error
    commits = tuple(done.stdout.split())
    if done.returncode != 0 or not commits:
        raise RunError(f"{root} has no commit to measure; git says: {done.stderr.strip()}")
    return commits
