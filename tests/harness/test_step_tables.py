from pathlib import Path

import pytest

from harness import step_tables
from harness.comparison import compare
from harness.rows import Comparison
from harness.store import Store
from harness.tables import Table
from tests.harness import sample


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


def texts(table: Table) -> list[list[str]]:
    assert all(len(row) == len(table.columns) for row in table.rows)
    return [[cell.text for cell in row] for row in table.rows]


def test_every_stage_has_a_row(gpu: Comparison) -> None:
    rows = texts(step_tables.contribution_table(gpu))
    assert len(rows) == 3 * 2 * 4
    lenet = [row[3:] for row in rows if row[0] == "lenet" and row[3] == "amp"]
    assert [row[1] for row in lenet] == ["eager", "forward and backward captured", "optimizer in the step", "streams"]
    assert lenet[0][3:] == ["—", "—", ""]
    assert lenet[3][2:] == ["—", "—", "—", "not measured"]
    assert [row[-1] for row in rows if row[0] == "mlp"] == ["", "", *["timed by Kitsune itself"] * 2] * 2


def test_every_kitsune_variant_has_a_row(gpu: Comparison) -> None:
    table = step_tables.plan_table(gpu)
    rows = texts(table)
    assert [row[4] for row in rows] == [row.variant for row in gpu.rows if row.is_kitsune]
    by_variant = {row[4]: row[5:] for row in rows}
    assert by_variant["kitsune_trainstep_amp"] == ["list", "40", "2", "50%", "175 µs", "219 µs"]
    assert by_variant["kitsune_dropin_amp"] == ["no timeline: its status holds no plan", *["—"] * 5]


def test_on_a_cpu_nothing_has_a_timeline(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(sample.CPU_MACHINE), folder=tmp_path)
    assert {row[5] for row in texts(step_tables.plan_table(comparison))} == {"no timeline: its status holds no plan"}
