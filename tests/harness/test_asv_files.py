from pathlib import Path

import pytest
from asv.benchmarks import Benchmarks
from asv.machine import Machine
from asv.results import Results, iter_results

from harness import asv_files
from tests.harness import sample

COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    sample.write_asv_files(tmp_path, "here", COMMITS)
    return tmp_path


def test_the_versions_are_those_of_this_asv() -> None:
    assert {asv_files.BENCHMARKS: Benchmarks.api_version, asv_files.MACHINE: Machine.api_version} == asv_files.VERSIONS
    assert Results.api_version == asv_files.RESULTS_VERSION


def test_nothing_is_wrong_with_what_asv_reads(written: Path) -> None:
    assert {entry.commit_hash for entry in iter_results(str(written))} == set(COMMITS)
    assert asv_files.unusable(written, "here", COMMITS) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "its version is None, where asv's is 2"),
        ('{"version": 99}', "its version is 99, where asv's is 2"),
        ('{"version": 2, "params": {}, "python": "3.12"}', "lacks commit_hash, date, env_name, requirements, results"),
    ],
)
def test_results_that_asv_passes_over_are_named_and_stay(written: Path, content: str, words: str) -> None:
    path = written / "here" / "11111111-shared-py3.12.json"
    path.write_text(content)
    assert [entry.commit_hash for entry in iter_results(str(written))] == [COMMITS[1]]
    assert asv_files.unusable(written, "here", COMMITS) == [(path, f"{words}: asv does not read it")]
    assert asv_files.not_json(written, "here") == []


def test_commits_whose_file_is_missing_beside_others_are_named(written: Path) -> None:
    (written / "here" / "11111111-shared-py3.12.json").unlink()
    ((path, words),) = asv_files.unusable(written, "here", COMMITS)
    assert path == written / "here" / "11111111-*.json"
    assert words.startswith("is missing")
    (written / "here" / "22222222-shared-py3.12.json").unlink()
    assert asv_files.unusable(written, "here", COMMITS) == [], "these results were never asv's"
