"""How long a long history takes to load and to judge, and how large its report is: 1,000 commits, 200 series, on two
machines.

`python -m pytest -m benchmark -s tests/benchmarks/test_history.py` prints the seconds of each stage.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness.comparison import compare
from harness.history_index import series_values
from harness.store import Store
from tests.harness import sample

COMMITS, CASES = 1000, 50
MACHINES = ("one", "other")
MOST_SECONDS = 3.0
"""For the whole command on two cores, once there is an index of the history."""
MOST_BYTES = 6_000_000
"""For the report."""
VARIANTS = {
    "eager_fp32": 1e-3, "eager_amp": 9e-4, "kitsune_dropin_fp32": 7e-4, "kitsune_dropin_amp": 6e-4,
    "kitsune_trainstep_fp32": 5e-4, "kitsune_trainstep_amp": 4e-4,
}  # fmt: skip
"""Four of them have a series for each case."""


def write_commit(folder: Path, number: int) -> None:
    """Three rounds of every case; every hundredth commit changes some of them."""
    rng = random.Random(f"{folder.name}{number}")
    simulator = sample.Simulator(rng)
    commit, started = f"{number:040x}", datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=number)
    records = [sample.run_record("r", commit, {"device": "x"}, started=started)]
    for index in range(CASES):
        case = sample.case_fields("mlp", index + 1, "cpu")
        level = 1 + 0.05 * ((number // 100 + index) % 3)
        seconds = {name: time * (level if name.startswith("kitsune") else 1) for name, time in VARIANTS.items()}
        records += [sample.round_record("r", turn, case, simulator.blocks(seconds, turns=5)) for turn in range(3)]
    lines = "".join(json.dumps({"schema": 1, **record}) + "\n" for record in records)
    (folder / f"{commit}.samples.jsonl").write_text(lines)


def timed(what: str, function: Callable[[], object]) -> float:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    function()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    print(f"{what:<60} {seconds:7.2f} s, of which {cpu:.2f} s in this process")
    return seconds


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_a_long_history_is_loaded_and_judged(tmp_path: Path) -> None:
    for machine in MACHINES:
        (tmp_path / machine).mkdir()
        for number in range(COMMITS):
            write_commit(tmp_path / machine, number)
    store = Store(tmp_path)
    series = 0

    def index(machine: str) -> None:
        nonlocal series
        series = len(series_values(store.load(machine)))

    def judge(machine: str) -> None:
        comparison = compare(store.load(machine), folder=tmp_path)
        assert sum(len(entry.changes) for entry in comparison.history) > series

    print()
    for machine in MACHINES:
        timed(f"{machine}: index made from all samples", lambda machine=machine: index(machine))
    for machine in MACHINES:
        timed(f"{machine}: loaded, judged, two commits compared", lambda machine=machine: judge(machine))
    command = [sys.executable, "-m", "harness.compare", "--results", str(tmp_path), "--machine", MACHINES[0]]
    page = tmp_path / "report.html"

    def run(*options: str) -> None:
        subprocess.run([*command, *options], check=True, capture_output=True)

    seconds = timed("the whole command", run)
    write_commit(tmp_path / MACHINES[0], COMMITS)
    timed("the whole command with one more commit, all series searched", run)
    timed("the whole command with the report", lambda: run("--html", str(page)))
    print(f"the report has {page.stat().st_size / 1e6:.2f} MB")
    assert series == 4 * CASES
    assert page.stat().st_size < MOST_BYTES
    assert seconds < MOST_SECONDS
