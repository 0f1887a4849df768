"""The command behind `make bench`: which commits, which benchmarks, which exit code, what it says."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from harness import asv_process, environment, profiles, project, run, run_plan, variants
from harness.interruptions import Interrupted
from harness.progress import Watch
from harness.project import Project
from harness.run_plan import Plan, RunError, last_commits
from harness.store import Store
from tests.harness import sample
from tests.harness.checkout import ROOT
from tests.harness.repository import git

COMMIT = "a" * 40


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
    assert last_commits(repository, 3) == tuple(expected[:3])
    assert last_commits(repository, 99) == tuple(expected)


def test_a_shallow_clone_of_one_commit_is_enough(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", str(clone))
    assert last_commits(clone, 3) == (git(repository, "rev-parse", "HEAD"),)


def test_where_nothing_is_committed_there_is_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no commit to measure"):
        last_commits(tmp_path, 3)
    git(tmp_path, "init", "--quiet")
    with pytest.raises(RunError, match="no commit to measure"):
        last_commits(tmp_path, 3)


@pytest.mark.parametrize("place", [".", "src"])
def test_a_workload_elsewhere_imports_the_project_s_own_code_from_any_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"code_in_{place.replace('.', 'root')}"
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / f"{package}.py").write_text(
        (ROOT / "examples" / "own_model.py").read_text().replace('name="spirals"', f"name={package!r}")
    )
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "step.py").write_text(f"from {package} import build\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    elsewhere = Project(tmp_path, tmp_path / ".kitsune-harness", is_kitsune=False)
    (model,) = run_plan.own_models(["step.py:build"], elsewhere)
    assert (model.name, model.source) == (package, "benchmarks/step.py:build")


def plan_of(profile: profiles.Name, device_type: profiles.DeviceType = "cpu", **changes: Any) -> Plan:
    root = Path("/nowhere")
    everything = {
        "project": Project(root, root, is_kitsune=True), "machine": "here", "device_type": device_type,
        "profile": profile, "commits": (COMMIT,), "selection": profiles.Selection(), "resume": False,
    }  # fmt: skip
    return Plan(**{**everything, **changes})


def chosen(plan: Plan, track: str) -> set[tuple[str, str]]:
    """What asv's ``--bench`` selects of a benchmark's parameters."""
    patterns = [re.compile(pattern) for pattern in plan.patterns()]
    return {
        (variant, case)
        for variant in variants.names()
        for case in dict.fromkeys(case.name for case in (*profiles.CASES, *profiles.ZOO))
        if any(pattern.search(f"training.Training.{track}({variant!r}, {case!r})") for pattern in patterns)
    }


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("profile", ["quick", "sweep", "full", "zoo"])
def test_asv_is_asked_for_what_the_profile_measures_and_nothing_else(
    profile: profiles.Name, device_type: profiles.DeviceType
) -> None:
    plan = plan_of(profile, device_type)
    measured = [
        (variant, case)
        for variant in variants.VARIANTS.values()
        for case in profiles.cases(profile, device_type)
        if profiles.left_out(profile, case, variant, at_head=True) is None
    ]
    assert chosen(plan, "track_step_seconds") == {(variant.name, case.name) for variant, case in measured}
    assert chosen(plan, "track_setup_seconds") == {
        (variant.name, case.name)
        for variant, case in measured
        if profiles.needs_profile(profile, variant, at_head=True)
    }


def test_models_of_the_zoo_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "visible_gpu", lambda: None)
    monkeypatch.setattr(environment, "write_asv_machine_file", lambda: "here")
    monkeypatch.setattr(project, "here", lambda: Project(ROOT, tmp_path, is_kitsune=True))
    given = ["HEAD", "--profile", "zoo", "--model", "clip,dlrm", "--model", "vae"]
    found = run_plan.plan_of(run._parser().parse_args(given))
    assert found.selection.cases == ("dlrm-b64", "vae-b8", "clip-b4")
    assert {case for _, case in chosen(found, "track_step_seconds")} == set(found.selection.cases)
    with pytest.raises(ValueError, match="the quick profile has no model 'clip' here; it has mlp, lenet, resnet18"):
        run_plan.plan_of(run._parser().parse_args(["HEAD", "--model", "clip"]))


def test_models_and_cases_are_not_chosen_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--model", "mlp", "--case", "mlp-b64"])
    assert "--model and --case both choose what is measured: give one of them" in capsys.readouterr().err


def test_phases_are_steps_of_their_own_where_they_are_asked_for() -> None:
    plain, divided = (plan_of("quick", "cpu", phases=asked) for asked in (False, True))
    assert (plain.variables(Path("p"))["HARNESS_PHASES"], divided.variables(Path("p"))["HARNESS_PHASES"]) == ("", "1")
    added = [step for step in divided.expected()[COMMIT] if step not in plain.expected()[COMMIT]]
    names = ("eager", "compile", "kitsune_dropin", "kitsune_trainstep")
    assert [step.part for step in added if step.case == "mlp-b64"] == [f"phases of {name}_fp32" for name in names]


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
    assert bool(asv_process._MESSAGE.match(line)) == shown


@pytest.fixture
def asv(monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path) -> Callable[[str], None]:
    """Replaces asv by a Python program of the test's, in a repository of four commits."""
    measured = Project(repository, repository, is_kitsune=True)
    monkeypatch.setattr(project, "here", lambda: measured)
    monkeypatch.setattr(environment, "write_asv_machine_file", lambda: "here")
    monkeypatch.setattr(environment, "visible_gpu", lambda: None)

    def replace(program: str) -> None:
        path = tmp_path / "asv.py"
        path.write_text(PRELUDE.format(root=str(ROOT), results=str(repository / "results")) + program)
        monkeypatch.setattr(asv_process, "command", lambda project, *arguments: [sys.executable, str(path), *arguments])

    return replace


PRELUDE = """
import json, os, sys
sys.path.insert(0, {root!r})
from datetime import datetime, timezone
from pathlib import Path
from harness.progress import Watch
from harness.project import Project
from harness.run_plan import Plan, RunError, last_commits
from harness.store import Store
from tests.harness import sample
from tests.harness.checkout import ROOT
from tests.harness.repository import git

COMMIT = "a" * 40
from tests.harness import sample

HEAD = os.environ["HARNESS_HEAD"]
CASE = sample.case_fields("mlp", 64, "cpu")

def keep(*records, commit=HEAD):
    run = sample.run_record("r", commit, {{"device_type": "cpu"}}, started=datetime.now(timezone.utc))
    Store(Path({results!r})).append("here", commit, [run, *records])

def timed(number=0):
    return sample.round_record("r", number, CASE, {{"eager_fp32": [1e-3, 2e-3], "kitsune_dropin_fp32": [5e-4, 1e-3]}})

def progress(*events):
    with open(os.environ["HARNESS_PROGRESS"], "a") as file:
        file.writelines(json.dumps(dict(commit=HEAD, **event)) + "\\n" for event in events)

"""


def test_progress_and_messages_are_shown_and_what_to_do_next(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asv(
        "progress(dict(steps=[['mlp-b64', 'round'], ['mlp-b64', 'round']]))\n"
        "progress(dict(case='mlp-b64', part='round', line='one of two', seconds=600.0))\n"
        "print('· asv speaks'); print('and draws tables'); keep(timed())"
    )
    assert run.main(["HEAD"]) == 0
    out = capsys.readouterr().out
    assert "one of two  about 10 min left\n" in out
    assert "· asv speaks\n" in out
    assert "draws" not in out
    assert out.endswith("Compare: python -m harness.compare --machine here\n")


def test_with_a_report_its_path_is_the_last_line(
    asv: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asv("keep(timed(0), timed(1))")
    report = tmp_path / "report.html"
    assert run.main(["--report", str(report)]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == str(report)
    assert "kitsune_dropin_fp32" in out
    assert report.stat().st_size > 0


def test_the_measurement_is_told_what_was_asked_for(asv: Callable[[str], None], repository: Path) -> None:
    wanted = {
        "HARNESS_PROFILE": "full", "HARNESS_HEAD": git(repository, "rev-parse", "HEAD~1"),
        "HARNESS_CASES": "mlp-b64 lenet-b16", "HARNESS_VARIANTS": "eager_fp32", "HARNESS_RESUME": "1",
    }  # fmt: skip
    asv(f"keep(timed()); sys.exit(1 if any(os.environ[name] != value for name, value in {wanted!r}.items()) else 0)")
    arguments = ["HEAD~3", "HEAD~1", "--profile", "full", "--case", "mlp-b64", "--case", "lenet-b16", "--resume"]
    assert run.main([*arguments, "--variant", "eager_fp32"]) == 0
    listed = (repository / ".asv" / "commits.txt").read_text().split()
    assert listed == git(repository, "rev-parse", "HEAD~1", "HEAD~3").split()


def test_a_range_is_every_commit_after_its_beginning(asv: Callable[[str], None], repository: Path) -> None:
    asv("keep(timed())")
    assert run.main(["HEAD~2..HEAD"]) == 0
    assert (repository / ".asv" / "commits.txt").read_text().split() == git(
        repository, "rev-parse", "HEAD", "HEAD~1"
    ).split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["v99"], "'v99' names no commit"),
        (["HEAD..v99"], "'HEAD..v99' names no commit"),
        (["--case", "mlp-b65"], "no case 'mlp-b65'; there are mlp-b16, "),
        (["--variant", "eager"], "no variant 'eager'; there are eager_fp32, "),
        (["--case", "resnet18-b512"], "nothing to measure on this machine, which measures on cpu"),
    ],
)
def test_what_does_not_exist_is_one_line_that_says_what_does(
    asv: Callable[[str], None], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asv("raise SystemExit('asv must not be started')")
    assert run.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("harness.run: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_check_keeps_nothing_and_shows_what_it_found(
    asv: Callable[[str], None], repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check = repository / ".asv" / "check"
    shutil.copy(ROOT / "asv.conf.json", repository)
    asv(f"assert '--dry-run' in sys.argv and os.environ['HARNESS_RESULTS'] == {str(check)!r}\n"
        f"Store(Path({str(check)!r})).append('here', HEAD, [sample.run_record('r', HEAD, {{'device_type': 'cpu'}}, "
        "started=datetime.now(timezone.utc)), timed()])")  # fmt: skip
    assert run.main(["--check"]) == 0
    assert "kitsune_dropin_fp32" in capfd.readouterr().out
    assert not (repository / "results").exists()


def test_failures_are_summed_up_with_the_failing_process_s_own_output(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asv(
        "reason = 'RuntimeError: no way back\\nTraceback:\\n  the last line of the process'\n"
        "keep(timed(), *(sample.skip_record('r', CASE, name, reason, 'failed') for name in ('a_fp32', 'b_fp32')),\n"
        "     sample.skip_record('r', CASE, 'c_fp32', 'cannot run here'))\n"
        "sys.exit(2)"
    )
    assert run.main(["HEAD"]) == 1
    out = capsys.readouterr().out
    assert "2 failures:" in out
    assert "mlp-b64 a_fp32, mlp-b64 b_fp32\n    RuntimeError: no way back\n" in out
    assert "      the last line of the process\n" in out
    assert "cannot run here" not in out
    assert "asv.log" in out


def test_a_failure_to_tell_phases_apart_is_told_like_any_other(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asv("keep(timed(), sample.failed_phases_record('r', CASE, 'eager_fp32', 'TraceError: nothing was seen'))")
    assert run.main(["HEAD", "--phases"]) == 1
    out = capsys.readouterr().out
    assert "1 failure:" in out
    assert "mlp-b64 eager_fp32, its phases\n    TraceError: nothing was seen\n" in out


def test_failures_of_earlier_runs_are_not_of_this_one(
    asv: Callable[[str], None], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    early = sample.run_record("old", commit, {}, started=datetime(2026, 1, 1, tzinfo=timezone.utc))
    case = sample.case_fields("mlp", 64, "cpu")
    failed = sample.skip_record("old", case, "a_fp32", "long ago", "failed")
    Store(repository / "results").append("here", commit, [early, failed])
    asv("keep(timed())")
    assert run.main(["HEAD"]) == 0
    assert "long ago" not in capsys.readouterr().out


def test_resuming_where_nothing_is_missing_is_no_failure(
    asv: Callable[[str], None], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    early = sample.run_record("old", commit, {}, started=datetime(2026, 1, 1, tzinfo=timezone.utc))
    case = sample.case_fields("mlp", 64, "cpu")
    Store(repository / "results").append(
        "here", commit, [early, sample.round_record("old", 0, case, {"eager_fp32": [1.0]})]
    )
    asv("pass")
    assert run.main(["HEAD", "--resume"]) == 0
    assert f"{commit[:8]}: everything was measured already" in capsys.readouterr().out
    assert run.main(["HEAD"]) == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_an_asv_that_breaks_is_exit_code_2_with_its_last_words(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asv("raise SystemExit('no such environment')")
    assert run.main([]) == 2
    assert "no such environment" in capsys.readouterr().err


def test_a_comparison_that_cannot_be_formed_is_exit_code_2(
    asv: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asv("keep()")
    assert run.main(["--report", str(tmp_path / "report.html")]) == 2
    assert "no readable timings" in capfd.readouterr().err


def test_a_disk_that_is_full_is_one_line(
    asv: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(self: Project) -> None:
        raise OSError(28, "No space left on device", str(self.scratch))

    asv("pass")
    monkeypatch.setattr(Project, "prepare", no_space)
    assert run.main([]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert ".asv" in error


@pytest.mark.parametrize("obeys", [True, False])
def test_an_interrupt_ends_asv_and_says_how_to_go_on(
    asv: Callable[[str], None],
    obeys: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(self: Watch) -> list[str]:
        if (tmp_path / "pid").exists():
            raise Interrupted(signal.SIGINT)
        return []

    monkeypatch.setattr(Watch, "new_lines", interrupt)
    monkeypatch.setattr(asv_process, "_STOP_SECONDS", 0.5)
    ignore = "" if obeys else "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)];"
    write = (
        f"path = {str(tmp_path / 'pid')!r}; open(path + '-', 'w').write(str(os.getpid())); os.rename(path + '-', path);"
    )
    asv(f"import os, signal, time; {ignore} {write} time.sleep(600)")
    assert run.main(["HEAD", "--case", "mlp-b64"]) == 130
    error = capsys.readouterr().err
    assert "kept" in error
    assert "python -m harness.run HEAD --case mlp-b64 --resume" in error
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_interrupted_check_says_that_nothing_is_kept(
    asv: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: Project) -> None:
        raise Interrupted(signal.SIGINT)

    asv("pass")
    monkeypatch.setattr(Project, "prepare", interrupt)
    assert run.main(["--check"]) == 130
    assert capsys.readouterr().err == "\nInterrupted. A check keeps nothing of what was measured.\n"


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_the_number_of_commits_is_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main([f"--commits={text}"])
    assert "whole number from 1" in capsys.readouterr().err


def test_commits_are_counted_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--commits=2", "HEAD"])
    assert "leave it out" in capsys.readouterr().err


def test_asv_s_processes_are_told_how_long_to_go_on() -> None:
    assert plan_of("quick").variables(Path("/progress"))["HARNESS_UNTIL"] == "rounds"
    assert plan_of("quick", until="conclusive").variables(Path("/progress"))["HARNESS_UNTIL"] == "conclusive"


def test_a_check_is_never_conclusive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--check", "--until", "conclusive"])
    assert "leave out --until" in capsys.readouterr().err


def test_what_is_named_is_measured_whether_the_profile_has_it_or_not() -> None:
    selection = profiles.Selection(("resnet18-b32",), ("eager_fp32", "compile_fp32"))
    plan = plan_of("quick", selection=selection)
    named = {("eager_fp32", "resnet18-b32"), ("compile_fp32", "resnet18-b32")}
    assert chosen(plan, "track_step_seconds") == named
    assert [step.part for step in plan.expected()[COMMIT]] == ["eager_fp32", "compile_fp32", *["round"] * 3]


def test_a_measurement_that_ends_with_an_error_is_told_at_once(
    asv: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    text = "ResultsError: /disk/results: cannot be written (No space left on device)\\n  where it happened"
    asv(f"keep(timed()); progress(dict(problem='{text}')); sys.exit(2)")
    assert run.main(["HEAD"]) == 1
    out = capsys.readouterr().out
    assert "ended with an error: ResultsError: /disk/results: cannot be written (No space left on device)\n" in out
    assert "could not be measured to its end:" in out
    assert "  where it happened" in out


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b"{" * 100_000])
def test_files_of_asv_s_that_are_damaged_are_set_aside(
    asv: Callable[[str], None], repository: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository / "results" / "here"
    folder.mkdir(parents=True)
    whole, damaged = folder / "1234-shared.json", folder / "machine.json"
    whole.write_text("{}")
    damaged.write_bytes(content)
    asv("keep(timed())")
    assert run.main(["HEAD"]) == 0
    assert f"{damaged}.damaged: not " in capsys.readouterr().out
    assert Path(f"{damaged}.damaged").read_bytes() == content
    assert whole.exists()
    assert not damaged.exists()


def test_a_second_run_in_the_same_checkout_is_refused(
    asv: Callable[[str], None], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asv("raise SystemExit('asv must not be started')")
    measured = Project(repository, repository, is_kitsune=True)
    measured.prepare()
    with measured.alone():
        assert run.main(["HEAD"]) == 2
    assert "measures in this checkout" in capsys.readouterr().err
