"""``python -m harness.run [REVISION ...]``: measures commits or the working tree with asv, and says what became of it.

Exit codes: 0, everything that can run here was measured; 1, something was measured and something failed (a summary says
what); 2, nothing could be measured or compared; 128 and the number of a signal, interrupted by it (130 by a key, 143 by
SIGTERM; what was measured before is kept, but by a check).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import get_args

from harness import asv_process, compare, environment, profiles
from harness.failures import last_lines
from harness.interruptions import Interrupted, interruptible
from harness.own_models import WorkloadError
from harness.progress import Watch
from harness.project import Project, ProjectError, write_check_configuration
from harness.revisions import CommitText, describe
from harness.run_plan import Plan, RunError, plan_of
from harness.run_summary import Summary, summary
from harness.store import ResultsError, Store
from harness.worktree import WorktreeError, head_under

_BUSY_LOAD = 0.7
_EPILOG = """
REVISION is anything git understands (HEAD~2, a tag, a branch, a hash), or a range: A..B is every commit after A up to
B. Without any, HEAD and the commits before it are measured. Raw samples are appended to the results folder after every
process, so that what was measured is never lost; `asv show`, `asv compare` and `asv publish` read the same runs.

exit codes: 0, everything that can run here was measured; 1, something failed, and a summary says what; 2, nothing could
be measured or compared; 130, interrupted by a key; 143, by SIGTERM; 129, by a terminal that was closed.
"""


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.commits is not None and (options.revisions or options.worktree):
        parser.error("--commits counts back from HEAD: leave it out where revisions or --worktree are given")
    if options.passes > 1 and (options.resume or options.check):
        parser.error("--passes measures everything again: leave out --resume and --check")
    if options.model and options.case:
        parser.error("--model and --case both choose what is measured: give one of them")
    if options.check and options.until != "rounds":
        parser.error("--check keeps no figure that could be conclusive: leave out --until")
    try:
        with interruptible():
            return _run(options)
    except _PROBLEMS as error:
        print(f"{__package__}.run: {error}", file=sys.stderr)
        return 2
    except Interrupted as interruption:
        print(f"\nInterrupted. {_what_is_kept(given, options)}", file=sys.stderr)
        return 128 + interruption.number


def _run(options: argparse.Namespace) -> int:
    """Measures and tells what came of it; the exit code."""
    plan = plan_of(options)
    plan.project.prepare()
    with plan.project.alone() as lock:
        _introduce(plan)
        begin = datetime.now(timezone.utc).replace(microsecond=0)
        failures = [_measure(plan, lock) for _ in range(options.passes)]
    found = _summary(plan, begin)
    _require_results(plan, found)
    print(found.text(resumed=plan.resume), end="", flush=True)
    compared = _compare(plan, options.report)
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
        "--profile", choices=[name for name in get_args(profiles.Name) if name != "check"],
        default=profiles.DEFAULT,
        help="quick (the default): the small models at one batch size; sweep: eager, the fastest peers and Kitsune "
        "at all of their batch sizes; full: every model, variant and batch size, which takes much longer; zoo: models "
        "of many more kinds, each at one batch size, beside every peer that may be the fastest",
    )  # fmt: skip
    how.add_argument(
        "--until", choices=get_args(profiles.Until), default="rounds",
        help="rounds (the default): as many as the profile says; conclusive: more, up to a bound, where a verdict is "
        "inconclusive",
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
        "--model", action="append", default=[], metavar="NAME[,NAME]",
        help="of the profile's cases those of this model, such as dlrm with --profile zoo; may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--variant", action="append", default=[], metavar="NAME",
        help="this variant, such as kitsune_dropin_fp32; may be repeated. A speed-up needs eager of the same precision",
    )  # fmt: skip
    what.add_argument(
        "--workload", action="append", default=[], metavar="FILE.py:FUNCTION",
        help="your own model instead of the harness's: a function that builds it, or the name of an entry point; may "
        "be repeated",
    )  # fmt: skip
    what.add_argument(
        "--phases", action="store_true",
        help="also divide a step into data, forward, backward, optimizer and, on a GPU, the time it waits for the "
        "host: by torch.profiler, in processes of their own, after everything else of a case. The traces are kept in "
        "results/<machine>/traces. With --resume, for what is measured already",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="PATH", help="compare afterwards, and write the interactive report"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _what_is_kept(given: Sequence[str], options: argparse.Namespace) -> str:
    """What an interruption leaves, with the command that measures what is missing, where there is one."""
    if options.check:
        return "A check keeps nothing of what was measured."
    told = "What was measured before is kept"
    if options.passes > 1:
        return f"{told}."
    command = ["python", "-m", f"{__package__}.run", *given, *([] if options.resume else ["--resume"])]
    return f"{told}; go on with\n  {shlex.join(command)}"


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


def _measure(plan: Plan, lock: int) -> bool:
    """Runs asv over the commits; whether it says that a benchmark failed.

    Args:
        lock: what holds the checkout.

    Raises:
        RunError: asv could not run the benchmarks at all.
    """
    if plan.profile == "check":
        shutil.rmtree(plan.results, ignore_errors=True)
        write_check_configuration(plan.project)
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
        code = asv_process.run(plan.command(listed), plan.project.home, variables, _log(plan.project), lock, show)
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
