"""The example for several processes, started as its users do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--synthetic", "--limit", "20", "--batch-size", "8", "--epochs", "2", "--accumulate", "2", "--device", "cpu"]


def figures(*more: str) -> list[str]:
    """What the first of two processes has logged, without the seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "examples.data_parallel", *OPTIONS, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"epoch .*(?= \()", done.stdout)


def test_two_processes_train_as_plain_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    found = figures()
    assert len(found) == 6
    assert found == figures("--plain")
