"""``python -m harness.bench``: measures the last commits, compares them, and writes the report.

Exit codes: 0, everything that can run here was measured; 1, something was measured and something failed (the report
says what); 2, nothing could be measured or compared; 130, interrupted (what was measured before is kept).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import get_args

from harness import context, environment, profiles, variants
from harness.failures import last_lines
from harness.store import ResultsError, Store

_ROOT = Path(__file__).resolve().parent.parent
_REPORT = _ROOT / "report.html"
_SCRATCH = _ROOT / ".asv"
_LOG = _SCRATCH / "asv.log"
_POLL_SECONDS = 0.3
_STOP_SECONDS = 5.0
_BUSY_LOAD = 0.7
_INTERRUPTED = 130
_ASV_FAILURES = 2
_ASV_MESSAGE = re.compile(r"(\[[ \d.]+%\] )?·+ (?!=|For parameters)")


class BenchError(Exception):
    """The benchmarks cannot be run here; the message says what is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    profile: profiles.Name = options.profile
    try:
        commits = last_commits(_ROOT, options.commits or profiles.COMMITS[profile])
        machine = environment.write_asv_machine_file()
        _introduce(profile, machine, commits)
        begin = datetime.now(timezone.utc).replace(microsecond=0)
        failed = _measure(profile, commits, options.until)
        _require_results(machine, commits, begin)
        compared = _compare(machine)
    except (BenchError, environment.MachineFileError, ResultsError, ValueError) as error:
        print(f"harness.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. What was measured before is kept in results/.", file=sys.stderr)
        return _INTERRUPTED
    if failed:
        print(f"Something failed; all that asv said of it is in {_LOG}")
    if compared != 0:
        return 2
    print(_REPORT)
    return 1 if failed else 0


def last_commits(root: Path, count: int) -> tuple[str, ...]:
    """Full hashes of HEAD and the commits before it, newest first: as many as there are, at most ``count``.

    Raises:
        BenchError: ``root`` is no git checkout, or one without a commit.
    """
    command = ["git", "-C", str(root), "rev-list", "--first-parent", f"--max-count={count}", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except OSError as error:
        raise BenchError(f"git cannot be run ({error}); commits are measured from a git checkout") from error
    commits = tuple(done.stdout.split())
    if done.returncode != 0 or not commits:
        raise BenchError(f"{root} has no commit to measure; git says: {done.stderr.strip()}")
    return commits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench", description="Measure the last commits, compare them, write the report."
    )
    parser.add_argument(
        "--profile",
        choices=get_args(profiles.Name),
        default="quick",
        help="quick (the default): the small models at one batch size; sweep: eager, one peer and Kitsune at all of "
        "their batch sizes; full: every model, variant and batch size, which takes much longer",
    )
    defaults = ", ".join(f"{count} with {name}" for name, count in profiles.COMMITS.items())
    parser.add_argument(
        "--commits",
        type=_positive,
        metavar="N",
        help=f"measure HEAD and up to N-1 commits before it (default: {defaults})",
    )
    parser.add_argument(
        "--until",
        choices=get_args(profiles.Until),
        default="rounds",
        help="rounds (the default): as many as the profile says; conclusive: up to a bound, until verdicts are",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _introduce(profile: profiles.Name, machine: str, commits: Sequence[str]) -> None:
    print(f"Measuring {len(commits)} commit(s) on {machine}, {profile} profile:", flush=True)
    listed = subprocess.run(
        ["git", "-C", str(_ROOT), "log", "--no-walk=unsorted", "--format=  %h %s", *commits],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    print(listed.stdout, end="", flush=True)
    changed = subprocess.run(
        ["git", "-C", str(_ROOT), "status", "--porcelain", "--", "kitsune"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    if changed.stdout:
        print("Commits are measured: your uncommitted changes in kitsune/ are not.", flush=True)
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD:
        print(
            f"The load average is {load:.1f}: what else runs here makes times vary, and verdicts inconclusive.",
            flush=True,
        )


def _measure(profile: profiles.Name, commits: Sequence[str], until: profiles.Until) -> bool:
    """Runs asv over the commits; whether any benchmark failed.

    Raises:
        BenchError: asv could not run the benchmarks at all.
    """
    _SCRATCH.mkdir(exist_ok=True)
    listed, progress = _SCRATCH / "commits.txt", _SCRATCH / "progress.txt"
    listed.write_text("\n".join(commits) + "\n", encoding="ascii")
    progress.write_text("", encoding="utf-8")
    variables = {
        **os.environ,
        context.PROFILE_VARIABLE: profile,
        context.HEAD_VARIABLE: commits[0],
        context.PROGRESS_VARIABLE: str(progress),
        context.UNTIL_VARIABLE: until,
    }
    command = [sys.executable, "-m", "asv", "run", f"HASHFILE:{listed}", "--show-stderr"]
    for pattern in _selection(profile):
        command += ["--bench", pattern]
    code = _run_asv(command, variables, progress)
    if code not in (0, _ASV_FAILURES):
        raise BenchError(f"asv ended with exit code {code}:\n{_last_words()}")
    return code == _ASV_FAILURES


def _selection(profile: profiles.Name) -> list[str]:
    """Regular expressions for asv's ``--bench``: the parameters that this profile may measure on this machine.

    Without them asv would start a process for every other one, only to be told to skip it.
    """
    device_type: profiles.DeviceType = "cpu" if environment.visible_gpu() is None else "cuda"
    return [
        rf"\.{_tracks(profile, variant)}\('{variant.name}', '{re.escape(case.name)}'\)$"
        for case in profiles.cases(profile, device_type)
        for variant in variants.VARIANTS.values()
        if profiles.left_out(profile, case, variant, at_head=True) is None
    ]


def _tracks(profile: profiles.Name, variant: variants.Variant) -> str:
    return r"track_\w+" if profiles.needs_profile(profile, variant, at_head=True) else "track_step_seconds"


def _compare(machine: str) -> int:
    command = [sys.executable, "-m", "harness.compare", "--machine", machine, "--html", str(_REPORT)]
    return subprocess.run(command, cwd=_ROOT, check=False).returncode


def _require_results(machine: str, commits: Sequence[str], since: datetime) -> None:
    """Makes sure that there are results of this run to compare.

    Raises:
        BenchError: no commit was measured since then.
    """
    store = Store(_ROOT / "results")
    if machine in store.machines():
        history = store.load(machine, commits)
        if any(run.started >= since for commit in history.commits for run in history.runs(commit)):
            return
    raise BenchError(f"nothing was measured; asv's last words:\n{_last_words()}")


def _last_words() -> str:
    return last_lines(_LOG.read_text(encoding="utf-8"))


def _run_asv(command: Sequence[str], variables: dict[str, str], progress: Path) -> int:
    """Runs asv in the root. Its messages and the progress file's lines appear as they come; the log keeps all."""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    reader = threading.Thread(target=_copy_messages, args=(process,), daemon=True)
    reader.start()
    position = 0
    try:
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            position = _show_new_lines(progress, position)
    except KeyboardInterrupt:
        _stop(process)
        raise
    reader.join()
    _show_new_lines(progress, position)
    return process.returncode


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends asv, which then ends what it has started. A key that interrupts this process interrupts asv as well."""
    for number in (None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            return


def _copy_messages(process: subprocess.Popen[str]) -> None:
    """Shows asv's messages but not its tables, which have a row for every variant of every case there is."""
    assert process.stdout is not None
    with _LOG.open("w", encoding="utf-8") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            if _ASV_MESSAGE.match(line):
                print(line, end="", flush=True)


def _show_new_lines(progress: Path, position: int) -> int:
    """Prints what was appended since a position; the position after it."""
    with progress.open("rb") as file:
        file.seek(position)
        new = file.read()
    complete = new[: new.rfind(b"\n") + 1]
    print(complete.decode("utf-8"), end="", flush=True)
    return position + len(complete)


if __name__ == "__main__":
    sys.exit(main())
