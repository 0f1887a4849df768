"""The phases of a comparison: what is derived from records, and where it is shown."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from harness import compare, render
from harness.comparison import compare as compared
from harness.rows import Comparison
from harness.step_phases import NoPhases, StepPhases
from harness.step_tables import phase_table
from harness.store import Store
from tests.harness import sample

LOOP = ["data", "forward", "backward", "optimizer"]
RECORDED = {"kind": "phases", "schema": 1}


@pytest.fixture
def gpu(tmp_path: Path) -> Comparison:
    sample.write_gpu_history(tmp_path, rounds=2)
    return compared(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)


def test_the_parts_add_up_to_the_step(gpu: Comparison) -> None:
    assert len(gpu.phases) == 3 * 22 - 1
    for entry in gpu.phases:
        if isinstance(entry, NoPhases):
            assert entry.variant == "eager_tf32"
            assert entry.reason.startswith("TraceError")
            continue
        assert entry.num_steps == 3
        assert entry.host_gap_s is not None
        assert entry.total_s == pytest.approx(sum(entry.seconds.values()) + entry.host_gap_s)
        assert entry.is_whole == ("handcaptured" in entry.variant or "trainstep" in entry.variant)
        assert list(entry.seconds) == (
            ["whole step"] if entry.is_whole else ["data", "forward", "backward", "optimizer"]
        )
        assert entry.trace is None
        assert entry.trace_missing == "its file is not here"


def test_a_trace_that_is_there_is_linked_from_the_page_s_folder(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path / "results", rounds=2)
    record = sample.phases_record("run-2", sample.case_fields("mlp", 64, "cuda"), "eager_fp32", 1.0)
    path = tmp_path / "results" / sample.GPU_MACHINE / str(record["trace"])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    history = Store(tmp_path / "results").load(sample.GPU_MACHINE)
    comparison = compared(history, folder=tmp_path / "results")
    (entry,) = [entry for entry in comparison.phases if isinstance(entry, StepPhases) and entry.trace is not None]
    assert (entry.case.name, entry.variant, entry.trace) == ("mlp-b64", "eager_fp32", path)
    (linked,) = [row for row in phase_table(comparison, tmp_path / "a page").rows if row[-2].link is not None]
    assert linked[-2].link == f"../results/{sample.GPU_MACHINE}/{record['trace']}"
    assert not any(row[-2].link for row in phase_table(comparison).rows)


def test_of_a_trace_that_was_shortened_the_remark_says_what_it_has(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    case = sample.case_fields("mlp", 64, "cuda")
    record = sample.phases_record("later", case, "eager_fp32", 1.0) | {"trace_shortened": "one step only"}
    append_run(tmp_path, "later", record, hours=1)

    def remarks() -> list[str]:
        table = phase_table(compared(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path))
        return [row[-1].text for row in table.rows]

    assert not any("the trace has" in remark for remark in remarks()), "its file is not here"
    path = tmp_path / sample.GPU_MACHINE / str(record["trace"])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert [remark for remark in remarks() if "the trace has" in remark] == ["the trace has one step only"]


def test_a_terminal_shows_them_where_they_were_asked_for(gpu: Comparison) -> None:
    told = render.text(gpu)
    assert "Phases of a step, profiled" in told
    assert "one phase: the step runs as one thing" in told
    assert "failed: TraceError: in 3 of 12 steps the profiler saw nothing run on the device" in told
    assert "Phases of a step" not in render.text(replace(gpu, phases=()))


def test_older_results_have_none(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    comparison = compared(Store(tmp_path).load(sample.CPU_MACHINE), folder=tmp_path)
    assert comparison.phases == ()
    assert json.loads(render.json_document(comparison))["phases"] == []


def append_run(root: Path, run: str, *records: Mapping[str, object], hours: int) -> None:
    """One more run at the newest commit, in the environment of those before."""
    store, commit = Store(root), sample.COMMITS[2]
    newest = store.load(sample.GPU_MACHINE).runs(commit)[-1]
    started = newest.started + timedelta(hours=hours)
    store.append(sample.GPU_MACHINE, commit, [sample.run_record(run, commit, newest.facts, started=started), *records])


def test_a_division_that_failed_hides_none_that_succeeded_and_gives_way_to_it(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    case = sample.case_fields("mlp", 64, "cuda")
    fails = [sample.failed_phases_record("later", case, name, "TraceError") for name in ("eager_fp32", "eager_tf32")]
    append_run(tmp_path, "later", *fails, hours=1)

    def told() -> dict[str, StepPhases | NoPhases]:
        comparison = compared(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path)
        return {entry.variant: entry for entry in comparison.phases if entry.case.name == "mlp-b64"}

    assert isinstance(told()["eager_fp32"], StepPhases)
    failed = told()["eager_tf32"]
    assert isinstance(failed, NoPhases)
    assert failed.reason == "TraceError", "the newest failure"
    append_run(tmp_path, "last", sample.phases_record("last", case, "eager_tf32", 1.0), hours=2)
    assert isinstance(told()["eager_tf32"], StepPhases)


def test_a_run_that_only_divided_steps_is_none_to_compare_a_commit_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    case = sample.case_fields("mlp", 64, "cuda")
    append_run(tmp_path, "divided", sample.phases_record("divided", case, "eager_fp32", 1.0), hours=1)
    asked = ["--results", str(tmp_path), sample.COMMITS[2], sample.COMMITS[2]]
    assert compare.main(asked) == 2
    assert "was measured once; measure it again" in capsys.readouterr().err
    timed = sample.round_record("again", 0, case, {"eager_fp32": [1e-3, 1e-3], "kitsune_dropin_fp32": [1e-3, 1e-3]})
    append_run(tmp_path, "again", timed, hours=2)
    append_run(tmp_path, "oncemore", sample.phases_record("oncemore", case, "eager_fp32", 1.0), hours=3)
    assert compare.main(asked) == 0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"clock": "sundial"}, "clock is 'sundial'; expected one of device, wall"),
        ({"phases_s": {"sleeping": [1.0]}}, "phases_s: 'sleeping' is none of data, forward"),
        ({"phases_s": {"forward": [-1.0]}, "host_gap_s": None}, "-1.0 cannot be seconds of a training step"),
        ({"phases_s": {"forward": [1.0], "backward": [1.0, 2.0]}}, "expected one time of each phase for each step"),
        ({"phases_s": {}, "host_gap_s": None}, "expected one time of each phase for each step"),
        ({"trace": "traces/../../../etc/passwd"}, "is no file below the folder of traces"),
        ({"trace": "traces/abc/.json.gz/../x.json.gz"}, "is no file below the folder of traces"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, changed: dict[str, object], problem: str) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    record = sample.phases_record("run-2", sample.case_fields("mlp", 8, "cuda"), "eager_fp32", 1.0)
    path = tmp_path / sample.GPU_MACHINE / f"{sample.COMMITS[2]}.samples.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({**record, **RECORDED, **changed}) + "\n")
    (damage,) = Store(tmp_path).load(sample.GPU_MACHINE).damage
    assert problem in damage.problem


def test_the_page_links_to_traces_beside_it(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path / "results", rounds=2)
    record = sample.phases_record("run-2", sample.case_fields("mlp", 64, "cuda"), "eager_fp32", 1.0)
    path = tmp_path / "results" / sample.GPU_MACHINE / str(record["trace"])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    page = tmp_path / "report.html"
    assert compare.main(["--results", str(tmp_path / "results"), "--html", str(page)]) == 0
    link = f'<a href="results/{sample.GPU_MACHINE}/{record["trace"]}" rel="noopener noreferrer">open</a>'
    assert page.read_text().count(link) == 1
