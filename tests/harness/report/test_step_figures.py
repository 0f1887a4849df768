import json
import math
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from harness import formats, report
from harness.breakdown import Breakdown, Stage
from harness.comparison import compare
from harness.names import is_product
from harness.replay_plans import ReplayPlan
from harness.report import step_figures
from harness.report.figures import Figure
from harness.rows import Comparison
from harness.selection import Case
from harness.stats import Estimate, Verdict
from harness.store import Store
from harness.timelines import NoTimeline, Timeline, timeline
from tests.harness import plans, sample


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


def _checked(figure: Figure) -> None:
    """Plotly's Python classes refuse properties and values that its script would silently ignore."""
    checked = go.Figure(data=list(figure.traces), layout=figure.layout)
    for path, value in figure.narrow_layout.items():
        checked.update_layout({path.replace(".", "_"): value})
    for trace in figure.traces:
        go.Bar(**{**trace, **figure.narrow_trace})
    json.dumps(figure.drawing(), allow_nan=False)


def test_contributions_are_the_breakdowns_times(gpu: Comparison) -> None:
    drawn = step_figures.contributions(gpu)
    assert [figure.title for figure in drawn] == [
        "mlp, batch 64, cuda",
        "lenet, batch 64, cuda",
        "resnet18, batch 128, cuda",
    ]
    for figure, case in zip(drawn, gpu.cases, strict=True):
        _checked(figure)
        stages = [stage for part in gpu.breakdowns if part.case == case for stage in part.stages]
        (bars,) = figure.traces
        assert bars["x"] == [stage.seconds or 0 for stage in stages]
        for stage, text in zip(stages, bars["text"], strict=True):  # type: ignore[call-overload]
            assert text.startswith(formats.seconds(stage.seconds) if stage.seconds else "not measured")


def test_a_stage_that_ran_eagerly_is_marked(gpu: Comparison) -> None:
    first = gpu.breakdowns[0]
    stages = (*first.stages[:2], replace(first.stages[2], mode="eager"), *first.stages[3:])
    (drawn, *_) = step_figures.contributions(replace(gpu, breakdowns=(replace(first, stages=stages),)))
    (bars,) = drawn.traces
    assert [text.endswith("ran eagerly") for text in bars["text"]] == [False, False, True, False, False]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, sweep=True)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


def test_what_streams_gain_is_drawn_over_batch_sizes(swept: Comparison) -> None:
    drawn = step_figures.stream_gains(swept)
    assert [figure.title for figure in drawn] == [
        "mlp, cuda (amp faster up to batch 128 of 512)",
        "lenet, cuda (amp faster up to batch 128 of 512)",
        "resnet18, cuda (amp faster up to batch 8 of 512)",
    ]
    for figure, model in zip(drawn, ("mlp", "lenet", "resnet18"), strict=True):
        go.Figure(data=list(figure.traces), layout=figure.layout)
        json.dumps(figure.drawing(), allow_nan=False)
        assert figure.layout["xaxis"]["categoryarray"] == ["8", "64", "128", "512"]  # type: ignore[index]
        lines = {trace["name"]: trace for trace in figure.traces}
        assert list(lines) == ["fp32", "amp"]
        for precision, line in lines.items():
            gains = [gain for gain in swept.stream_gains if (gain.case.model, gain.precision) == (model, precision)]
            assert line["x"] == [str(gain.case.batch) for gain in gains]
            assert line["y"] == [gain.gain.ratio for gain in gains]
            assert line["error_y"]["array"] == [pytest.approx(it.gain.high - it.gain.ratio) for it in gains]  # type: ignore[index]


def test_a_gain_says_which_plans_it_is_of_where_that_is_known(swept: Comparison) -> None:
    mlp, lenet, _ = (
        next(trace["hovertext"] for trace in figure.traces if trace["name"] == "amp")
        for figure in step_figures.stream_gains(swept)
    )
    assert "faster" in mlp[0]  # type: ignore[index]
    assert mlp[0].count("<br>") == 2  # type: ignore[index]
    assert mlp[1].endswith("<br>list on 2 streams (fused) where it was profiled")  # type: ignore[index]
    assert lenet[0].endswith("<br>in order (fused) ×2, list on 2 streams (fused) ×3")  # type: ignore[index]
    assert lenet[-1].endswith("<br>in order (fused) ×5 on both sides: the difference is noise")  # type: ignore[index]


def test_a_strategy_from_a_result_file_is_no_markup(swept: Comparison) -> None:
    gain = replace(swept.stream_gains[0], plans=(ReplayPlan("<b>", 1, fused=False),))
    (figure,) = step_figures.stream_gains(replace(swept, stream_gains=(gain,)))
    (text,) = figure.traces[0]["hovertext"]  # type: ignore[misc]
    assert text.endswith("<br>&lt;b&gt;")


def test_a_gain_of_a_single_round_has_a_hollow_mark_and_no_whiskers(gpu: Comparison) -> None:
    alone = [
        replace(gain, gain=Estimate(gain.gain.ratio, 0.0, math.inf, 1, 7), verdict=Verdict.INCONCLUSIVE)
        for gain in gpu.stream_gains
    ]
    for figure in step_figures.stream_gains(replace(gpu, stream_gains=tuple(alone))):
        json.dumps(figure.drawing(), allow_nan=False)
        for trace in figure.traces:
            assert trace["marker"]["symbol"] in (["circle-open"], ["diamond-open"])  # type: ignore[index]
            assert not trace["error_y"]["visible"]  # type: ignore[index]


def test_the_page_says_that_nothing_was_timed_both_ways(gpu: Comparison) -> None:
    page = report.html_page(replace(gpu, stream_gains=()))
    assert 'id="batch-sizes"' in page
    assert "TrainStep was not timed both on one stream and with streams of its choice" in page


def test_a_timeline_draws_every_bar_where_and_when_it_runs(gpu: Comparison) -> None:
    known = [entry for entry in gpu.timelines if isinstance(entry, Timeline) and is_product(entry.variant)]
    drawn = step_figures.timelines(gpu)
    assert len(drawn) == len(known) == 6
    for figure, entry in zip(drawn, known, strict=True):
        _checked(figure)
        found = set()
        for trace in figure.traces:
            columns = zip(trace["base"], trace["x"], trace["y"], strict=True)  # type: ignore[call-overload]
            found |= {(trace["name"], start, duration, row) for start, duration, row in columns}
        assert found == {
            (bar.kind.value, bar.start_us, bar.duration_us, f"stream {bar.stream} {side}")
            for side, bars in (("predicted", entry.predicted), ("measured", entry.measured))
            for bar in bars
        }
        names = [trace["name"] for trace in figure.traces if trace["showlegend"]]
        assert len(names) == len(set(names)) == len({bar.kind for bar in entry.predicted})


def test_predicted_bars_are_pale_only_beside_measured_ones(gpu: Comparison) -> None:
    def opacities(*, measured: bool) -> set[object]:
        case = Case("a", "a", 1, "cuda")
        entry = timeline(case, "kitsune_trainstep_fp32", {"plan": plans.document(num_tasks=7, measured=measured)})
        (figure,) = step_figures.timelines(replace(gpu, timelines=(entry,)))
        return {trace["opacity"] for trace in figure.traces}

    assert opacities(measured=True) == {0.5, 1}
    assert opacities(measured=False) == {1}


def test_what_was_thinned_out_is_said(gpu: Comparison) -> None:
    document = plans.document(num_tasks=2345, num_streams=2)
    entry = timeline(Case("a", "mlp", 1, "cuda"), "kitsune_trainstep_amp", {"plan": document})
    assert isinstance(entry, Timeline)
    (figure,) = step_figures.timelines(replace(gpu, timelines=(replace(entry, measured_us=9000.0),)))
    assert figure.title == (
        "mlp, batch 1, cuda: Kitsune TrainStep, amp (drawn to 13.2 ms with an event around each operator; a replay"
        " without them takes 9.00 ms; only the 2,000 longest of 2,345 tasks are drawn)"
    )
    assert sum(len(trace["x"]) for trace in figure.traces) == 2 * 2000  # type: ignore[arg-type]
    assert len(json.dumps(figure.drawing())) < 800_000


def test_the_page_says_why_there_is_no_timeline(gpu: Comparison) -> None:
    case = gpu.cases[0]
    without = replace(gpu, timelines=(NoTimeline(case, "kitsune_dropin_fp32", "its <status> holds no plan"),))
    assert "no timeline: its &lt;status&gt; holds no plan" in report.html_page(without)
    nothing = report.html_page(replace(gpu, timelines=()))
    assert "No Kitsune variant was measured" in nothing
    assert 'id="streams"' in nothing


def test_a_precision_that_was_not_measured_has_no_bars(gpu: Comparison) -> None:
    first = gpu.breakdowns[0]
    missing = tuple(replace(stage, seconds=None, speedup=None, gain=None, missing="no") for stage in first.stages)
    (_, *others) = gpu.breakdowns
    absent = replace(gpu, breakdowns=(replace(first, stages=missing), *others))
    before, after = (step_figures.contributions(comparison)[0].traces[0]["y"] for comparison in (gpu, absent))
    assert [row for row in before if row not in after] == before[:5]  # type: ignore[attr-defined,index,operator]


def test_a_stage_that_was_measured_nowhere_has_no_bars(gpu: Comparison) -> None:
    """As where an earlier commit was measured, which knew of no fusion."""

    def without(part: Breakdown) -> Breakdown:
        stages = (replace(stage, seconds=None) if stage.stage is Stage.FUSION else stage for stage in part.stages)
        return replace(part, stages=tuple(stages))

    changed = replace(gpu, breakdowns=tuple(map(without, gpu.breakdowns)))
    before, after = (step_figures.contributions(comparison)[0].traces[0]["y"] for comparison in (gpu, changed))
    fused = [f"+ operators fused · {precision}" for precision in ("fp32", "amp")]
    assert [row for row in before if row not in after] == fused  # type: ignore[attr-defined,operator]
