"""Peak memory between commits: what one process proves, and what a recorded step says of it."""

import random
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness import metrics
from harness.selection import choose_measurements, measurement
from harness.stats import Verdict
from harness.store import Store
from tests.harness import sample

COMMITS = ("1" * 40, "2" * 40)
VARIANT = "kitsune_trainstep_amp"
RESULTS = Path(__file__).parents[2] / "results"

Reading = tuple[float, float | None]
"""The peak of a process, and the most that its recorded step had allocated, in MiB; None without such a record."""


def verdict(root: Path, base: Sequence[Reading], head: Sequence[Reading], margin: float = 0.03) -> Verdict:
    """Of a variant's memory on a GPU, where each side has these readings, one a run."""
    case, rng = sample.case_fields("mlp", 8, "cuda"), random.Random(0)
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    for commit, readings in zip(COMMITS, (base, head), strict=True):
        for number, (peak, step) in enumerate(readings):
            run = f"r{number}"
            profile = sample.profile_record(run, case, VARIANT, rng)
            profile |= {"peak_allocated_bytes": int(peak * sample.MEBIBYTE), "memory_timeline": None}
            if step is not None:
                profile["memory_timeline"] = sample.memory_timeline(step, captured=True)
            timed = sample.round_record(run, 0, case, sample.Simulator(rng).blocks({VARIANT: 1e-4}))
            records = [sample.run_record(run, commit, {"device": "x"}, started=started), timed, profile]
            Store(root).append("machine", commit, records)
    history = Store(root).load("machine")
    older, newer = (measurement(history, commit) for commit in COMMITS)
    (found,) = metrics.across(older, newer, ["memory"], {"memory": margin}, lambda variant: True)
    return found.verdict


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        ((8.4, 8.4), (8.5, 8.4), Verdict.SAME),
        ((8.4, 8.4), (14.5, 8.4), Verdict.INCONCLUSIVE),  # something on the way, in one of the processes
        ((14.5, 8.4), (8.4, 8.4), Verdict.INCONCLUSIVE),
        ((8.4, 8.4), (14.5, None), Verdict.INCONCLUSIVE),
        ((493, 493), (520, 520), Verdict.INCONCLUSIVE),  # another plan, chosen by its time, may take as much
        ((493, 493), (561, 561), Verdict.SLOWER),
        ((561, 561), (493, 493), Verdict.FASTER),
        ((493, 561), (561, 493), Verdict.INCONCLUSIVE),
    ],
)
def test_one_process_proves_no_small_difference(
    tmp_path: Path, base: Reading, head: Reading, expected: Verdict
) -> None:
    assert verdict(tmp_path, [base], [head]) is expected


def test_a_wider_margin_holds_for_one_process_too(tmp_path: Path) -> None:
    assert verdict(tmp_path, [(493, 493)], [(561, 561)], margin=0.2) is Verdict.SAME


def test_several_processes_are_judged_by_their_spread_unless_a_step_contradicts(tmp_path: Path) -> None:
    assert verdict(tmp_path / "small", [(100, 100)] * 3, [(105, 105)] * 3) is Verdict.SLOWER
    assert verdict(tmp_path / "unknown", [(100, None)] * 3, [(105, None)] * 3) is Verdict.SLOWER
    assert verdict(tmp_path / "on the way", [(8.4, 8.4)] * 3, [(14.5, 8.4)] * 3) is Verdict.INCONCLUSIVE


def test_peaks_on_real_machines_are_regressions_only_where_steps_take_more() -> None:
    history = Store(RESULTS).load("nvidia-h200")
    found = {}
    for base, head in (("e6f48508", "8e935090"), ("e6f48508", "1add5dc3")):
        commits = [next(commit for commit in history.commits if commit.startswith(name)) for name in (base, head)]
        older, newer = choose_measurements(history, *commits)
        assert older is not None
        for entry in metrics.across(older, newer, ["memory"], metrics.DEFAULT_MARGINS, lambda variant: True):
            if entry.verdict is Verdict.SLOWER:
                found[head, entry.case.name, entry.variant] = entry.ratio.ratio
    assert found == {("1add5dc3", "resnet18-b128", VARIANT): pytest.approx(1.138, abs=0.001)}
