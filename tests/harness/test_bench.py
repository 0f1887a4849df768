"""The command behind `make bench`: which commits, which benchmarks, which exit code."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness import bench, profiles, variants
from harness.benchmarks.training import Training
from harness.store import Store


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for number in range(4):
        git(folder, "commit", "--quiet", "--allow-empty", "--message", str(number))
    return folder


def test_the_last_commits_newest_first(repository: Path) -> None:
    expected = git(repository, "log", "--format=%H").split()
    assert bench.last_commits(repository, 3) == tuple(expected[:3])
    assert bench.last_commits(repository, 99) == tuple(expected)


def test_a_shallow_clone_of_one_commit_is_enough(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", str(clone))
    assert bench.last_commits(clone, 3) == (git(repository, "rev-parse", "HEAD"),)


def test_where_nothing_is_committed_there_is_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(bench.BenchError, match="no commit to measure"):
        bench.last_commits(tmp_path, 3)
    git(tmp_path, "init", "--quiet")
    with pytest.raises(bench.BenchError, match="no commit to measure"):
        bench.last_commits(tmp_path, 3)


def chosen(profile: profiles.Name, track: str) -> set[tuple[str, str]]:
    """What asv's ``--bench`` selects of a benchmark's parameters."""
    patterns = [re.compile(pattern) for pattern in bench._selection(profile)]
    return {
        (variant, case)
        for variant in Training.params[0]
        for case in Training.params[1]
        if any(pattern.search(f"training.Training.{track}({variant!r}, {case!r})") for pattern in patterns)
    }


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("profile", ["quick", "sweep", "full"])
def test_asv_is_asked_for_what_the_profile_measures_and_nothing_else(
    profile: profiles.Name, device_type: profiles.DeviceType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.environment, "visible_gpu", lambda: None if device_type == "cpu" else "a GPU")
    measured = [
        (variant, case)
        for variant in variants.VARIANTS.values()
        for case in profiles.cases(profile, device_type)
        if profiles.left_out(profile, case, variant, at_head=True) is None
    ]
    assert chosen(profile, "track_step_seconds") == {(variant.name, case.name) for variant, case in measured}
    assert chosen(profile, "track_setup_seconds") == {
        (variant.name, case.name)
        for variant, case in measured
        if profiles.needs_profile(profile, variant, at_head=True)
    }


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("· Creating environments\n", True),
        ("[25.00%] ··· Setting up training:41                                          ok\n", True),
        ("[25.00%] ··· ============================= =============== ========\n", False),
        ("                       eager_fp32              mlp-b64      277±0M \n", False),
        ("             ============================= ========\n", False),
    ],
)
def test_asv_s_messages_are_shown_and_its_tables_are_not(line: str, shown: bool) -> None:
    assert bool(bench._ASV_MESSAGE.match(line)) == shown


@pytest.fixture
def asv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces asv by a Python program of the test's, and what follows it by nothing."""
    monkeypatch.setattr(bench, "_SCRATCH", tmp_path)
    monkeypatch.setattr(bench, "_LOG", tmp_path / "asv.log")
    monkeypatch.setattr(bench.environment, "write_asv_machine_file", lambda: "here")
    monkeypatch.setattr(bench, "last_commits", lambda root, count: ("a" * 40,))
    monkeypatch.setattr(bench, "_introduce", lambda profile, machine, commits: None)
    monkeypatch.setattr(bench, "_require_results", lambda machine, commits, since: None)
    monkeypatch.setattr(bench, "_compare", lambda machine: 0)

    def replace(program: str) -> None:
        run_asv = bench._run_asv

        def run(command: Sequence[str], variables: dict[str, str], progress: Path) -> int:
            return run_asv([sys.executable, "-c", program], variables, progress)

        monkeypatch.setattr(bench, "_run_asv", run)

    return replace


PROGRESS = "import os; print('one', file=open(os.environ['HARNESS_PROGRESS'], 'a'), flush=True);"


def test_progress_and_messages_are_shown_and_the_report_s_path_is_last(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asv(PROGRESS + "print('· asv speaks'); print('and draws tables')")
    assert bench.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:-1]) == ["one", "· asv speaks"]
    assert lines[-1] == str(bench._REPORT)


def test_the_measurement_is_told_its_profile_and_head(asv: Callable[[str], None]) -> None:
    told = "[os.environ['HARNESS_PROFILE'], os.environ['HARNESS_HEAD']]"
    asv(f"import os, sys; sys.exit({told} != ['full', {'a' * 40!r}])")
    assert bench.main(["--profile", "full"]) == 0


def test_a_failing_benchmark_is_exit_code_1(asv: Callable[[str], None]) -> None:
    asv("raise SystemExit(2)")
    assert bench.main([]) == 1


def test_an_asv_that_breaks_is_exit_code_2_with_its_last_words(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asv("raise SystemExit('no such environment')")
    assert bench.main([]) == 2
    assert "no such environment" in capsys.readouterr().err


def test_a_comparison_that_cannot_be_formed_is_exit_code_2(
    asv: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asv("pass")
    monkeypatch.setattr(bench, "_compare", lambda machine: 2)
    assert bench.main([]) == 2


def test_a_run_without_results_is_exit_code_2(
    asv: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(machine: str, commits: Sequence[str], since: datetime) -> None:
        raise bench.BenchError("nothing was measured")

    asv("pass")
    monkeypatch.setattr(bench, "_require_results", nothing)
    assert bench.main([]) == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_only_results_of_this_run_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, now = "a" * 40, datetime.now(timezone.utc)
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    monkeypatch.setattr(bench, "_LOG", tmp_path / "asv.log")
    (tmp_path / "asv.log").write_text("asv gave up\n")
    with pytest.raises(bench.BenchError, match="asv gave up"):
        bench._require_results("here", [commit], now)
    Store(tmp_path / "results").append(
        "here",
        commit,
        [
            {
                "kind": "run",
                "run": "it",
                "commit": commit,
                "started": now.isoformat(),
                "facts": {},
                "kitsune_file": None,
                "harness_file": None,
                "profile": "quick",
            }
        ],
    )
    bench._require_results("here", [commit], now)
    with pytest.raises(bench.BenchError, match="nothing was measured"):
        bench._require_results("here", [commit], now + timedelta(seconds=1))
    with pytest.raises(bench.BenchError, match="nothing was measured"):
        bench._require_results("here", ["b" * 40], now)


@pytest.mark.parametrize("obeys", [True, False])
def test_an_interrupt_ends_asv_and_is_exit_code_130(
    asv: Callable[[str], None],
    obeys: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(progress: Path, position: int) -> int:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt
        return position

    monkeypatch.setattr(bench, "_show_new_lines", interrupt)
    monkeypatch.setattr(bench, "_STOP_SECONDS", 0.5)
    ignore = "" if obeys else "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)];"
    write = (
        f"path = {str(tmp_path / 'pid')!r}; open(path + '-', 'w').write(str(os.getpid())); os.rename(path + '-', path);"
    )
    asv(f"import os, signal, time; {ignore} {write} time.sleep(600)")
    assert bench.main([]) == 130
    assert "kept" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_the_number_of_commits_is_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([f"--commits={text}"])
    assert "whole number from 1" in capsys.readouterr().err
