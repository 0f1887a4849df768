from pathlib import Path

import pytest

from harness.comparison import compare
from harness.samples import Samples
from harness.selection import Case
from harness.store import Store
from tests.harness import sample

CASE = Case("mlp-b8", "mlp", 8, "cpu")


def test_samples_are_those_of_the_rounds(tmp_path: Path) -> None:
    case = sample.case_fields("mlp", 8, "cpu")
    started = sample.datetime(2026, 1, 1, tzinfo=sample.timezone.utc)
    both = {"eager_fp32": [2.0, 2.2, 2.1], "kitsune_trainstep_fp32": [1.0, 1.1, 1.2]}
    alone = {"kitsune_trainstep_fp32": [1.3, 1.4]}
    rounds = [sample.round_record("run", index, case, blocks) for index, blocks in enumerate((both, alone))]
    run = sample.run_record("run", sample.COMMITS[0], {"device_type": "cpu"}, started=started)
    Store(tmp_path).append("machine", sample.COMMITS[0], [run, *rounds])
    found = compare(Store(tmp_path).load("machine"), folder=tmp_path).samples
    assert [(entry.variant, entry.rounds) for entry in found] == [
        ("eager_fp32", ((2.0, 2.2, 2.1), None)),
        ("kitsune_trainstep_fp32", ((1.0, 1.1, 1.2), (1.3, 1.4))),
    ]


def test_deviations_are_from_the_time_that_is_judged() -> None:
    entry = Samples(CASE, "eager_fp32", "fp32", ((1.0, 2.0, 3.0), None, (2.0, 2.0)))
    assert entry.typical_seconds == 2.0
    assert entry.deviations() == ((-0.5, 0.0, 0.5), None, (0.0, 0.0))
    assert entry.seconds == [1.0, 2.0, 3.0, 2.0, 2.0]
    assert entry.quartiles == (2.0, 2.0)


def test_the_usual_range_leaves_out_what_is_far_out() -> None:
    usual = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0]
    assert Samples(CASE, "eager_fp32", "fp32", ((*usual, 60.0),)).usual_range == pytest.approx((-0.02, 0.02))
    assert Samples(CASE, "eager_fp32", "fp32", ((1.0,),)).usual_range == (0.0, 0.0)
