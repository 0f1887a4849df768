import math
from pathlib import Path

import pytest

from harness import batch_tables
from harness.batch_gains import batch_gains, gain_end
from harness.comparison import compare
from harness.rows import Comparison, Row
from harness.stats import Estimate
from harness.store import Store
from tests.harness import sample


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, sweep=True)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


def test_kitsune_as_users_run_it_is_followed_over_the_sizes_it_was_measured_at(swept: Comparison) -> None:
    gains = batch_gains(swept.rows)
    assert [(entry.model, entry.device, entry.variant) for entry in gains] == [
        (model, "cuda", "kitsune_trainstep_amp") for model in ("mlp", "lenet", "resnet18")
    ]
    for entry in gains:
        assert [row.case.batch for row in entry.rows] == [8, 64, 128, 512]
        for speedups, ratio_of in ((entry.over_eager, _eager), (entry.over_peer, _peer)):
            assert [row for row, _ in speedups] == list(entry.rows)
            assert [speedup.ratio for _, speedup in speedups] == [1 / ratio_of(row) for row in entry.rows]


def _eager(row: Row) -> float:
    assert row.ratio is not None
    return row.ratio.ratio


def _peer(row: Row) -> float:
    assert row.peer_ratio is not None
    return row.peer_ratio.ratio


def test_one_batch_size_is_no_sweep(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    found = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    assert batch_gains(found.rows) == ()
    assert batch_tables.end_table(found).rows == ()


@pytest.mark.parametrize(
    ("lows", "words"),
    [
        ([2.0, 1.5, 1.1], "does not end within the sizes measured, up to 32"),
        ([2.0, 1.5, 0.99], "ends at batch 32"),
        ([2.0, 0.9, 0.8], "ends at batch 16"),
        ([0.9, 1.2, 1.0], "ends at batch 32"),
        ([2.0, 0.9, 1.2], "does not end within the sizes measured, up to 32"),
        ([1.0, 0.9, 0.8], "none at any size"),
        ([2.0, None, 0.8], "not known: one round"),
        ([], "nothing to compare with"),
    ],
)
def test_a_gain_ends_where_no_interval_lies_above_1_any_more(
    swept: Comparison, lows: list[float | None], words: str
) -> None:
    row = batch_gains(swept.rows)[0].rows[0]
    speedups = []
    for number, low in enumerate(lows):
        estimate = Estimate(3.0, 0.0, math.inf, 1, 7) if low is None else Estimate(3.0, low, 4.0, 5, 35)
        speedups.append((_at(row, 8 * 2**number), estimate))
    assert gain_end(speedups) == words


def _at(row: Row, batch: int) -> Row:
    return Row(**{**vars(row), "case": type(row.case)(f"mlp-b{batch}", "mlp", batch, "cuda")})


def test_the_tables_have_every_form_and_every_size(swept: Comparison) -> None:
    ends, gains = batch_tables.end_table(swept), batch_tables.gain_table(swept)
    assert [cells[4].text for cells in ends.rows] == ["8, 64, 128, 512"] * 3
    assert [cells[5].text for cells in ends.rows] == [gain_end(entry.over_eager) for entry in batch_gains(swept.rows)]
    assert [cells[1].text for cells in gains.rows] == ["8", "64", "128", "512"] * 3
    assert [cells[3].text for cells in gains.rows] == ["amp"] * 12
