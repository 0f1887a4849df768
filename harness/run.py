"""``python -m harness.run [REVISION ...]``: measures commits or the working tree with asv, and says what became of it.

Exit codes: 0, everything that can run here was measured; 1, something was measured and something failed (a summary says
what); 2, nothing could be measured or compared; 130, interrupted (what was measured before is kept).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import get_args

from harness import asv_process, compare, context, environment, profiles, project, variants
from harness.failures import last_lines
from harness.own_models import OwnModel, WorkloadError, encoded
from harness.progress import ROUND, Step, Watch
from harness.project import Project, ProjectError
from harness.revisions import CommitText, commits_of, describe, history_order
from harness.run_summary import Summary, summary
from harness.store import ResultsError, Store
from harness.worktree import WorktreeError, head_under, snapshot

_BUSY_LOAD = 0.7
_INTERRUPTED = 130
_EPILOG = """
REVISION is anything git understands (HEAD~2, a tag, a branch, a hash), or a range: A..B is every commit after A up to
B. Without any, HEAD and the commits before it are measured. Raw samples are appended to the results folder after every
process, so that what was measured is never lost; `asv show`, `asv compare` and `asv publish` read the same runs.

exit codes: 0, everything that can run here was measured; 1, something failed, and a summary says what; 2, nothing could
be measured or compared; 130, interrupted.
"""


class RunError(Exception):
    """Nothing can be measured as asked; the message says why and what to do."""


_PROBLEMS = (
    RunError,
    ProjectError,
    WorktreeError,
    WorkloadError,
    environment.MachineFileError,
    ResultsError,
    ValueError,
    OSError,
)
"""What ends a run with one line; all of them say what is wrong and where."""


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
    own: tuple[OwnModel, ...] = ()

    @property
    def results(self) -> Path:
        """Where raw samples go: those of a check are not for keeps."""
        return self.project.scratch / "check" if self.profile == "check" else self.project.results

    def variables(self, progress: Path) -> dict[str, str]:
        """What the measuring process is told."""
        return {
            context.PROFILE_VARIABLE: self.profile,
            context.HEAD_VARIABLE: self.commits[0],
            context.CASES_VARIABLE: " ".join(self.selection.cases),
            context.VARIANTS_VARIABLE: " ".join(self.selection.variants),
            context.WORKLOADS_VARIABLE: encoded(self.own),
            context.RESUME_VARIABLE: "1" if self.resume else "",
            context.RESULTS_VARIABLE: str(self.results),
            context.PROGRESS_VARIABLE: str(progress),
        }

    def command(self, listed: Path) -> list[str]:
        """asv's command line.

        The benchmarks are named down to their parameters: without that asv would start a process for every other one,
        only to be told to skip it.
        """
        patterns = [word for pattern in self.patterns() for word in ("--bench", pattern)]
        kept = ["--dry-run"] if self.profile == "check" else []
        return asv_process.command(self.project, "run", f"HASHFILE:{listed}", "--show-stderr", *kept, *patterns)

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
        return steps

    def _variants(self, case: profiles.Case, *, at_head: bool) -> list[variants.Variant]:
        return [
            variant
            for variant in variants.VARIANTS.values()
            if profiles.selected_out(self.profile, case, variant, self.selection, at_head=at_head) is None
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.commits is not None and (options.revisions or options.worktree):
        parser.error("--commits counts back from HEAD: leave it out where revisions or --worktree are given")
    if options.passes > 1 and (options.resume or options.check):
        parser.error("--passes measures everything again: leave out --resume and --check")
    try:
        plan = _plan(options)
        plan.project.prepare()
        with plan.project.alone():
            _introduce(plan)
            begin = datetime.now(timezone.utc).replace(microsecond=0)
            failures = [_measure(plan) for _ in range(options.passes)]
        found = _summary(plan, begin)
        _require_results(plan, found)
        print(found.text(resumed=plan.resume), end="", flush=True)
        compared = _compare(plan, options.report)
    except _PROBLEMS as error:
        print(f"{__package__}.run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = shlex.join(["python", "-m", f"{__package__}.run", *_resuming(given)])
        print(f"\nInterrupted. What was measured before is kept; go on with\n  {again}", file=sys.stderr)
        return _INTERRUPTED
    if any(failures):
        print(f"Something failed; all that asv said of it is in {_log(plan.project)}")
    if compared != 0:
        return 2
    if options.report is not None:
        print(options.report.resolve())
    return 1 if any(failures) or found.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.run",
        description="Measure commits or the working tree.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="what to measure (default: the last commits)")
    parser.add_argument(
        "--worktree", action="store_true", help="measure the working tree as it is now, beside what else is named"
    )
    defaults = ", ".join(f"{count} with {name}" for name, count in profiles.COMMITS.items())
    parser.add_argument(
        "--commits", type=_positive, metavar="N", help=f"HEAD and up to N-1 commits before it (default: {defaults})"
    )
    how = parser.add_argument_group("how thoroughly")
    how.add_argument(
        "--profile", choices=[name for name in get_args(profiles.Name) if name != "check"], default="quick",
        help="quick (the default): the small models at one batch size; sweep: eager, one peer and Kitsune at all of "
        "their batch sizes; full: every model, variant and batch size, which takes much longer",
    )  # fmt: skip
    how.add_argument(
        "--check", action="store_true", help="only see that everything runs: the fewest steps, and no figure is kept"
    )
    how.add_argument(
        "--resume", action="store_true",
        help="measure only what is missing of the profile: what earlier runs in this environment measured is skipped, "
        "what failed in them is tried again",
    )  # fmt: skip
    how.add_argument(
        "--passes", type=_positive, default=1, metavar="N",
        help="measure all commits so many times over: what drifts on the machine then shows in the intervals, also in "
        "those between commits",
    )  # fmt: skip
    what = parser.add_argument_group("what is measured of a commit")
    what.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="this case, such as mlp-b64; may be repeated"
    )
    what.add_argument(
        "--variant", action="append", default=[], metavar="NAME",
        help="this variant, such as kitsune_dropin_fp32; may be repeated. A speed-up needs eager of the same precision",
    )  # fmt: skip
    what.add_argument(
        "--workload", action="append", default=[], metavar="FILE.py:FUNCTION",
        help="your own model instead of the harness's: a function that builds it, or the name of an entry point; may "
        "be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="PATH", help="compare afterwards, and write the interactive report"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _resuming(given: Sequence[str]) -> list[str]:
    return list(given) if "--check" in given or "--resume" in given else [*given, "--resume"]


def _plan(options: argparse.Namespace) -> Plan:
    """What was asked for.

    Raises:
        RunError, ValueError: a revision, case or variant does not exist.
    """
    measured = project.here()
    profile: profiles.Name = "check" if options.check else options.profile
    own = _own_models(options.workload, measured.root)
    own_cases = tuple(case for model in own for case in model.cases())
    selection = profiles.Selection(tuple(options.case), tuple(options.variant), own_cases)
    profiles.check_selection(selection)
    device_type: profiles.DeviceType = "cpu" if environment.visible_gpu() is None else "cuda"
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
        own=own,
    )


def _own_models(sources: Sequence[str], root: Path) -> tuple[OwnModel, ...]:
    """The user's own models, each built once to see that it works.

    Raises:
        WorkloadError: one does not.
        RunError: two have the same name.
    """
    if not sources:
        return ()
    from harness.workloads import own_model  # imports torch, which no other run has to wait for

    found = tuple(own_model(source, root) for source in dict.fromkeys(sources))
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


def _introduce(plan: Plan) -> None:
    how = "a check" if plan.profile == "check" else f"{plan.profile} profile"
    print(f"Measuring {len(plan.commits)} commit(s) on {plan.machine}, {how}:", flush=True)
    texts = describe(plan.commits, plan.project.root)
    for commit in plan.commits:
        print(f"  {commit[:7]} {texts.get(commit, CommitText('', '')).subject}".rstrip(), flush=True)
    paths = plan.project.measured_paths
    changed = subprocess.run(
        ["git", "-C", str(plan.project.root), "status", "--porcelain", "--", *paths],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    if changed.stdout and head_under(plan.project.root, plan.commits[0]) is None:
        print("Commits are measured: your uncommitted changes are not (--worktree measures them).", flush=True)
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD:
        print(
            f"The load average is {load:.1f}: what else runs here makes times vary, and verdicts inconclusive.",
            flush=True,
        )


def _measure(plan: Plan) -> bool:
    """Runs asv over the commits; whether it says that a benchmark failed.

    Raises:
        RunError: asv could not run the benchmarks at all.
    """
    if plan.profile == "check":
        shutil.rmtree(plan.results, ignore_errors=True)
    for damage in Store(plan.project.results).set_asv_s_damage_aside(plan.machine):
        print(f"Damaged, and set aside for asv to make it again: {damage.path}: {damage.problem}", flush=True)
    scratch = plan.project.scratch
    listed, progress = scratch / "commits.txt", scratch / "progress.jsonl"
    listed.write_text("\n".join(plan.commits) + "\n", encoding="ascii")
    watch = Watch(progress, plan.expected(), scratch / "durations.json")

    def show() -> None:
        for line in watch.new_lines():
            print(line, flush=True)

    variables = {**os.environ, **plan.variables(progress)}
    try:
        code = asv_process.run(plan.command(listed), plan.project.home, variables, _log(plan.project), show)
    finally:
        watch.remember()
    for commit, problem in watch.problems:
        print(f"\n{commit[:8]} could not be measured to its end:\n{problem}", flush=True)
    if code not in (0, asv_process.SOME_FAILED):
        raise RunError(f"asv ended with exit code {code}:\n{_last_words(plan.project)}")
    return code == asv_process.SOME_FAILED


def _summary(plan: Plan, since: datetime) -> Summary:
    store = Store(plan.results)
    if plan.machine not in store.machines():
        return Summary((), (), plan.commits)
    return summary(store.load(plan.machine, plan.commits), plan.commits, since)


def _require_results(plan: Plan, found: Summary) -> None:
    """Makes sure that there are results of this run to compare, or that nothing was missing.

    Raises:
        RunError: there are none.
    """
    if found.measured or (plan.resume and not found.untouched_without_results):
        return
    raise RunError(f"nothing was measured; asv's last words:\n{_last_words(plan.project)}")


def _compare(plan: Plan, report: Path | None) -> int:
    """Prints the comparison where a report is wanted or the figures are not kept; the exit code of the command."""
    arguments = ["--machine", plan.machine]
    if plan.profile != "check" and head_under(plan.project.root, plan.commits[0]) is not None:
        arguments.append("--worktree")
    if report is None and plan.profile != "check":
        print(f"Compare: python -m {__package__}.compare {' '.join(arguments)}")
        return 0
    arguments += ["--results", str(plan.results)]
    arguments += [] if report is None else ["--html", str(report)]
    return compare.main(arguments)


def _log(measured: Project) -> Path:
    return measured.scratch / "asv.log"


def _last_words(measured: Project) -> str:
    return last_lines(_log(measured).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
