import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest

from harness import names, rows
from harness.comparison import compare
from harness.report import figures, memory_figures, style
from harness.report.figures import Figure
from harness.report.history_tables import history_tables
from harness.rows import Comparison, LevelChange
from harness.stats import Estimate
from harness.store import Store
from tests.harness import sample

ALL = (figures.speedups, figures.memory, figures.setups, figures.history, figures.losses)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_cpu_history(root)
    return compare(Store(root).load(sample.CPU_MACHINE), folder=root)


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize("machine", ["gpu", "cpu"])
def test_plotly_accepts_every_figure(
    draw: Callable[[Comparison], list[Figure]], machine: str, request: pytest.FixtureRequest
) -> None:
    """Plotly's Python classes refuse properties and values that its script would silently ignore."""
    comparison = request.getfixturevalue(machine)
    drawn = draw(comparison)
    assert [figure.title for figure in drawn] == [style.case_name(case) for case in comparison.cases]
    for figure in drawn:
        checked = go.Figure(data=list(figure.traces), layout=figure.layout)
        for path, value in figure.narrow_layout.items():
            checked.update_layout({path.replace(".", "_"): value})
        json.dumps(figure.drawing(), allow_nan=False)


def test_a_forest_plot_shows_the_tables_speedups(gpu: Comparison) -> None:
    drawn = figures.speedups(gpu)[0]
    rows = [row for row in gpu.compared_rows_of(gpu.cases[0]) if row.ratio is not None]
    assert len(drawn.traces) == len(rows)
    for trace, row in zip(drawn.traces, rows, strict=True):
        assert row.ratio is not None
        speedup = row.ratio.inverted()
        assert trace["x"] == [speedup.ratio]
        whiskers = trace["error_x"]
        assert isinstance(whiskers, dict)
        assert whiskers["array"] == [pytest.approx(speedup.high - speedup.ratio)]
        assert whiskers["arrayminus"] == [pytest.approx(speedup.ratio - speedup.low)]


@pytest.mark.parametrize("draw", ALL)
def test_kitsune_with_something_switched_off_is_in_no_comparison(
    draw: Callable[[Comparison], list[Figure]], gpu: Comparison
) -> None:
    assert any("unfused" in row.variant for row in gpu.rows)
    described = json.dumps([figure.drawing() for figure in draw(gpu)])
    assert "Kitsune TrainStep" in described
    assert "one stream" not in described
    assert "unfused" not in described


def test_memory_is_allocated_and_reserved_on_a_gpu_and_resident_on_a_cpu(gpu: Comparison, cpu: Comparison) -> None:
    rows = gpu.compared_rows_of(gpu.cases[0])
    reserved, allocated = figures.memory(gpu)[0].traces
    assert reserved["x"] == [row.reserved_bytes for row in rows]
    assert allocated["x"] == [row.allocated_bytes for row in rows]
    (resident,) = figures.memory(cpu)[0].traces
    assert resident["x"] == [row.rss_bytes for row in cpu.compared_rows_of(cpu.cases[0])]


def test_the_memory_of_a_step_is_a_line_for_each_variant(gpu: Comparison, cpu: Comparison) -> None:
    drawn = memory_figures.timelines(gpu)
    assert [figure.model for figure in drawn] == [case.model for case in gpu.cases]
    known = [
        entry.timeline
        for entry in gpu.step_memory
        if entry.case == gpu.cases[0] and entry.timeline is not None and not names.is_diagnostic(entry.variant)
    ]
    assert len(drawn[0].traces) == len(known) == 15
    for trace, timeline in zip(drawn[0].traces, known, strict=True):
        shares, sizes = list(trace["x"]), list(trace["y"])  # type: ignore[call-overload]
        assert (shares[0], shares[-1]) == (0, 100)
        assert sizes[:-1] == [round(allocated / 2**20, 2) for _, allocated, _ in timeline.points]
        assert sizes[-1] == sizes[-2], "what is allocated stays so to the end"
    for figure in drawn:
        go.Figure(data=list(figure.traces), layout=figure.layout)
        json.dumps(figure.drawing(), allow_nan=False)
    assert memory_figures.timelines(cpu) == []


def test_set_up_bars_tell_when_they_are_earned_back(gpu: Comparison) -> None:
    rows = gpu.compared_rows_of(gpu.cases[0])
    cold, warm, first, warm_first = figures.setups(gpu)[0].traces
    texts = dict(zip([row.variant for row in rows], cold["text"], strict=True))  # type: ignore[call-overload]
    assert re.fullmatch(r"[\d.]+ s, never \([\d.]+ s, never\)", texts["compile_fp32"])
    assert re.fullmatch(r"\([\d.]+ s, (never|[\d,]+)\)", texts["compile_amp"])
    assert re.fullmatch(r"[\d.]+ s, [\d,]+ steps \([\d.]+ m?s, [\d,]+\)", texts["kitsune_trainstep_amp"])
    assert texts["handcaptured_amp"].endswith("steps")
    assert "," not in texts["eager_fp32"]
    assert warm["x"] == [row.warm_setup_s for row in rows]
    assert cold["marker"]["opacity"] == [1 if row.warm_setup_s is None else 0.3 for row in rows]  # type: ignore[index]
    assert first["base"] == [row.first_replay_s for row in rows]
    assert warm_first["base"] == [row.warm_first_replay_s for row in rows]
    for lines in (first, warm_first):
        assert lines["x"] == [0 if row.is_kitsune else None for row in rows]


def test_results_without_warm_set_ups_have_names_beside_their_bars(cpu: Comparison) -> None:
    assert all(row.warm_setup_s is None for row in cpu.rows)
    assert all(figure.narrow_layout for figure in figures.setups(cpu))


def test_history_is_one_band_and_one_line_for_each_variant(gpu: Comparison) -> None:
    drawn = figures.history(gpu)[0]
    bands, lines = drawn.traces[::2], drawn.traces[1::2]
    assert len(lines) == 6
    assert [trace["fill"] for trace in bands] == ["toself"] * 6
    for band, line in zip(bands, lines, strict=True):
        assert len(list(band["y"])) == 2 * len(list(line["y"]))  # type: ignore[call-overload]


def test_a_point_of_one_round_claims_no_interval(tmp_path: Path, gpu: Comparison) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    single = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    line, many = (figures.history(comparison)[0].traces[1] for comparison in (single, gpu))
    assert all("(one round)" in words and "customdata[0]" not in words for words in line["hovertemplate"])  # type: ignore[attr-defined]
    assert all(bounds[:2] == [None, None] for bounds in line["customdata"])  # type: ignore[attr-defined]
    assert "[%{customdata[0]:.3r}, %{customdata[1]:.3r}]" in str(many["hovertemplate"])


def test_a_batch_size_measured_at_one_commit_has_no_history(tmp_path: Path, gpu: Comparison) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    swept = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    assert len(swept.cases) == 12
    titles = [figure.title for figure in figures.history(swept)]
    assert titles == [figure.title for figure in figures.history(gpu)] == [style.case_name(case) for case in gpu.cases]


def test_without_a_second_commit_there_is_no_history(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path)
    store = Store(tmp_path)
    alone = compare(store.load(sample.GPU_MACHINE, [sample.COMMITS[2]]), folder=tmp_path)
    assert figures.history(alone) == []


@pytest.mark.parametrize(
    "speedups",
    [
        [Estimate(1.01, 0.99, 1.03, 3, 9)],
        [Estimate(1.4, 0.8, 2.2, 3, 9)],
        [Estimate(0.8, 0.7, 0.9, 3, 9), Estimate(15, 14, 16, 3, 9)],
        [Estimate(0.002, 0.001, 0.003, 3, 9), Estimate(90, 80, 100, 3, 9)],
        [Estimate(3.0, 0.0, float("inf"), 1, 9)],
        [],
    ],
)
def test_a_speedup_axis_has_one_and_a_few_ticks(speedups: list[Estimate]) -> None:
    axis = style.speedup_axis(speedups)
    low, high = axis["range"]  # type: ignore[misc]
    seen = [tick for tick in axis["tickvals"] if 10**low <= tick <= 10**high]  # type: ignore[attr-defined]
    assert 1 in seen
    assert len(seen) <= 8


def test_every_variant_looks_different_from_the_others_of_its_precision(gpu: Comparison) -> None:
    looks = {(style.colour(row.variant), style.dash(row.variant)) for row in gpu.rows_of(gpu.cases[0])}
    assert len(looks) == len(gpu.rows_of(gpu.cases[0]))
    assert style.colour("my_own_variant_fp32") == style.colour("another_amp")


def test_names_are_escaped_for_plotly() -> None:
    assert style.variant_name("<a href='javascript:alert(1)'>x</a>_fp32") == (
        "&lt;a href='javascript:alert(1)'&gt;x&lt;/a&gt;_fp32"
    )


def test_a_change_of_level_is_a_line_in_the_colour_of_its_series(gpu: Comparison) -> None:
    series = next(entry for entry in gpu.history if len(entry.points) > 1)
    before, first = (point.commit for point in series.points[-2:])
    change = LevelChange(before, first, first, missing=0, ratio=1.1, p_value=0.003, is_worse=True)
    changed = replace(gpu, history=(replace(series, changes=(change,)),))
    (figure,) = figures.history(changed)
    line = figure.layout["shapes"][-1]
    assert (line["x0"], line["x1"], line["line"]["color"]) == (2, 2, style.colour(series.variant))


def test_of_a_long_history_the_last_commits_are_drawn(gpu: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SHOWN_POINTS", 2)
    for figure in figures.history(gpu):
        assert all(len(trace["x"]) <= 2 for trace in figure.traces if trace["mode"] == "lines+markers")
    shown = [row[0] for row in re.findall(r"<th scope=row>(\w+)((?:<td>[^<]+)+)", history_tables(gpu))]
    assert set(shown) == {commit.short for commit in gpu.commits[-2:]}


def test_a_change_of_the_environment_is_a_line_before_its_first_commit(tmp_path: Path) -> None:
    sample.write_long_history(tmp_path, commits=4, models=1)
    (figure,) = figures.history(compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path))
    go.Figure(data=list(figure.traces), layout=figure.layout)
    (line,) = [shape for shape in figure.layout["shapes"] if "label" in shape]  # type: ignore[attr-defined]
    assert (line["x0"], line["x1"], line["label"]["text"]) == (2.5, 2.5, "driver")


def test_a_chart_s_commits_are_those_of_its_case(tmp_path: Path) -> None:
    """Another case may have been measured at others: its commits would be gaps."""
    sample.write_gpu_history(tmp_path)
    full = compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
    first = next(series for series in full.history if len(series.points) == 3)
    kept = [replace(first, points=first.points[1:]), *(s for s in full.history if s.case != first.case)]
    figure = figures.history(replace(full, history=tuple(kept)))[0]
    assert figure.layout["xaxis"]["categoryarray"] == [commit.short for commit in full.commits[1:]]  # type: ignore[index]
