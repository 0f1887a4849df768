"""Which checkout is measured, where results lie, and that one run has it at a time."""

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from harness import asv_process, context, project
from harness.project import Project, ProjectError
from tests.harness.checkout import ROOT
from tests.harness.repository import git


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that the harness is no part of."""
    root = tmp_path / "elsewhere"
    root.mkdir()
    git(root, "init", "--quiet")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "first")
    monkeypatch.setattr(project, "_HERE", tmp_path / "site-packages" / "harness")
    monkeypatch.chdir(root)
    return root


def test_in_a_checkout_of_kitsune_everything_lies_where_asv_expects_it() -> None:
    found = project.here()
    assert found == Project(ROOT, ROOT, is_kitsune=True) == project.of_configuration(ROOT)
    assert (found.configuration, found.results) == (ROOT / "asv.conf.json", ROOT / "results")
    assert found.measured_paths == ("kitsune",)


def test_an_installed_harness_measures_the_checkout_around_the_working_directory(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "deep").mkdir()
    monkeypatch.chdir(elsewhere / "deep")
    found = project.here()
    assert (found.root, found.is_kitsune, found.measured_paths) == (elsewhere, False, (".",))
    assert project.of_configuration(found.home) == found


def test_what_the_harness_writes_elsewhere_is_invisible_to_git(elsewhere: Path) -> None:
    found = project.here()
    found.prepare()
    assert git(elsewhere, "status", "--porcelain") == ""
    configuration = json.loads(found.configuration.read_text())
    ours = json.loads((ROOT / "asv.conf.json").read_text())
    assert set(configuration) == set(ours)
    same = ("build_command", "install_command", "environment_type", "launch_method", "build_cache_size")
    assert {name: configuration[name] for name in same} == {name: ours[name] for name in same}


def test_elsewhere_a_variable_says_where_commits_are_shown(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = project.here()
    monkeypatch.setenv("HARNESS_COMMIT_URL", "https://example.org/us/project/commit/")
    found.prepare()
    assert json.loads(found.configuration.read_text())["show_commit_url"] == "https://example.org/us/project/commit/"


def test_outside_of_a_checkout_there_is_nothing_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "_HERE", tmp_path / "harness")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProjectError, match="lies in no git checkout"):
        project.here()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    found = Project(tmp_path, tmp_path, is_kitsune=True)
    found.prepare()
    spawn = multiprocessing.get_context("fork")
    ours, theirs = spawn.Pipe()

    def hold() -> None:
        with found.alone():
            theirs.send("held")
            theirs.recv()

    other = spawn.Process(target=hold)
    other.start()
    assert ours.recv() == "held"
    with pytest.raises(ProjectError, match=rf"process {other.pid} measures in this checkout"), found.alone():
        pytest.fail("two at once")
    ours.send("end")
    other.join()
    with found.alone():
        assert (found.scratch / "run.lock").read_text()


def test_a_checkout_at_another_commit_is_not_measured(elsewhere: Path) -> None:
    commit = git(elsewhere, "rev-parse", "HEAD")
    surroundings = context.Context(
        ROOT, elsewhere, commit, at_head=True, machine="here", profile="quick", progress=None
    )
    context.check_checkout(surroundings)
    git(elsewhere, "commit", "--quiet", "--allow-empty", "--message", "second")
    with pytest.raises(context.ContextError, match=f"and {commit[:8]} is to be measured: another run"):
        context.check_checkout(surroundings)


def test_asv_is_read_to_its_end_where_its_log_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "print('· begins'); print('x' * 1_000_000); print('· ends')"
    log = tmp_path / "absent" / "asv.log"
    code = asv_process.run([sys.executable, "-c", program], tmp_path, {}, log, None, lambda: None)
    out = capsys.readouterr().out
    assert code == 0
    assert out.splitlines() == [f"{log}: cannot be written (No such file or directory); asv's output is not kept",
                                "· begins", "· ends"]  # fmt: skip
