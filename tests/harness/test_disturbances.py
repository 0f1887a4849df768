"""What is told of a host that had other things to do."""

import json
from pathlib import Path

import pytest

from harness import compare
from harness.store import Store
from tests.harness import sample
from tests.harness.sample import COMMITS, GPU_MACHINE


def disturb(root: Path, commit: str, *hosts: object) -> None:
    """Puts these into the first rounds of a commit as what the host did."""
    path = root / GPU_MACHINE / f"{commit}.samples.jsonl"
    left, lines = list(hosts), []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        if fields["kind"] == "round" and left:
            fields["host"] = left.pop(0)
        lines.append(json.dumps(fields))
    path.write_text("\n".join(lines) + "\n")


def notes(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> list[str]:
    assert compare.main(["--results", str(root), *arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "of the host's processors" in line]


def test_a_commit_that_was_timed_beside_others_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    quiet: list[object] = [{"busy_elsewhere": 0.13, "stolen": 0.01}, {"busy_elsewhere": None, "stolen": None}, None]
    disturb(tmp_path, COMMITS[2], *quiet)
    assert notes(capsys, tmp_path, "--machine", GPU_MACHINE) == []
    disturb(tmp_path, COMMITS[1], {"busy_elsewhere": 0.5, "stolen": 0.0}, {"busy_elsewhere": None, "stolen": 0.3})
    (told,) = notes(capsys, tmp_path, "--machine", GPU_MACHINE)
    assert told.startswith("note: others had up to 50% of the host's processors in 2 of ")
    assert f" rounds of {COMMITS[1][:8]}: " in told
    pair = ("--variants", "eager_amp", "kitsune_trainstep_amp", COMMITS[1][:8])
    assert notes(capsys, tmp_path, "--machine", GPU_MACHINE, *pair) == [told]


def test_of_two_machines_the_one_with_others_on_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    (tmp_path / "another").mkdir()
    for path in (tmp_path / GPU_MACHINE).glob("*.jsonl"):
        (tmp_path / "another" / path.name).write_bytes(path.read_bytes())
    disturb(tmp_path, COMMITS[2], {"busy_elsewhere": 0.4})
    (told,) = notes(capsys, tmp_path, "--machines", GPU_MACHINE, "another")
    assert "up to 40% of the host's processors in 1 of " in told
    assert f" rounds of {GPU_MACHINE}: " in told


def test_a_share_that_is_none_is_named(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    disturb(tmp_path, COMMITS[2], {"busy_elsewhere": "much"})
    (damage,) = (entry for entry in Store(tmp_path).load(GPU_MACHINE).damage if "host" in entry.problem)
    assert damage.path.name.startswith(COMMITS[2])
    assert "host: busy_elsewhere: expected a number, got 'much'" in damage.problem
