import errno
import io
import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness import asv_process, compare, comparison, metrics, render, worktree
from harness.narrowing import narrowed
from harness.project import Project
from harness.rows import EnvironmentChange, LevelChange
from harness.store import Store
from tests.harness import sample
from tests.harness.checkout import ROOT
from tests.harness.json_schema import Schema
from tests.harness.repository import git
from tests.harness.sample import COMMITS, CPU_MACHINE, GPU_MACHINE


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, slowdown=1.15)
    sample.write_cpu_history(root)
    return root


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_MACHINE", "elsewhere")


def test_the_table_has_every_variant_with_its_numbers(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = compare.main(["--results", str(results), "--machine", GPU_MACHINE])

    out = capsys.readouterr().out
    assert code == 0
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith("1 regression found in 12 comparisons")
    heading = next(line for line in lines if line.startswith("model"))
    for word in ("batch", "precision", "variant", "time", "over eager", "verdict", "over best peer", "memory", "loss"):
        assert word in heading
    row = next(line for line in lines if "kitsune_trainstep_amp" in line and line.startswith("mlp"))
    assert row.split()[:5] == ["mlp", "64", "amp", "kitsune_trainstep_amp", "104"]
    assert "13.9 [13.7, 14.1]  faster" in row
    assert sum(line.startswith("lenet") and "slower" in line and "+15.8%" in line for line in lines) == 1
    assert "failed: compile_reduce_overhead_amp: resnet18-b128 on cuda: RuntimeError" in out


def test_skips_are_summarised(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--results", str(results), "--machine", CPU_MACHINE]) == 0

    skipped = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  skipped")]

    assert len(skipped) == 4
    assert all("all 3 cases" in line for line in skipped)


def test_the_table_copes_with_a_sweep_over_batch_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    assert compare.main(["--results", str(tmp_path), "--fail-on", "regression"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("lenet") and line.split()[1] == "8" and "one_stream" in line)
    assert row.split()[2:4] == ["amp", "kitsune_trainstep_one_stream_amp"]
    assert sum(line.startswith("  left out") for line in lines) == 1


def test_another_machine_is_named_when_this_one_has_no_results(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare.main(["--results", str(results)])
    out = capsys.readouterr().out
    assert f"machine  {CPU_MACHINE}:" in out
    assert f"this machine (elsewhere) has no results; these are of {CPU_MACHINE}, measured most recently" in out

    monkeypatch.setenv("HARNESS_MACHINE", GPU_MACHINE)
    compare.main(["--results", str(results)])
    out = capsys.readouterr().out
    assert f"machine  {GPU_MACHINE}:" in out
    assert "has no results" not in out


def test_a_terminal_gets_colours_unless_it_says_no(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--results", str(results), "--machine", GPU_MACHINE]
    compare.main(arguments)
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    compare.main(arguments)
    coloured = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    compare.main(arguments)

    assert "\x1b[1;31m" in coloured
    for code in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[34m", "\x1b[1;31m"):
        coloured = coloured.replace(code, "")
    assert [line.rstrip() for line in coloured.splitlines()] == plain.splitlines()
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 1),
        ([COMMITS[0], COMMITS[1]], 0),
        ([COMMITS[0], COMMITS[0][:10], "--machine", CPU_MACHINE], 2),
        (["--margin", "0.2"], 0),
        (["--machine", CPU_MACHINE], 0),
    ],
)
def test_fail_on_regression(results: Path, arguments: list[str], code: int) -> None:
    every = ["--results", str(results), "--machine", GPU_MACHINE, "--fail-on", "regression", *arguments]
    assert compare.main(every) == code
    assert compare.main([argument for argument in every if argument not in ("--fail-on", "regression")]) == code * (
        code == 2
    )


def test_without_an_earlier_commit_there_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    for commit in COMMITS[1:]:
        (tmp_path / GPU_MACHINE / f"{commit}.samples.jsonl").unlink()

    assert compare.main(["--results", str(tmp_path), "--fail-on", "regression"]) == 0

    assert "no earlier commit is measured" in capsys.readouterr().out


def test_one_round_claims_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    for commit in COMMITS[1:]:
        (tmp_path / GPU_MACHINE / f"{commit}.samples.jsonl").unlink()
    assert compare.main(["--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Kitsune faster than eager in 0 of 6 rows, 6 of them inconclusive (")
    means = [line for line in out.splitlines() if "geometric mean" in line]
    assert all("× (one round) over eager, " in line for line in means)
    assert all("× (one round) over the best peer" in line for line in means)
    assert means


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["v99"], "'v99' is not measured"),
        (["--machine", "nowhere"], "no results of machine 'nowhere'"),
        (["--results", "/nonexistent/results"], "no results in /nonexistent/results"),
    ],
)
def test_what_cannot_be_formed_is_one_clear_line_and_code_2(
    results: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--results", str(results), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("harness.compare: ")
    assert words in captured.err


@pytest.mark.parametrize("content", [b"", b"\x00\x01garbage\n{", b'{"schema":1,"kind":"run"}\n', b"null\n[]\n"])
def test_results_of_which_nothing_is_readable(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine" / f"{COMMITS[0]}.samples.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)

    assert compare.main(["--results", str(tmp_path)]) == 2

    assert str(path) in capsys.readouterr().err


NO_TIMES = {
    "nan": [math.nan, math.nan], "infinite": [math.inf, math.inf], "none": [], "negative": [-1.0, -1.0],
    "zero": [0.0, 0.0], "no blocks": None,
}  # fmt: skip


@pytest.mark.parametrize("times", NO_TIMES.values(), ids=NO_TIMES)
@pytest.mark.parametrize("place", [1, 2])
def test_a_commit_whose_times_are_all_damaged_is_passed_over_and_named(
    tmp_path: Path, times: list[float] | None, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    spoilt = tmp_path / GPU_MACHINE / f"{COMMITS[place]}.samples.jsonl"
    lines = []
    for line in spoilt.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "round":
            blocks = {} if times is None else {name: {"wall_s": times, "device_s": times} for name in record["blocks"]}
            line = json.dumps({**record, "blocks": blocks})
        lines.append(line)
    spoilt.write_text("\n".join(lines) + "\n")
    path = tmp_path / "out.json"
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE]

    assert compare.main([*arguments, "--json", str(path), "--fail-on", "damage"]) == 1

    document, out = json.loads(path.read_text()), capsys.readouterr().out
    others = [commit for commit in COMMITS if commit != COMMITS[place]]
    assert [document["base"]["sha"], document["head"]["sha"]] == others
    assert f"{spoilt}: 6 lines: line " in out
    assert (f"note: {COMMITS[2][:8]} is passed over" in out) == (place == 2)
    assert compare.main([*arguments, COMMITS[0], COMMITS[place]]) == 2
    error = capsys.readouterr().err
    assert f"no readable timings: {spoilt}, line " in error
    assert "(and 5 more); measure it again" in error


def test_an_empty_file_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    newest.write_bytes(b"")
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE, "--fail-on", "damage"]
    for _ in range(2):  # read, and then known from the index
        assert compare.main(arguments) == 1
        assert f"{newest}: the whole file: is empty" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("benchmarks.json", None, "is missing"),
        (f"{GPU_MACHINE}/machine.json", None, "is missing"),
        ("benchmarks.json", "{", "not valid JSON"),
        (f"{GPU_MACHINE}/machine.json", "[]", "not a JSON object"),
        (f"{GPU_MACHINE}/machine.json", "{}", "its version is None, where asv's is 1"),
        (f"{GPU_MACHINE}/{COMMITS[0][:8]}-shared-py3.12.json", "", "not valid JSON"),
        (
            f"{GPU_MACHINE}/{COMMITS[0][:8]}-shared-py3.12.json",
            '{"version": 99}',
            "its version is 99, where asv's is 2",
        ),
    ],
)
def test_damage_of_asv_s_files_is_told(
    tmp_path: Path, name: str, content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    sample.write_asv_files(tmp_path, GPU_MACHINE, COMMITS)
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE, "--fail-on", "damage"]
    assert compare.main(arguments) == 0
    capsys.readouterr()
    path = tmp_path / name
    path.unlink() if content is None else path.write_text(content)
    assert compare.main(arguments) == 1
    assert f"{path}: the whole file: {words}" in capsys.readouterr().out


def test_a_damaged_file_is_named_and_the_rest_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path)
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    newest.write_bytes(newest.read_bytes()[:-40] + b"\nnot json\n")
    oldest = tmp_path / GPU_MACHINE / f"{COMMITS[0]}.samples.jsonl"
    oldest.write_bytes(b"\xff" * 100)

    assert compare.main(["--results", str(tmp_path), "--machine", GPU_MACHINE, "--fail-on", "regression"]) == 0

    out = capsys.readouterr().out
    assert f"{newest}: 2 lines: line " in out
    assert f"{oldest}: 1 line: line 1: not valid JSON" in out
    assert "kitsune_trainstep_amp" in out


def test_json_has_everything_and_only_plain_numbers(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    compare.main(["--results", str(results), "--machine", GPU_MACHINE, "--json", str(path)])

    document = json.loads(path.read_text(), parse_constant=pytest.fail)

    assert document["schema"] == 2
    assert document["regressions"] == 1
    assert document["head"]["sha"] == COMMITS[2]
    assert len(document["rows"]) == 22 * 3 - 1
    row = next(row for row in document["rows"] if row["variant"] == "kitsune_trainstep_amp")
    assert row["case"] == {"name": "mlp-b64", "model": "mlp", "batch": 64, "device": "cuda"}
    assert 0 < row["ratio"]["low"] < row["ratio"]["ratio"] < row["ratio"]["high"] < 1
    assert (row["verdict"], row["peer_verdict"], row["parity"]) == ("faster", "slower", "agrees")
    assert row["best_peer"] == "handcaptured_compile_amp"
    assert row["seconds"] < row["wall_seconds"]
    assert 0 < row["warm_setup_s"] < row["setup_s"]
    assert 0 < row["warm_break_even_steps"] < row["break_even_steps"]
    assert 0 < row["first_replay_s"] < row["setup_s"]
    assert 0 < row["warm_first_replay_s"] < row["warm_setup_s"]
    assert {entry["first_replay_s"] for entry in document["rows"] if "kitsune" not in entry["variant"]} == {None}
    assert {change["verdict"] for change in document["changes"]} == {"same", "slower"}
    assert document["skips"][0]["status"] == "failed"


def test_json_tells_what_was_fused(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    compare.main(["--results", str(results), "--machine", GPU_MACHINE, "--json", str(path)])

    fusions = json.loads(path.read_text(), parse_constant=pytest.fail)["fusions"]

    assert [(entry["case"]["name"], entry["precision"]) for entry in fusions] == [
        (case, precision) for case in ("mlp-b64", "lenet-b64", "resnet18-b128") for precision in ("fp32", "amp")
    ]
    found = fusions[1]
    assert found["variants"] == ["kitsune_trainstep_amp", "kitsune_trainstep_one_stream_amp"]
    assert found["won_us"] == sum(parts["won_us"] or 0 for parts in found["replaced"]) == 12.5
    assert found["replaced"][0] == {
        "template": "batch norm + relu", "refusal": None, "num_parts": 4, "before_us": 7.0, "after_us": 4.5,
        "won_us": 10.0,
    }  # fmt: skip
    assert [parts["refusal"] for parts in found["left"]] == ["it is not faster", "there was no time left to try it"]
    assert found["unfused_seconds"] / found["fused_seconds"] == pytest.approx(found["gain"]["ratio"], rel=0.05)

    compare.main(["--results", str(results), "--machine", CPU_MACHINE, "--json", str(path)])
    assert json.loads(path.read_text())["fusions"] == []


def test_json_of_a_single_round_has_null_for_bounds_that_cannot_be_claimed(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    path = tmp_path / "out.json"
    compare.main(["--results", str(tmp_path), "--json", str(path)])

    ratios = [row["ratio"] for row in json.loads(path.read_text(), parse_constant=pytest.fail)["rows"] if row["ratio"]]

    assert ratios
    assert all(ratio["low"] is ratio["high"] is None and ratio["rounds"] == 1 for ratio in ratios)


def test_markdown_has_whole_tables(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.md"
    compare.main(["--results", str(results), "--machine", GPU_MACHINE, "--markdown", str(path)])

    lines = path.read_text().splitlines()

    assert lines[0].startswith("## 1 regression found")
    variants = next(index for index, line in enumerate(lines) if line == "### Variants") + 2
    columns = lines[variants].count("|")
    rows = lines[variants : variants + 2 + 65]
    assert all(line.replace("\\|", "").count("|") == columns for line in rows)
    assert not lines[variants + 2 + 65]


def test_names_in_results_cannot_break_out_of_markdown(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>|[x](javascript:y)`*"
    case = sample.case_fields("m|`<b>", 1, "cpu")
    started = sample.datetime(2026, 1, 1, tzinfo=sample.timezone.utc)
    records = [
        sample.run_record("r", COMMITS[0], {"device": hostile}, started=started),
        sample.round_record("r", 0, case, {hostile: [1.0], "eager_fp32": [1.0]}),
        sample.skip_record("r", case, "compile_fp32", hostile + "\n# heading", "failed"),
    ]
    Store(tmp_path).append("machine", COMMITS[0], records)
    path = tmp_path / "out.md"

    assert compare.main(["--results", str(tmp_path), "--markdown", str(path)]) == 0

    text = path.read_text()
    assert "<img" not in text
    assert "<b>" not in text
    assert "\n# heading" not in text
    assert "](javascript" not in text.replace("\\]", "")


def test_an_output_that_cannot_be_written_is_code_2(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "absent" / "out.json"
    assert compare.main(["--results", str(results), "--json", str(target)]) == 2
    assert capsys.readouterr().err == f"harness.compare: {target}: cannot be written (No such file or directory)\n"


@pytest.mark.parametrize("margin", ["0", "-1", "1", "nan", "three"])
def test_a_margin_is_a_fraction(margin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.main(["--margin", margin])
    assert caught.value.code == 2
    assert "is not a fraction between 0 and 1" in capsys.readouterr().err


def test_a_machine_name_that_cannot_be_is_one_line(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_MACHINE", "No Such/Name")
    assert compare.main(["--results", str(results)]) == 2
    assert "HARNESS_MACHINE" in capsys.readouterr().err


def test_the_module_is_a_command_that_does_not_wait_for_torch(results: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['harness.compare', *sys.argv[1:]]\n"
        "try: runpy.run_module('harness.compare', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules and 'plotly' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--results", str(results), "--machine", GPU_MACHINE],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"? same code" not in done.stdout
    assert done.stdout.isascii()


def test_where_nobody_reads_on_everything_else_is_done(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "harness.compare", "--results", str(results), "--machine", GPU_MACHINE]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*command, "--json", str(path), "--fail-on", "regression"],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(path.read_text())["regressions"] == 1


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_behind_standard_output_is_one_line_and_code_2(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert compare.main(["--results", str(results), "--machine", GPU_MACHINE]) == 2
    told = "standard output cannot be written (No space left on device)"
    assert capsys.readouterr().err == f"harness.compare: {told}\n"


def test_nothing_more_is_said_at_the_end_of_a_process_that_could_not_print(results: Path, tmp_path: Path) -> None:
    unwritable = tmp_path / "read-only.txt"
    unwritable.touch()
    with unwritable.open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "harness.compare", "--results", str(results), "--machine", GPU_MACHINE],
            stdout=file,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            check=False,
        )
    told = "standard output cannot be written (Bad file descriptor)"
    assert (done.returncode, done.stderr) == (2, f"harness.compare: {told}\n")


def test_a_link_and_a_pipe_are_written_through(results: Path, tmp_path: Path) -> None:
    link, pipe, read = tmp_path / "link.json", tmp_path / "pipe", list[str]()
    link.symlink_to("document.json")
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    arguments = ["--results", str(results), "--machine", GPU_MACHINE, "--json", str(link), "--markdown", str(pipe)]
    assert compare.main(arguments) == 0
    reader.join(timeout=60)
    assert link.is_symlink()
    assert json.loads((tmp_path / "document.json").read_text())["kind"] == "commits"
    assert pipe.is_fifo()
    assert read[0].startswith("## ")


def test_half_a_character_in_results_is_replaced(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    lines = newest.read_text().replace("RuntimeError: CUDA graph", "bad \\ud800 name")
    newest.write_text(lines)
    names = {option: tmp_path / f"out.{option}" for option in ("html", "json", "markdown")}
    words = [word for option, path in names.items() for word in (f"--{option}", str(path))]
    assert compare.main(["--results", str(tmp_path), "--machine", GPU_MACHINE, *words]) == 0
    for path in names.values():
        assert "bad ? name" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"", b"no json\nnone either\n"])
def test_a_damaged_commit_that_is_asked_for_is_told_with_its_file(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    spoilt = tmp_path / GPU_MACHINE / f"{COMMITS[1]}.samples.jsonl"
    spoilt.write_bytes(content)
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE]
    assert compare.main([*arguments, COMMITS[1][:8]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    problem = "line 1: not valid JSON" if content else "is empty: what was measured is lost"
    assert f"damaged: {spoilt}{', ' if content else ': '}{problem}" in error
    assert compare.main([*arguments, "dddd"]) == 2
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("is_judged", [True, False])
def test_notes_are_on_the_changes_that_are_judged(
    tmp_path: Path, is_judged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    newest.write_text(newest.read_text().replace("5f1d3b60", "another"))  # started again since
    metric = ["--metric", "memory", "--metric", "setup", *(["--metric", "ratio"] if is_judged else [])]
    assert compare.main(["--results", str(tmp_path), "--machine", GPU_MACHINE, *metric]) == 0
    out = capsys.readouterr().out
    assert "note: the commits were measured on different machines of one kind" in out
    assert ("a change stands against every control of its row" in out) == is_judged
    assert "no change can be judged" not in out


def test_a_metric_that_a_commit_does_not_have_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE, "--metric", "setup", "--metric", "warm-setup"]
    note = "note: no variant has its warm-setup at both commits, so no change of it can be judged"
    assert compare.main(arguments) == 0
    assert note not in capsys.readouterr().out
    older = tmp_path / GPU_MACHINE / f"{COMMITS[1]}.samples.jsonl"
    older.write_text(older.read_text().replace('"setup_again_s"', '"was_setup_again_s"'))
    assert compare.main(arguments) == 0
    assert note in capsys.readouterr().out.splitlines()


def test_a_loss_that_goes_on_otherwise_than_eager_s_fails(tmp_path: Path) -> None:
    sample.write_zoo_history(tmp_path)
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE, "--fail-on", "loss"]
    assert compare.main(arguments) == 1
    assert compare.main([*arguments, "--model", "dlrm"]) == 0


def test_a_gate_that_cannot_close_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path, rounds=2)
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE, "--fail-on"]
    assert [compare.main([*arguments, name]) for name in ("loss", "regression")] == [0, 0]
    assert capsys.readouterr().err == ""
    for commit in COMMITS[:2]:
        (tmp_path / GPU_MACHINE / f"{commit}.samples.jsonl").unlink()
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    lines = [line for line in newest.read_text().splitlines() if '"kind":"profile"' not in line]
    newest.write_text("\n".join(lines) + "\n")
    assert [compare.main([*arguments, name]) for name in ("loss", "regression", "inconclusive")] == [0, 0, 0]
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith("--fail-on loss cannot be met: no loss of Kitsune's was measured beside that of eager")
    for line, name in zip(told[1:], ("regression", "inconclusive"), strict=True):
        assert f"--fail-on {name} cannot be met: nothing of Kitsune's was compared" in line


def test_margins_are_called_by_their_metrics(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(results), "--machine", GPU_MACHINE]
    compare.main([*arguments, "--metric", "ratio", "--metric", "time", "--margin", "time=0.1"])
    assert "\nmargin   3% of ratio, 10% of time, or twice" in capsys.readouterr().out


SCHEMA = Schema(ROOT / "docs" / "compare.schema.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--machine", GPU_MACHINE, *(word for name in metrics.names() for word in ("--metric", name))],
        ["--machine", CPU_MACHINE],
        ["--machine", GPU_MACHINE, "--variants", "eager_amp", "kitsune_trainstep_amp", "--metric", "memory"],
        ["--machines", GPU_MACHINE, GPU_MACHINE],
    ],
)
def test_every_json_document_is_as_its_schema_says(results: Path, tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "out.json"
    damaged = results / GPU_MACHINE / f"{'d' * 40}.samples.jsonl"
    damaged.write_text("no json\n")
    assert compare.main(["--results", str(results), "--json", str(path), *arguments]) == 0
    damaged.unlink()

    assert SCHEMA.problems(json.loads(path.read_text())) == []


def test_changes_over_the_history_are_in_documents_and_can_be_narrowed_down(results: Path) -> None:
    found = comparison.compare(Store(results).load(GPU_MACHINE), folder=results)
    change = LevelChange(*found.commits, missing=0, ratio=1.08, p_value=1e-3, is_worse=True)
    moved = EnvironmentChange(found.commits[0], found.commits[1], {"torch": ("2.12.0", "2.13.0")})
    series = replace(found.history[0], changes=(change,))
    found = replace(found, history=(series,), environment_changes=(moved,))

    document = json.loads(render.json_document(found))
    assert SCHEMA.problems(document) == []
    assert (len(document["level_changes"]), len(document["environment_changes"])) == (1, 1)
    for title in ("Changes of level", "Changes of the environment"):
        assert title in render.text(found)
        assert f"### {title}" in render.markdown(found)
    assert narrowed(found, "regressed").history[0].changes == (change,)
    assert "Changes of level" not in render.text(found, shown=narrowed(found, "inconclusive"))


def test_the_judge_of_documents_finds_what_is_wrong(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    compare.main(["--results", str(results), "--machine", GPU_MACHINE, "--json", str(path)])
    document = json.loads(path.read_text())
    del document["rows"][0]["seconds"]
    document["rows"][1]["case"]["batch"] = "64"
    document["rows"][2]["new"] = 1

    problems = "\n".join(SCHEMA.problems(document))

    for words in ("rows[0] has no seconds", "rows[1].case.batch: '64' is no integer", "rows[2].new is not described"):
        assert words in problems


def test_only_what_regressed_is_listed_and_all_is_counted(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    arguments = ["--results", str(results), "--machine", GPU_MACHINE, "--only", "regressed", "--json", str(path)]
    assert compare.main([*arguments, "--fail-on", "regression"]) == 1

    out = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert out.startswith("1 regression found in 12 comparisons")
    assert [(row["case"]["model"], row["variant"]) for row in document["rows"]] == [
        ("lenet", "eager_amp"), ("lenet", "handcaptured_amp"), ("lenet", "kitsune_trainstep_amp"),
    ]  # fmt: skip
    assert [change["verdict"] for change in document["changes"]] == ["slower"]
    assert not any(line.startswith("mlp") for line in out.splitlines())


def test_only_what_changed_may_be_nothing(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(results), "--machine", CPU_MACHINE, "--only", "changed"]
    assert compare.main(arguments) == 0
    out = capsys.readouterr().out
    assert "No regression found" in out
    assert "kitsune_dropin_fp32" not in out.partition("Not measured")[0]


def test_models_are_judged_alone(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--results", str(results), "--machine", GPU_MACHINE, "--fail-on", "regression"]
    assert compare.main([*arguments, "--model", "mlp", "--model", "resnet18"]) == 0
    out = capsys.readouterr().out
    assert "No regression found in 8 comparisons" in out
    assert "geometric mean of 2 cases" in out
    assert "lenet" not in out
    assert compare.main([*arguments, "--model", "vgg"]) == 2
    assert "model 'vgg' is not measured on nvidia-h200; measured: mlp, lenet, resnet18" in capsys.readouterr().err


def test_metrics_are_judged_by_margins_of_their_own(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    arguments = ["--results", str(results), "--machine", GPU_MACHINE, "--json", str(path), "--model", "lenet"]
    assert compare.main([*arguments, "--metric", "time", "--margin", "time=0.01", "--fail-on", "regression"]) == 1
    document = json.loads(path.read_text())
    slower = [entry for entry in document["contrasts"] if entry["verdict"] == "slower"]
    assert document["changes"] == []
    assert document["margins"] == {"time": 0.01}
    assert [entry["variant"] for entry in slower] == ["kitsune_trainstep_amp"]
    assert slower[0]["ratio"]["ratio"] == pytest.approx(slower[0]["head"] / slower[0]["base"], rel=0.05)
    assert compare.main([*arguments, "--metric", "time", "--margin", "0.3", "--fail-on", "regression"]) == 0
    capsys.readouterr()

    assert compare.main([*arguments, "--metric", "memory", "--metric", "setup", "--fail-on", "inconclusive"]) == 1
    found = {(entry["metric"], entry["verdict"]) for entry in json.loads(path.read_text())["contrasts"]}
    assert found == {("memory", "same"), ("setup", "inconclusive")}
    assert "(one run)" in capsys.readouterr().out
    assert compare.main([*arguments, "--metric", "warm-setup"]) == 0
    found = {entry["variant"] for entry in json.loads(path.read_text())["contrasts"]}
    assert "compile_fp32" not in found  # whose caches are not the commit's: no product is judged by them
    assert "kitsune_trainstep_amp" in found


def test_noise_widens_the_margin_of_a_metric_s_row(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert (
        compare.main(["--results", str(results), "--machine", CPU_MACHINE, "--metric", "time", "--json", str(path)])
        == 0
    )
    document = json.loads(path.read_text())
    margins = [entry["margin"] for entry in document["contrasts"]]
    assert document["margins"] == {"time": 0.03}
    assert all(0.03 <= margin <= 0.10 for margin in margins)
    assert max(margins) > 0.03


@pytest.mark.parametrize(("failure", "machine", "code"), [("failure", GPU_MACHINE, 1), ("failure", CPU_MACHINE, 0)])
def test_other_things_to_fail_on(results: Path, failure: str, machine: str, code: int) -> None:
    assert compare.main(["--results", str(results), "--machine", machine, "--fail-on", failure]) == code


def test_damage_and_losses_can_be_failed_on(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path)
    arguments = ["--results", str(tmp_path), "--machine", GPU_MACHINE, "--fail-on"]
    assert [compare.main([*arguments, failure]) for failure in ("damage", "loss")] == [0, 0]
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    lines = newest.read_text().splitlines()
    index = next(k for k, line in enumerate(lines) if '"profile","run"' in line and '"kitsune_dropin_fp32"' in line)
    record = json.loads(lines[index])
    lines[index] = json.dumps({**record, "losses": [[step, 9.0] for step, _ in record["losses"]]})
    newest.write_text("\n".join(lines) + "\nno json\n")
    assert [compare.main([*arguments, failure]) for failure in ("damage", "loss")] == [1, 1]


def test_two_variants_of_a_commit_are_compared_pair_by_pair(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, markdown_path = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--results", str(results), "--machine", GPU_MACHINE]
    sides = ["--variants", "handcaptured_amp", "kitsune_trainstep_amp"]
    outputs = ["--json", str(json_path), "--markdown", str(markdown_path)]
    assert compare.main([*arguments, *sides, *outputs, "--fail-on", "regression"]) == 1
    assert compare.main([*arguments, *sides, COMMITS[1], "--fail-on", "regression"]) == 0

    document = json.loads(json_path.read_text())
    verdicts = {entry["case"]["model"]: entry["verdict"] for entry in document["contrasts"]}
    assert document["kind"] == "variants"
    assert verdicts == {"mlp": "faster", "lenet": "slower", "resnet18": "same"}
    out = capsys.readouterr().out
    assert out.startswith(
        "kitsune_trainstep_amp takes less than handcaptured_amp in 1 of 3 rows, more in 1; 0 inconclusive\n"
    )
    assert "## kitsune\\_trainstep\\_amp takes less" in markdown_path.read_text()
    compare.main([*arguments, *sides, "--only", "changed"])
    assert "resnet18" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "eager_amp", "nothing"], "'nothing' was not timed at c05d61ef; timed there: "),
        (["--machines", GPU_MACHINE, CPU_MACHINE], "have no case, variant and metric in common"),
        (["--machines", GPU_MACHINE, "nowhere"], "machines with results"),
        ([f"{COMMITS[0]}...{COMMITS[1]}"], "git finds no commit from which both"),
        (["--bisect", "lenet-b64:kitsune_trainstep_amp"], f"the regression was measured on {GPU_MACHINE}, and this is"),
        (["--bisect", "nosuch"], "'nosuch' is none of the regressions: lenet-b64:kitsune_trainstep_amp"),
        (["--bisect", "nosuch", "--machine", CPU_MACHINE], "nothing that asv could search for is a regression"),
    ],
)
def test_sides_that_cannot_be_compared_are_one_line(
    results: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = [] if "--machine" in arguments or "--machines" in arguments else ["--machine", GPU_MACHINE]
    assert compare.main(["--results", str(results), *arguments, *extra]) == 2
    assert words in capsys.readouterr().err


def test_one_commit_on_two_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_gpu_history(tmp_path)
    (tmp_path / GPU_MACHINE).rename(tmp_path / "other-gpu")
    sample.write_gpu_history(tmp_path, slowdown=1.5)
    path = tmp_path / "out.json"
    arguments = ["--results", str(tmp_path), "--machines", "other-gpu", GPU_MACHINE, "--json", str(path)]
    assert compare.main(arguments) == 0
    document = json.loads(path.read_text())
    slower = {
        (entry["case"]["model"], entry["variant"]) for entry in document["contrasts"] if entry["verdict"] == "slower"
    }
    assert slower == {("lenet", "kitsune_trainstep_amp")}
    assert f"{GPU_MACHINE} takes less than other-gpu in 0 of 65 rows" in capsys.readouterr().out
    assert compare.main([*arguments, "--metric", "ratio", "--model", "lenet"]) == 0
    ratios = json.loads(path.read_text())["contrasts"]
    assert {entry["unit"] for entry in ratios} == {"times eager"}
    assert not any(entry["variant"].startswith("eager") for entry in ratios)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a..b", "c"], "is a range already"),
        (["a", "b..c"], "give it alone"),
        (["--worktree", "a", "b"], "give BASE alone"),
        (["--variants", "a", "b", "--machines", "a", "b"], "cannot be compared at the same time"),
        (["--variants", "a", "b", "--reproduce"], "--reproduce is for the comparison of commits"),
        (["--machines", "a", "b", "--fail-on", "loss"], "--fail-on loss is for the comparison of commits"),
        (["--machines", "a", "b", "--machine", "a"], "leave out --machine"),
        (["--variants", "a", "b", "c..d"], "compared at one commit"),
        (["--margin", "speed=0.1"], "'speed' is no metric"),
        (["--margin", "time=0.1"], "--margin time=0.1 is of a metric that is not judged: add --metric time"),
        (["--margin", "memory=0.1", "--metric", "time"], "add --metric memory"),
        (["--variants", "a", "b", "--margin", "ratio=0.1"], "add --metric ratio"),
        (["a..b..c"], "a..b..c has more than two ends"),
        (["a...b..c"], "a...b..c has more than two ends"),
        (["--json", "out", "--html", "./out"], "--html and --json name the same file"),
        (["--json", "out", "--markdown", "out"], "--json and --markdown name the same file"),
    ],
)
def test_options_that_contradict_one_another_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_every_row_has_a_command_that_measures_it_again(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    arguments = ["--results", str(results), "--machine", GPU_MACHINE, "--json", str(path)]
    compare.main(arguments)
    both = f"python -m harness.run {COMMITS[1][:12]} {COMMITS[2][:12]} --profile full --case lenet-b64"
    command = f"{both} --variant handcaptured_amp --variant kitsune_trainstep_amp"
    assert [line for line in capsys.readouterr().out.splitlines() if "harness.run" in line] == [f"  {command}"]
    document = json.loads(path.read_text())
    (slower,) = [change for change in document["changes"] if change["verdict"] == "slower"]
    assert slower["reproduce"] == command
    assert all("--case" in row["reproduce"] and row["variant"] in row["reproduce"] for row in document["rows"])
    row = next(
        row for row in document["rows"] if row["case"]["model"] == "lenet" and row["variant"] == slower["variant"]
    )
    assert row["reproduce"] == (
        f"python -m harness.run {COMMITS[2][:12]} --profile full --case lenet-b64 --variant eager_amp"
        " --variant handcaptured_compile_amp --variant kitsune_trainstep_amp"
    )
    compare.main([*arguments, "--metric", "time", "--metric", "memory"])
    contrasts = json.loads(path.read_text())["contrasts"]
    assert all(f"{COMMITS[1][:12]} {COMMITS[2][:12]} " in entry["reproduce"] for entry in contrasts)
    compare.main([*arguments, "--reproduce"])
    assert sum("harness.run" in line for line in capsys.readouterr().out.splitlines()) > 30


def test_colours_can_be_asked_for_and_forbidden(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--results", str(results), "--machine", GPU_MACHINE]
    compare.main([*arguments, "--color", "always"])
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    compare.main([*arguments, "--color", "never"])
    assert "\x1b[" not in capsys.readouterr().out


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Three measured commits of a repository, and its working tree, in which something was changed and measured."""
    root = tmp_path / "tree"
    (root / "kitsune").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch=main")
    found = Project(root, root, is_kitsune=True)
    sample.write_gpu_history(found.results)
    for number, invented in enumerate(COMMITS):
        (root / "kitsune" / "step.py").write_text(f"{number}\n")
        git(root, "add", "kitsune")
        git(root, "commit", "--quiet", "--message", str(number))
        move_results(found, invented, git(root, "rev-parse", "HEAD"))
    (root / "kitsune" / "step.py").write_text("changed\n")
    head = git(root, "rev-parse", "HEAD")
    path = found.results / GPU_MACHINE / f"{head}.samples.jsonl"
    snapshot = worktree.snapshot(root, ("kitsune",)).commit
    records = path.read_text().replace(head, snapshot).replace('"kind":"run"', f'"kind":"run","snapshot_of":"{head}"')
    path.with_name(f"{snapshot}.samples.jsonl").write_text(records)
    monkeypatch.setattr(compare.project, "here", lambda: found)
    return found


def move_results(project: Project, old: str, new: str) -> None:
    path = project.results / GPU_MACHINE / f"{old}.samples.jsonl"
    path.with_name(f"{new}.samples.jsonl").write_text(path.read_text().replace(old, new))
    path.unlink()


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The subjects of the commits that are compared, the older first."""
    assert compare.main([*arguments, "--machine", GPU_MACHINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split(maxsplit=2)[2].rpartition(" (")[0] for line in lines if line.startswith(("against", "commit"))][
        ::-1
    ]


def test_a_state_of_the_working_tree_is_compared_only_when_it_is_asked_for(
    tree: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    head = git(tree.root, "rev-parse", "--short=8", "HEAD")
    assert compared(capsys) == ["1", "2"]
    assert compared(capsys, "--worktree") == ["2", f"Working tree on {head}"]
    assert compared(capsys, "HEAD~1", "--worktree") == ["1", f"Working tree on {head}"]


def test_a_working_tree_that_is_not_measured_as_it_is_says_how_to(
    tree: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree.root / "kitsune" / "step.py").write_text("changed again\n")
    assert compare.main(["--worktree", "--machine", GPU_MACHINE]) == 2
    assert "run `python -m harness.run --worktree`" in capsys.readouterr().err
    git(tree.root, "checkout", "--quiet", "kitsune")
    assert compare.main(["--worktree", "--machine", GPU_MACHINE]) == 2
    assert "nothing that is measured was changed" in capsys.readouterr().err


def test_ranges_and_tags(tree: Project, capsys: pytest.CaptureFixture[str]) -> None:
    git(tree.root, "tag", "v1", "HEAD~2")
    git(tree.root, "branch", "side", "HEAD~1")
    assert compared(capsys, "v1..HEAD") == ["0", "2"]
    assert compared(capsys, "v1..side") == ["0", "1"]
    assert compared(capsys, "side...") == ["1", "2"]
    assert compared(capsys, "v1", "main~1") == ["0", "1"]


def test_a_regression_is_handed_to_asv(
    tree: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARNESS_MACHINE", GPU_MACHINE)
    newest = git(tree.root, "rev-parse", "HEAD")
    (tree.results / GPU_MACHINE / f"{newest}.samples.jsonl").unlink()
    slow = tree.home / "slow"
    sample.write_gpu_history(slow, slowdown=1.3)
    path = slow / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    (tree.results / GPU_MACHINE / f"{newest}.samples.jsonl").write_text(path.read_text().replace(COMMITS[2], newest))
    program = "import os, sys; print(sys.argv[1:], os.environ['HARNESS_CASES'])"
    monkeypatch.setattr(asv_process, "command", lambda project, *rest: [sys.executable, "-c", program, *rest])
    assert compare.main(["--bisect"]) == 0
    told = capfd.readouterr().out.splitlines()[-1]
    assert told.startswith("['find', '")
    assert told.endswith(" lenet-b64")
    assert compare.main(["--bisect", "--model", "mlp"]) == 2
    assert "nothing that asv could search for" in capfd.readouterr().err


def test_results_of_what_was_renamed_since_are_read_like_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path)
    for commit in COMMITS[:2]:
        path = tmp_path / GPU_MACHINE / f"{commit}.samples.jsonl"
        renamed = path.read_text().replace('"kitsune_dropin_', '"kitsune_wrapper_').replace("lenet", "lenet5")
        path.write_text(renamed)
    assert compare.main(["--results", str(tmp_path), "--fail-on", "regression", "--fail-on", "damage"]) == 0
    out = capsys.readouterr().out
    assert "No regression found in 4 comparisons" in out
    assert compare.main(["--results", str(tmp_path), COMMITS[0], COMMITS[1]]) == 0
    assert "kitsune_wrapper_fp32" in capsys.readouterr().out


def test_rounds_without_samples_are_named_and_the_others_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_gpu_history(tmp_path)
    newest = tmp_path / GPU_MACHINE / f"{COMMITS[2]}.samples.jsonl"
    lines = newest.read_text().splitlines()
    index = next(k for k, line in enumerate(lines) if '"kind":"round"' in line)
    record = json.loads(lines[index])
    empty = {name: {"wall_s": [], "device_s": []} for name in record["blocks"]}
    lines[index] = json.dumps({**record, "blocks": empty})
    lines.append(json.dumps({**record, "round": 99, "blocks": {}}))
    newest.write_text("\n".join(lines) + "\n")
    assert compare.main(["--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{newest}: 2 lines: line {index + 1}: blocks['eager_fp32'].wall_s: expected a list of at least one" in out
    assert "kitsune_trainstep_amp" in out
