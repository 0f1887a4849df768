"""What stays in a process after captures, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MOST_BLOCKS = 300
"""Of Python's memory, for each capture of two layers: about 80 stay, and 1,000 if torch keeps what it would keep."""

MOST_BYTES = 100_000_000

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def growth(seconds: int, **options: Any) -> dict[str, Any]:
    """What `tests.kitsune.memory_growth` prints with these options."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.kitsune.memory_growth", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@linux_only
@pytest.mark.parametrize(("what", "form", "warm_up"), [("shapes", "drop_in", 9), ("models", "train_step", 3)])
def test_captures_that_are_dropped_leave_little(what: str, form: str, warm_up: int) -> None:
    found = growth(600, what=what, form=form, layers=2, warm_up=warm_up, count=6)
    assert found["blocks"] <= 6 * MOST_BLOCKS


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("form", ["drop_in", "deferred", "train_step"])
def test_a_thousand_shapes_reach_a_ceiling(form: str) -> None:
    found = growth(6000, what="shapes", form=form, count=1000)
    assert found["resident_bytes"] < MOST_BYTES
    assert any("hardly any of them twice" in text for text in found["refusals"])


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("form", ["drop_in", "deferred", "train_step"])
def test_two_hundred_models(form: str) -> None:
    assert growth(6000, what="models", form=form, count=200)["resident_bytes"] < MOST_BYTES


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("form", ["drop_in", "deferred", "train_step"])
@pytest.mark.parametrize("mode", ["auto", "replay"])
def test_twenty_thousand_steps_stay_flat(form: str, mode: str) -> None:
    found = growth(6000, what="steps", form=form, mode=mode, warm_up=2000, count=20_000)
    assert found["blocks"] < 2_000
    assert found["resident_bytes"] < 10_000_000
