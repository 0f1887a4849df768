"""What ``asv find`` is given to search a regression with."""

import re
from pathlib import Path

import pytest

from harness.bisection import WORST, Search, chosen, search
from harness.comparison import compare
from harness.project import Project
from harness.rows import Comparison
from harness.selection import ComparisonError
from harness.store import Store
from tests.harness import sample
from tests.harness.repository import git
from tests.harness.sample import COMMITS, GPU_MACHINE


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
    assert found.variables == {
        "HARNESS_PROFILE": "quick",
        "HARNESS_HEAD": git(project.root, "rev-parse", "HEAD"),
        "HARNESS_CASES": "lenet-b64",
        "HARNESS_VARIANTS": f"{found.change.control} kitsune_trainstep_amp",
    }


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
        (1.0, WORST, "no change of time here is a regression"),
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
