"""What becomes of each model is told, and ends none of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.benchmarks import fake_library
from tests.benchmarks.coverage import sample, table, timm_models, training, transformers_models
from tests.benchmarks.coverage.__main__ import main
from tests.benchmarks.coverage.training import Row, Trained, portable

FAKE: Mapping[str, str] = {"fake": "tests.benchmarks.fake_library"}


def run(*arguments: str) -> None:
    main(arguments, FAKE)


@pytest.mark.timeout(240)
def test_every_outcome_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, text = tmp_path / "rows.json", tmp_path / "coverage.md"
    run("--json", str(rows), "--markdown", str(text), "--limit", "60", "--models", *fake_library.families()[:-2])
    run("--json", str(rows), "--markdown", str(text), "--limit", "3", "--models", "hangs")
    found = {row["family"]: row for row in json.loads(rows.read_text())["rows"]}
    outcomes = {family: row["outcome"] for family, row in found.items()}
    assert outcomes == {
        "captured": "captured",
        "refused": "refused",
        "raises": "fails in eager",
        "exits": "fails",
        "hangs": "not finished",
    }
    assert found["captured"]["exact"] is True
    assert found["captured"]["capture_s"] > 0
    assert "fake_library.py" in found["refused"]["reason"], "the line is named"
    assert "no such input" in found["raises"]["reason"]
    assert "exit code 3" in found["exits"]["reason"]
    written = text.read_text()
    assert "Of 5: 1 captured" in written
    assert "fake 1.0" in written
    assert "[4/4] fake net_exits: fails" in capsys.readouterr().out
    run("--show", str(rows), "--markdown", str(tmp_path / "again.md"))
    assert (tmp_path / "again.md").read_text() == written


@pytest.mark.timeout(120)
def test_a_model_that_takes_too_much_memory(tmp_path: Path) -> None:
    run("--json", str(tmp_path / "rows.json"), "--memory", "4", "--models", "greedy")
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["outcome"] == "fails in eager"
    assert "memory" in row["reason"]


def test_rows_of_other_versions_are_not_mixed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"versions": {"torch": "1.0"}, "steps": 4, "rows": []}))
    with pytest.raises(SystemExit, match="of other versions"):
        run("--json", str(rows), "--models", "captured")


def test_files_of_other_versions_are_not_shown_together(tmp_path: Path) -> None:
    for name, version in (("one", "1.0"), ("other", "2.0")):
        (tmp_path / name).write_text(json.dumps({"versions": {"torch": version}, "steps": 4, "rows": []}))
    with pytest.raises(SystemExit, match=r"of other versions \(torch\)"):
        run("--show", str(tmp_path / "one"), str(tmp_path / "other"), "--markdown", str(tmp_path / "coverage.md"))
    with pytest.raises(SystemExit, match="--show needs a place"):
        run("--show", str(tmp_path / "one"))


def test_an_unknown_family_is_told() -> None:
    with pytest.raises(SystemExit, match="no library has the families none"):
        run("--models", "none")


def test_a_library_that_is_missing_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_library, "missing", lambda: "fake is not installed")
    run()
    assert "fake is skipped: fake is not installed" in capsys.readouterr().out


def test_numbers_that_differ_are_found() -> None:
    wanted = Trained(fake_library.build, "net_captured", with_kitsune=False).after(3)
    trained = Trained(fake_library.build, "net_captured", with_kitsune=True)
    found = trained.after(3)
    assert training._different(found, wanted) == []
    found["layer.weight"] = found["layer.weight"] + 1
    assert training._different(found, wanted) == ["layer.weight"]
    assert trained.verified(3, found, wanted) == []
    found["loss"] = found["loss"] + 1
    assert trained.verified(3, found, wanted) == ["loss: others than with plain PyTorch"]
    found["random numbers"] = torch.zeros(3)
    assert "random numbers" in training._different(found, wanted)


def test_reasons_name_no_folder_of_the_machine() -> None:
    reason = "depends on data [/home/one/.venv/lib/python3.11/site-packages/timm/models/vit.py:3 in forward: if x:]"
    assert portable(reason) == "depends on data [timm/models/vit.py:3 in forward: if x:]"


def test_cells_of_the_table_have_no_bars() -> None:
    row = Row("fake", "family", "model", "refused", reason="a | b\nc")
    assert "| a \\| b c |" in table.document([row], {"fake": "1.0"}, 4, "a command")


@pytest.mark.parametrize("module", [timm_models, transformers_models])
def test_what_is_known_of_libraries(module: sample.Library) -> None:
    reason = module.missing()
    if reason is not None:
        pytest.skip(reason)
    assert len(set(module.families())) == len(module.families()) > 70
    assert module.versions()


def test_every_type_of_transformers_is_of_one_class() -> None:
    names = [transformers_models.model_of(family) for family in transformers_models.families()]
    assert len(set(names)) == len(names) == 79
    with pytest.raises(ValueError, match="no model of the type 'none'"):
        transformers_models.model_of("none")


def test_a_model_of_transformers_is_made() -> None:
    if transformers_models.missing() is not None:
        pytest.skip("transformers is not installed")
    made = transformers_models.build("BertForMaskedLM")
    loss = made.loss(made.model, **made.batch(0))
    assert loss.requires_grad
    assert torch.isfinite(loss)
