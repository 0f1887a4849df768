import json
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from harness.comparison import compare
from harness.report import sample_figures, style
from harness.report.figures import Figure
from harness.rows import Comparison
from harness.samples import Samples
from harness.store import Store
from tests.harness import sample


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_cpu_history(root)
    return compare(Store(root).load(sample.CPU_MACHINE), folder=root)


def checked(figures: list[Figure]) -> list[Figure]:
    for figure in figures:
        go.Figure(data=list(figure.traces), layout=figure.layout)
        json.dumps(figure.drawing(), allow_nan=False)
    return figures


def test_every_case_has_both_charts_of_all_its_samples(cpu: Comparison) -> None:
    for draw in (sample_figures.distributions, sample_figures.drifts):
        drawn = checked(draw(cpu))
        assert [figure.subject for figure in drawn] == list(cpu.cases)
        for figure, case in zip(drawn, cpu.cases, strict=True):
            members = [entry for entry in cpu.samples if entry.case == case]
            assert len(figure.traces) == len(members)
            for trace, entry in zip(figure.traces, members, strict=True):
                values = [value for value in trace["x"] if value is not None]  # type: ignore[attr-defined]
                assert len(values) == len(entry.seconds)


def with_rounds(comparison: Comparison, *rounds: tuple[float, ...] | None) -> Comparison:
    first = comparison.samples[0]
    peer = Samples(first.case, "kitsune_dropin_fp32", "fp32", ((1.0, 1.0, 1.0), (1.0, 1.0)))
    return replace(comparison, samples=(replace(first, rounds=rounds), peer))


def test_turns_go_on_from_round_to_round_with_a_gap(cpu: Comparison) -> None:
    (figure,) = checked(sample_figures.drifts(with_rounds(cpu, (1.0, 1.1, 0.9), (1.0, 1.0))))
    trace = figure.traces[0]
    assert trace["x"] == [1, 2, 3, None, 4, 5, None]
    assert trace["hovertext"][1] == "round 1, turn 2: 1.10 s, +10.0%"  # type: ignore[index]
    between = [shape["x0"] for shape in figure.layout["shapes"]]  # type: ignore[attr-defined]
    assert between == [3.5]
    (figure,) = checked(sample_figures.drifts(with_rounds(cpu, None, (1.0, 1.2))))
    assert figure.traces[0]["x"] == [None, 4, 5, None], "it was not timed in the first round"


def test_a_disturbed_sample_stands_at_the_end_of_the_axis_and_is_told(cpu: Comparison) -> None:
    steady = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.0)
    disturbed = with_rounds(cpu, (*steady, 64.0), steady)
    (figure,) = checked(sample_figures.drifts(disturbed))
    assert figure.title.endswith(" (1 of 20 blocks beyond the axis, up to +6300.0%)")
    trace, axis = figure.traces[0], figure.layout["yaxis"]
    assert trace["y"][7] == pytest.approx(2.0)  # type: ignore[index]
    assert trace["marker"]["symbol"][6:8] == [style.symbol("eager_fp32"), "triangle-up"]  # type: ignore[index]
    assert axis["range"] == pytest.approx([-2.16, 2.16])  # type: ignore[index]
    (spread,) = checked(sample_figures.distributions(disturbed))
    assert spread.title == figure.title
    assert max(spread.traces[0]["x"]) == pytest.approx(6300.0)  # type: ignore[call-overload]
