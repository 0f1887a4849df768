"""asv itself, run over a small repository: what is kept of which commit, and that nothing is counted twice."""

import json
from pathlib import Path

import pytest

from harness.benchmarks.training import Training
from harness.session import Measured as Entry
from harness.store import History, Store
from tests.harness.checkout import KITSUNE, Checkout

NEWEST = KITSUNE.replace("a stand-in", "the newest")
BROKEN_STEP = KITSUNE.replace("        loss.backward()\n", "        raise RuntimeError('no way back')\n")
# asv starts a process for each parameter that this selects: the variants that can be measured here.
FIGURES = r"track_step_seconds\('(eager|kitsune_dropin|kitsune_trainstep)_fp32'"
NOT_HEAD = "0" * 40  # so that nothing is compiled


class Measured:
    """A repository of three commits and everything that asv measured there.

    The first commit has no Kitsune, the second one whose TrainStep raises, and the last one works; it is measured
    twice, by plain ``asv run``.
    """

    def __init__(self, folder: Path) -> None:
        self.checkout = Checkout(folder)
        self.without = self.checkout.commit("before Kitsune")
        self.raising = self.checkout.commit("raising", BROKEN_STEP)
        self.newest = self.checkout.commit("newest", NEWEST)
        # The working tree is ahead of all commits, and must not be what is measured.
        (self.checkout.root / "kitsune" / "__init__.py").write_text("raise RuntimeError('the working tree')\n")
        everything = f"{self.without}\n{self.raising}\n{self.newest}\n"
        (folder / "commits").write_text(everything)
        self.first = self.asv("run", f"HASHFILE:{folder / 'commits'}", "--bench", FIGURES, "--show-stderr")
        self.second = self.asv("run", "HEAD^!", "--bench", FIGURES)
        self.history = Store(self.checkout.root / "results").load("test-machine")

    def asv(self, *arguments: str) -> tuple[int, str]:
        done = self.checkout.run("-m", "asv", *arguments, HARNESS_HEAD=NOT_HEAD)
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("asv"))


def timed(history: History, commit: str) -> set[str]:
    return {variant for entry in history.rounds(commit) for variant in entry.blocks}


def test_asv_reports_the_failing_variant_and_only_it(measured: Measured) -> None:
    code, output = measured.first
    assert code == 2, output
    assert "failed while it was measured: RuntimeError: no way back" in output
    code, output = measured.second
    assert code == 0, output


def test_every_commit_is_measured_with_its_own_kitsune(measured: Measured) -> None:
    assert measured.history.damage == ()
    assert set(measured.history.commits) == {measured.without, measured.raising, measured.newest}
    eager, dropin, trainstep = "eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"
    assert timed(measured.history, measured.without) == {eager}
    assert timed(measured.history, measured.raising) == {eager, dropin}
    assert timed(measured.history, measured.newest) == {eager, dropin, trainstep}


def test_why_kitsune_was_not_measured_is_kept(measured: Measured) -> None:
    reasons = {
        commit: {
            entry.reason.splitlines()[0]
            for entry in measured.history.skips(commit)
            if "trainstep_fp32" in entry.variant
        }
        for commit in measured.history.commits
    }
    assert reasons == {
        measured.without: {"this commit has no kitsune"},
        measured.raising: {"RuntimeError: no way back"},
        measured.newest: set(),
    }


def test_the_origin_of_the_code_is_kept(measured: Measured) -> None:
    (run,) = measured.history.runs(measured.raising)
    assert run.harness_file == "harness/__init__.py"
    assert run.kitsune_file is not None
    assert run.kitsune_file.endswith("/project/kitsune/__init__.py")
    (run,) = measured.history.runs(measured.without)
    assert run.kitsune_file is None


def test_a_status_is_that_of_the_commit(measured: Measured) -> None:
    def reasons(commit: str) -> set[object]:
        profiles = measured.history.profiles(commit)
        return {entry.kitsune["reason"] for entry in profiles if entry.kitsune is not None}

    assert reasons(measured.newest) == {"the newest"}
    assert reasons(measured.raising) == {"a stand-in"}


def test_two_runs_are_both_kept_and_nothing_is_counted_twice(measured: Measured) -> None:
    runs = measured.history.runs(measured.newest)
    rounds = measured.history.rounds(measured.newest)
    assert len({run.run for run in runs}) == len(runs) == 2
    assert sorted((entry.run, entry.round) for entry in rounds) == sorted((run.run, k) for run in runs for k in (0, 1))
    times = [entry.blocks["eager_fp32"].wall_s for entry in rounds]
    assert len(set(times)) == len(times)


@pytest.mark.parametrize("status", ["skipped", "left out"])
def test_asv_is_told_why_something_was_not_measured(status: str) -> None:
    entry = Entry(status=status, reason="why", step_s=[], setup_s=[], peak_bytes=[], peak_reserved_bytes=[])
    with pytest.raises(NotImplementedError, match="why"):
        Training().setup({("mlp-b8", "eager_amp"): entry}, "eager_amp", "mlp-b8")


def test_asv_s_own_results_are_in_its_own_format(measured: Measured) -> None:
    folder = measured.checkout.root / "results" / "test-machine"
    machine = json.loads((folder / "machine.json").read_text())
    assert machine["machine"] == "test-machine"
    assert {"gpu", "driver", "cuda", "torch", "triton"} <= set(machine)
    stored = list(folder.glob(f"{measured.newest[:8]}-shared-py*.json"))
    assert len(stored) == 1
    code, output = measured.asv("show", measured.newest[:8])
    assert code == 0, output
    assert "track_step_seconds" in output
    code, output = measured.asv("compare", measured.raising, measured.newest)
    assert code == 0, output
    assert "kitsune_dropin_fp32" in output


def test_asv_can_publish_what_was_measured(measured: Measured) -> None:
    code, output = measured.asv("publish", "--no-pull")
    assert code == 0, output
    assert (measured.checkout.root / ".asv" / "html" / "index.html").exists()


def test_other_machines_stay_known_to_asv(measured: Measured) -> None:
    home = measured.checkout.root.parent / "home"
    assert "test-machine" in json.loads((home / ".asv-machine.json").read_text())


@pytest.mark.slow
def test_one_command_measures_a_shallow_clone_and_writes_the_report(measured: Measured, tmp_path: Path) -> None:
    clone = measured.checkout.clone(tmp_path, "--depth=1")
    done = clone.run("-m", "harness.run", "--report", "report.html", CXX="no-such-compiler")  # nothing is compiled
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert f"  {measured.newest[:7]} newest" in lines
    assert any(line.startswith(f"{measured.newest[:8]}   1/") for line in lines)
    assert lines[-1] == str(clone.root / "report.html")
    assert (clone.root / "report.html").stat().st_size > 0
    history = Store(clone.root / "results").load("test-machine")
    assert history.commits == (measured.newest,)
    assert timed(history, measured.newest) == {"eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"}
