"""What ``asv find`` is given to search a regression with."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.bisection import WORST, Search, chosen, search
from harness.comparison import compare
from harness.own_models import OwnModel, decoded
from harness.project import Project
from harness.rows import Change, Comparison, Contrast
from harness.selection import ComparisonError
from harness.stats import Estimate, Verdict
from harness.store import Store
from tests.harness import sample
from tests.harness.repository import git
from tests.harness.sample import COMMITS, GPU_MACHINE
from tests.harness.test_workloads import GOOD


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Three commits, whose results are those of the sample."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet")
    for number in range(3):
        git(root, "commit", "--quiet", "--allow-empty", "--message", str(number))
    return Project(root, root, is_kitsune=True)


def comparison_of(project: Project, slowdown: float) -> Comparison:
    """The sample's last two commits as if they had been those of the project."""
    commits = git(project.root, "log", "--reverse", "--format=%H").split()
    sample.write_gpu_history(project.results, slowdown=slowdown)
    for invented, commit in zip(COMMITS, commits, strict=True):
        path = project.results / GPU_MACHINE / f"{invented}.samples.jsonl"
        path.with_name(f"{commit}.samples.jsonl").write_text(path.read_text().replace(invented, commit))
        path.unlink()
    return compare(Store(project.results).load(GPU_MACHINE), commits[1], commits[2], folder=project.root)


def with_contrast(comparison: Comparison, metric: str, variant: str = "eager_amp", ratio: float = 1.5) -> Comparison:
    """The comparison judged by a metric too, by which a variant of LeNet takes more."""
    row = next(row for row in comparison.rows if (row.case.name, row.variant) == ("lenet-b64", variant))
    contrast = Contrast(
        case=row.case, variant=variant, base_variant=variant, precision="amp", metric=metric, unit="s", base=1.0,
        head=ratio, ratio=Estimate(ratio, ratio - 0.1, ratio + 0.1, rounds=3, pairs=36, freedom=2.0), margin=0.03,
        verdict=Verdict.SLOWER,
    )  # fmt: skip
    return replace(comparison, contrasts=(contrast,))


def searched(project: Project, which: str = WORST) -> Search:
    comparison = comparison_of(project, slowdown=1.3)
    return search(comparison, chosen(comparison, which), project)


def test_the_range_has_the_good_commit_and_the_benchmark_one_parameter_set(project: Project) -> None:
    found = searched(project)
    base, head = git(project.root, "rev-parse", "HEAD~1", "HEAD").split()
    *_, verb, commits, pattern, shown = found.command
    assert (verb, commits, shown) == ("find", f"{base}^..{head}", "--show-stderr")
    assert git(project.root, "rev-list", commits).split() == [head, base]
    assert re.search(pattern, "training.Training.track_step_seconds('kitsune_trainstep_amp', 'lenet-b64')")
    assert not re.search(pattern, "training.Training.track_setup_seconds('kitsune_trainstep_amp', 'lenet-b64')")
    assert not re.search(pattern, "training.Training.track_step_seconds('kitsune_trainstep_amp', 'lenet-b6')")


def test_nothing_but_the_variant_and_its_control_is_measured(project: Project) -> None:
    found = searched(project, "lenet-b64:kitsune_trainstep_amp")
    assert isinstance(found.change, Change)
    assert found.variables == {
        "HARNESS_PROFILE": "quick",
        "HARNESS_HEAD": git(project.root, "rev-parse", "HEAD"),
        "HARNESS_CASES": "lenet-b64",
        "HARNESS_VARIANTS": f"{found.change.control} kitsune_trainstep_amp",
    }


def test_own_models_have_all_their_cases_as_in_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """asv would drop what it has of others, or call them failed."""
    monkeypatch.chdir(project.root.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = project.root / "mine.py"
    small = GOOD.replace("tiny", "small").replace("build", "build_small")
    file.write_text(GOOD.replace('{"cpu": 4}', "{'cpu': 4, 'cuda': 64}, {'cuda': (16, 64, 128)}") + small)
    comparison = comparison_of(project, slowdown=1.3)
    workloads = {"tiny": "mine.py:build", "small": "mine.py:build_small"}
    comparison = replace(comparison, reproduction=replace(comparison.reproduction, workloads=workloads))
    change = chosen(comparison, WORST)
    change = replace(change, case=replace(change.case, model="tiny", name="tiny-b64"))

    found = search(comparison, change, project)
    assert decoded(found.variables["HARNESS_WORKLOADS"]) == (
        OwnModel("tiny", "mine.py:build", {"cpu": 4, "cuda": 64}, {"cpu": (4,), "cuda": (16, 64, 128)}),
        OwnModel("small", "mine.py:build_small", {"cpu": 4}, {"cpu": (4,)}),
    )
    assert found.variables["HARNESS_CASES"] == "tiny-b64"

    file.write_text(GOOD + small)
    with pytest.raises(ComparisonError, match="no workload has the case tiny-b64 any more"):
        search(comparison, change, project)
    file.write_text(GOOD)
    with pytest.raises(ComparisonError, match=r"cannot search without the workloads .* no function 'build_small'"):
        search(comparison, change, project)


@pytest.mark.parametrize(
    ("metric", "track"), [("time", "step_seconds"), ("setup", "setup_seconds"), ("memory", "peak_memory_bytes")]
)
def test_a_regression_by_another_metric_is_searched_by_it(project: Project, metric: str, track: str) -> None:
    comparison = with_contrast(comparison_of(project, slowdown=1.0), metric)
    found = search(comparison, chosen(comparison, WORST), project)
    assert re.search(found.command[-2], f"training.Training.track_{track}('eager_amp', 'lenet-b64')")
    assert found.variables["HARNESS_VARIANTS"] == "eager_amp"


def test_of_two_metrics_a_name_means_the_first_and_what_asv_does_not_know_is_not_searched(project: Project) -> None:
    comparison = with_contrast(comparison_of(project, slowdown=1.3), "time", "kitsune_trainstep_amp", 9.0)
    assert chosen(comparison, "lenet-b64:kitsune_trainstep_amp") in comparison.changes
    assert chosen(comparison, WORST) == comparison.contrasts[0]
    with pytest.raises(ComparisonError, match="nothing that asv could search for"):
        chosen(with_contrast(comparison_of(project, slowdown=1.0), "warm-setup"), WORST)


def test_the_first_commit_of_all_has_nothing_before_it(project: Project) -> None:
    commits = git(project.root, "log", "--reverse", "--format=%H").split()
    comparison_of(project, slowdown=1.3)
    first = project.results / GPU_MACHINE / f"{commits[0]}.samples.jsonl"
    middle = project.results / GPU_MACHINE / f"{commits[1]}.samples.jsonl"
    first.write_text(middle.read_text().replace(commits[1], commits[0]))
    comparison = compare(Store(project.results).load(GPU_MACHINE), commits[0], commits[2], folder=project.root)
    assert search(comparison, chosen(comparison, WORST), project).command[-3] == commits[2]


@pytest.mark.parametrize(
    ("slowdown", "which", "words"),
    [
        (1.0, WORST, "nothing that asv could search for is a regression"),
        (1.3, "mlp-b64:eager_amp", "is none of the regressions: lenet-b64:kitsune_trainstep_amp"),
    ],
)
def test_what_cannot_be_searched_is_told(project: Project, slowdown: float, which: str, words: str) -> None:
    with pytest.raises(ComparisonError, match=words):
        chosen(comparison_of(project, slowdown), which)


def test_there_must_be_a_way_from_base_to_head(project: Project) -> None:
    comparison = comparison_of(project, slowdown=1.3)
    elsewhere = Project(project.root.parent, project.home, is_kitsune=True)
    with pytest.raises(ComparisonError, match="no earlier commit on the way"):
        search(comparison, chosen(comparison, WORST), elsewhere)
