from pathlib import Path

import pytest

from harness import step_tables
from harness.comparison import compare
from harness.fusions import StepFusions
from harness.rows import Comparison
from harness.store import Store
from harness.tables import Table, Tone
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
    assert len(rows) == 3 * 2 * 5
    lenet = [row[3:] for row in rows if row[0] == "lenet" and row[3] == "amp"]
    assert [row[1] for row in lenet] == [
        "eager", "forward and backward captured", "optimizer in the step", "operators fused", "streams",
    ]  # fmt: skip
    assert lenet[0][3:] == ["—", "—", ""]
    assert all("[" in row[4] for row in lenet[1:])
    assert {row[-1] for row in rows} == {""}


def test_a_stage_without_a_time_has_its_reason(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(sample.CPU_MACHINE), folder=tmp_path)
    *_, fused, streams = texts(step_tables.contribution_table(comparison))[:5]
    assert fused[4:8] == ["operators fused", "—", "—", "—"]
    assert fused[8].endswith("(skipped: without CUDA nothing is fused)")
    assert streams[4:8] == ["streams", "—", "—", "—"]
    assert streams[8].endswith("(skipped: without CUDA there are no streams to choose from)")


def test_what_was_fused_and_what_was_left(gpu: Comparison) -> None:
    first = gpu.fusions[0]
    assert isinstance(first, StepFusions)
    assert texts(step_tables.fused_table(first)) == [
        ["batch norm + relu", "4", "7.00 µs", "4.50 µs", "10.0 µs"],
        ["gradients of linear layers + adam", "1", "12.2 µs", "9.75 µs", "2.50 µs"],
        ["region", "2", "—", "—", "—"],
    ]
    assert texts(step_tables.unfused_table(first)) == [
        ["linear + relu", "2", "6.00 µs", "6.50 µs", "it is not faster"],
        ["region", "1", "—", "—", "there was no time left to try it"],
    ]


def test_what_streams_gain_is_told_with_the_plans_where_there_are_any(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    comparison = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    table = step_tables.stream_table(comparison)
    rows = texts(table)
    assert len(rows) == 3 * (4 + 1)
    assert [(row[1], row[3]) for row in rows if row[0] == "resnet18"] == [
        ("8", "amp"), ("64", "amp"), ("128", "fp32"), ("128", "amp"), ("512", "amp"),
    ]  # fmt: skip
    default, swept = (next(row for row in rows if row[:2] == ["mlp", size] and row[3] == "amp") for size in ("64", "8"))
    assert default[8:] == ["list on 2 streams (fused) where it was profiled"]
    assert swept[8:] == ["—"]
    assert swept[7] == "faster"
    assert swept[6].startswith("1.1")
    assert "[" in swept[6]
    assert [row[7] for row in rows if row[1] == "512"] == ["same"] * 3
    assert {row[1]: row[8] for row in rows if row[0] == "lenet"} == {
        **dict.fromkeys(("8", "64", "128"), "in order (fused) ×2, list on 2 streams (fused) ×3"),
        "512": "in order (fused) ×5 on both sides: the difference is noise",
    }


def test_every_kitsune_variant_has_a_row(gpu: Comparison) -> None:
    table = step_tables.plan_table(gpu)
    rows = texts(table)
    assert [row[4] for row in rows] == [row.variant for row in gpu.rows if row.is_kitsune]
    by_variant = {row[4]: row[5:] for row in rows}
    assert by_variant["kitsune_trainstep_amp"] == ["list", "40", "2", "50%", "175 µs", "219 µs"]
    tones = {row[4].text: row[4].tone for row in table.rows}
    assert tones["kitsune_trainstep_amp"] is Tone.STRONG
    assert tones["kitsune_trainstep_unfused_amp"] is tones["kitsune_trainstep_one_stream_amp"] is Tone.FAINT
    assert by_variant["kitsune_dropin_amp"] == ["no timeline: its status holds no plan", *["—"] * 5]


def test_on_a_cpu_nothing_has_a_timeline(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(sample.CPU_MACHINE), folder=tmp_path)
    assert {row[5] for row in texts(step_tables.plan_table(comparison))} == {"no timeline: its status holds no plan"}
