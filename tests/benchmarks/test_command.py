"""Rounds are run, written and shown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import command


def measure(model: str, batch: int, precision: str, device: str, *, twice: bool) -> list[object]:
    return [model, batch * (1 + twice), precision, device]


def table(document: Mapping[str, Any]) -> str:
    return f"{len(document['rounds'])} rounds of {document['rounds'][0][1]}"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, on_cpu: bool = True) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    command.run("a.benchmark", "About it.", measure, table, on_cpu=on_cpu, flags={"twice": "double batches"})


def test_rounds_are_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, device = tmp_path / "times.json", "cuda" if torch.cuda.is_available() else "cpu"
    run(monkeypatch, "measure", "--model", "mlp", "--batch", "8", "--rounds", "2", "--twice", str(file))
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["rounds"] == [["mlp", 16, "amp", device]] * 2
    assert {name: document[name] for name in ("model", "batch", "precision", "twice")} == {
        "model": "mlp",
        "batch": 8,
        "precision": "amp",
        "twice": True,
    }
    assert document["facts"]
    capsys.readouterr()
    run(monkeypatch, "show", str(file))
    assert capsys.readouterr().out == "2 rounds of 16\n"
    run(monkeypatch, "show", str(file), str(file))
    assert capsys.readouterr().out == "2 rounds of 16\n\n2 rounds of 16\n"


def test_changes_on_top_of_the_commit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(command, "_ROOT", tmp_path)
    assert command.origin()["commit"] is None
    git("init")
    git("commit", "--allow-empty", "--message", "first")
    head = git("rev-parse", "HEAD")
    assert command.origin()["commit"] == head
    (tmp_path / "new.py").touch()
    assert command.origin()["commit"] == f"{head}, with changes"


def test_without_a_gpu_nothing_is_measured_that_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        run(monkeypatch, "measure", str(tmp_path / "times.json"), on_cpu=False)
    assert not list(tmp_path.iterdir())
