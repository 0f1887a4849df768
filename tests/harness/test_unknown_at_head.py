"""Benchmarks of which head knows nothing are told; those that nobody asked for are not called missing."""

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness import compare
from harness.store import Store
from tests.harness import sample

OLD, NEW = "1" * 40, "2" * 40
TIMES = {"eager_amp": 2e-3, "kitsune_dropin_amp": 1e-3, "kitsune_trainstep_amp": 5e-4}
PEERS = {"eager_amp": 2e-3}
LEFT = {"eager_amp": 2e-3, "kitsune_dropin_amp": 1e-3}
Told = Mapping[str, object]
ALL: Told = {"cases": []}


def write(root: Path, commit: str, cases: Mapping[str, Mapping[str, float]], told: Told, *skips: str) -> None:
    """One run with these models' times, which skipped some variants of the MLP."""
    run = sample.run_record("r", commit, {"device_type": "cuda"}, started=datetime(2026, 1, 1, tzinfo=timezone.utc))
    records = [{**run, **told}]
    for model, times in cases.items():
        case = sample.case_fields(model, 64, "cuda")
        blocks = {variant: [seconds, seconds] for variant, seconds in times.items()}
        records += [sample.round_record("r", number, case, blocks) for number in range(3)]
    case = sample.case_fields("mlp", 64, "cuda")
    records += [sample.skip_record("r", case, variant, "not asked for", "left out") for variant in skips]
    Store(root).append("machine", commit, records)


def notes(root: Path, *arguments: str) -> list[str]:
    """Those on what is not known or not measured at head."""
    assert compare.main(["--results", str(root), "--json", str(root / "out.json"), OLD, NEW, *arguments]) == 0
    every = json.loads((root / "out.json").read_text())["notes"]
    return [note for note in every if "1111 is not" in note or "1111 are not" in note]


def test_a_variant_without_any_record_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, OLD, {"mlp": TIMES, "lenet": TIMES}, {})
    write(tmp_path, NEW, {"mlp": LEFT, "lenet": TIMES}, {})
    (note,) = notes(tmp_path, "--fail-on", "regression")
    assert note.startswith("1 benchmark of 11111111 is not known at 22222222: mlp-b64: kitsune_trainstep_amp; it may")
    assert note in capsys.readouterr().out


def test_what_is_left_out_on_purpose_or_is_no_product_is_not_told(tmp_path: Path) -> None:
    write(tmp_path, OLD, {"mlp": TIMES | {"compile_amp": 1e-3, "kitsune_trainstep_unfused_amp": 6e-4}}, ALL)
    write(tmp_path, NEW, {"mlp": LEFT}, ALL, "kitsune_trainstep_amp")
    assert notes(tmp_path) == []


@pytest.mark.parametrize(
    ("base", "head", "is_missing"),
    [
        (ALL, ALL, True),
        (ALL, {"cases": ["mlp-b64"]}, False),
        (ALL, {"cases": [], "workloads": {"mlp": "mlp.py:build"}}, False),
        (ALL, {"cases": [], "profile": "quick"}, False),
        ({"cases": ["lenet-b64"]}, ALL, False),
        ({}, ALL, False),
        (ALL, {}, False),
    ],
)
def test_a_case_is_called_missing_only_where_it_was_to_be_measured(
    tmp_path: Path, base: Told, head: Told, is_missing: bool
) -> None:
    write(tmp_path, OLD, {"mlp": TIMES, "lenet": TIMES}, base)
    write(tmp_path, NEW, {"mlp": TIMES}, head)
    (note,) = notes(tmp_path)
    if is_missing:
        listed = "lenet-b64: kitsune_dropin_amp, kitsune_trainstep_amp"
        assert note.startswith(f"2 benchmarks of 11111111 are not known at 22222222: {listed}; they may")
    else:
        assert note == "1 case of 11111111 is not measured at 22222222: lenet-b64"


def test_a_case_of_peers_alone_is_nothing_to_tell(tmp_path: Path) -> None:
    write(tmp_path, OLD, {"mlp": TIMES, "lenet": PEERS}, ALL)
    write(tmp_path, NEW, {"mlp": TIMES}, ALL)
    assert notes(tmp_path) == []
