import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import compare
from harness.store import Store
from tests.harness import sample
from tests.harness.sample import COMMITS, CPU_MACHINE, GPU_MACHINE


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, slowdown=1.12)
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
    assert "14.0 [13.9, 14.0]  faster" in row
    assert sum(line.startswith("lenet") and "slower" in line and "+12.4%" in line for line in lines) == 1
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

    error = capsys.readouterr().err
    assert "machine" in error
    assert not content or str(path) in error


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

    assert document["schema"] == 1
    assert document["regressions"] == 1
    assert document["head"]["sha"] == COMMITS[2]
    assert len(document["rows"]) == 18 * 3 - 1
    row = next(row for row in document["rows"] if row["variant"] == "kitsune_trainstep_amp")
    assert row["case"] == {"name": "mlp-b64", "model": "mlp", "batch": 64, "device": "cuda"}
    assert 0 < row["ratio"]["low"] < row["ratio"]["ratio"] < row["ratio"]["high"] < 1
    assert (row["verdict"], row["peer_verdict"], row["parity"]) == ("faster", "slower", "agrees")
    assert row["best_peer"] == "handcaptured_compile_amp"
    assert row["seconds"] < row["wall_seconds"]
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
    rows = lines[variants : variants + 2 + 53]
    assert all(line.replace("\\|", "").count("|") == columns for line in rows)
    assert not lines[variants + 2 + 53]


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
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"? same code" not in done.stdout
    assert done.stdout.isascii()
