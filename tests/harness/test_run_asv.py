"""``python -m harness.run`` with asv itself, over a small repository."""

import json
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness.store import History, Store
from tests.harness import sample
from tests.harness.checkout import KITSUNE, ROOT, Checkout

UNCOMPILED = {"CXX": "no-such-compiler"}


def history_of(checkout: Checkout) -> History:
    return Store(checkout.root / "results").load("test-machine")


class Changed:
    """A repository of one commit with changes in its working tree, which are measured with a model of the user's."""

    def __init__(self, folder: Path) -> None:
        self.checkout = Checkout(folder)
        shutil.copytree(
            ROOT / "examples", self.checkout.root / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        self.head = self.checkout.commit("committed", KITSUNE)
        (self.checkout.root / "kitsune" / "__init__.py").write_text(KITSUNE.replace("a stand-in", "changed"))
        self.first = self.run()
        self.measured = history_of(self.checkout)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Measures the working tree."""
        command = ("-m", "harness.run", "--worktree", "--workload", "examples/own_model.py:build", *options)
        return self.checkout.run(*command, **UNCOMPILED)

    def damage(self) -> None:
        """No machine files, a list of benchmarks that ends in the middle, and results of a benchmark since renamed."""
        results = self.checkout.root / "results"
        (self.checkout.root.parent / "home" / ".asv-machine.json").unlink()
        (results / "test-machine" / "machine.json").unlink()
        listed = (results / "benchmarks.json").read_bytes()
        (results / "benchmarks.json").write_bytes(listed[: len(listed) // 2])
        (path,) = (results / "test-machine").glob("*-shared-py*.json")
        kept = json.loads(path.read_text())
        kept["results"]["training.Training.track_old_name"] = next(iter(kept["results"].values()))
        path.write_text(json.dumps(kept))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return Changed(tmp_path_factory.mktemp("changed"))


@pytest.fixture(scope="module")
def again(changed: Changed) -> str:
    """What measuring again says, as far as something is missing, after asv's files were damaged."""
    changed.damage()
    done = changed.run("--resume")
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_working_tree_is_measured_and_nothing_else(changed: Changed) -> None:
    assert changed.first.returncode == 0, changed.first.stdout
    (commit,) = changed.measured.commits
    assert commit != changed.head
    (run,) = changed.measured.runs(commit)
    assert run.snapshot_of == changed.head
    reasons = {entry.kitsune["reason"] for entry in changed.measured.profiles(commit) if entry.kitsune is not None}
    assert reasons == {"changed"}


def test_the_model_is_the_user_s(changed: Changed) -> None:
    (commit,) = changed.measured.commits
    assert changed.measured.models == ("spirals",)
    (run,) = changed.measured.runs(commit)
    assert run.workloads == {"spirals": "examples/own_model.py:build"}
    timed = {variant for entry in changed.measured.rounds(commit) for variant in entry.blocks}
    assert timed == {"eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"}


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(changed: Changed, again: str) -> None:
    assert "everything was measured already" in again
    assert history_of(changed.checkout) == changed.measured


@pytest.mark.slow
def test_phases_of_what_is_measured_are_told_apart_on_request(changed: Changed) -> None:
    (commit,) = changed.measured.commits
    assert changed.measured.phases(commit) == ()
    done = changed.run("--resume", "--phases", "--report", "report.html")
    assert done.returncode == 0, done.stdout
    assert "phases of eager_fp32: told apart" in done.stdout
    assert "phases of kitsune_trainstep_fp32: a single one" in done.stdout
    history = history_of(changed.checkout)
    assert history.rounds(commit) == changed.measured.rounds(commit), "nothing was timed again"
    divided = {entry.variant: list(entry.phases_s) for entry in history.phases(commit)}
    loop = ["data", "forward", "backward", "optimizer", "other"]
    assert divided == {
        "eager_fp32": loop, "kitsune_dropin_fp32": loop, "kitsune_trainstep_fp32": ["whole step", "other"],
    }  # fmt: skip
    traces = sorted(entry.trace or "" for entry in history.phases(commit))
    machine = changed.checkout.root / "results" / "test-machine"
    assert traces == sorted(str(path.relative_to(machine)) for path in machine.rglob("*.json.gz"))
    page = (changed.checkout.root / "report.html").read_text()
    assert all(f'href="results/test-machine/{trace}"' in page for trace in traces)
    shown = changed.checkout.run("-m", "asv", "show", commit[:8])
    assert shown.returncode == 0, "asv passes traces over"
    changed.measured = history


@pytest.mark.slow
@pytest.mark.usefixtures("again")
def test_asv_keeps_its_results_when_nothing_is_missing(changed: Changed) -> None:
    (commit,) = changed.measured.commits
    shown = changed.checkout.run("-m", "asv", "show", commit[:8]).stdout
    line = next(line for line in shown.splitlines() if "kitsune_trainstep_fp32" in line and "spirals-b64" in line)
    assert "n/a" not in line


@pytest.mark.slow
def test_what_was_damaged_of_asv_s_is_made_again(changed: Changed, again: str) -> None:
    results = changed.checkout.root / "results"
    assert "benchmarks.json.damaged: not valid JSON" in again
    for path in (results / "benchmarks.json", results / "test-machine" / "machine.json"):
        assert json.loads(path.read_text())
    published = changed.checkout.run("-m", "asv", "publish", "--no-pull")
    assert published.returncode == 0, published.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("again")
def test_samples_without_a_file_of_asv_s_are_given_to_asv_by_resuming(changed: Changed) -> None:
    (path,) = (changed.checkout.root / "results" / "test-machine").glob("*-shared-py*.json")
    path.rename(path.with_suffix(".kept"))  # as where the run had ended before
    done = changed.run("--resume")
    assert done.returncode == 0, done.stdout
    assert history_of(changed.checkout) == changed.measured, "nothing was measured"
    kept, made = (json.loads(file.read_text())["results"] for file in (path.with_suffix(".kept"), path))
    track = next(name for name in made if name.endswith("track_step_seconds"))
    assert made[track][0] == kept[track][0]


def test_the_working_tree_can_be_compared(changed: Changed) -> None:
    compared = changed.checkout.run("-m", "harness.compare", "--worktree", "--reproduce")
    assert compared.returncode == 0, compared.stdout
    assert f"Working tree on {changed.head[:8]}" in compared.stdout
    assert "--workload examples/own_model.py:build" in compared.stdout


@pytest.mark.slow
def test_asv_searches_the_commits_from_base_to_head(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    commits = [checkout.commit(str(k), f"{KITSUNE}\n# {k}\n") for k in range(3)]
    # The regression is invented, so that it does not depend on this machine whether there is one.
    for commit, seconds in ((commits[0], 1e-3), (commits[2], 9e-3)):
        case = sample.case_fields("mlp", 4, "cpu")
        started = datetime(2026, 1, 1, tzinfo=timezone.utc)
        run = sample.run_record("r", commit, {"device_type": "cpu"}, started=started)
        times = {"eager_fp32": [1e-3, 1e-3], "kitsune_trainstep_fp32": [seconds, 1.01 * seconds]}
        rounds = [sample.round_record("r", number, case, times) for number in range(3)]
        Store(checkout.root / "results").append("test-machine", commit, [{**run, "profile": "quick"}, *rounds])
    found = checkout.run("-m", "harness.compare", commits[0], commits[2], "--bisect", **UNCOMPILED)
    assert found.returncode == 0, found.stdout
    assert "searching what made kitsune_trainstep_fp32 of mlp-b4 worse" in found.stdout
    assert "within 3 commits" in found.stdout
    assert "Greatest regression found" in found.stdout
    timed = {variant for entry in history_of(checkout).rounds(commits[1]) for variant in entry.blocks}
    assert timed == {"eager_fp32", "kitsune_trainstep_fp32"}


@pytest.mark.slow
def test_a_check_keeps_nothing(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.commit("only", KITSUNE)
    checked = checkout.run("-m", "harness.run", "--check", **UNCOMPILED)
    assert checked.returncode == 0, checked.stdout
    assert "kitsune_trainstep_fp32" in checked.stdout
    assert not (checkout.root / "results").exists()
    assert (checkout.root / ".asv" / "check" / "test-machine" / "machine.json").exists()
    assert "kitsune_trainstep_fp32" in checkout.run("-m", "harness.run", "--check", **UNCOMPILED).stdout
