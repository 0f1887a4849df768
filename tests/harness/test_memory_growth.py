"""That more memory is taken is told where nobody asked for it, of results of a GPU in this repository."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import compare, memory_growth
from harness.comparison import compare as compared
from harness.names import is_product
from harness.selection import choose_measurements
from harness.store import Store

RESULTS = Path(__file__).parents[2] / "results"
COMMITS = ["e6f48508", "1add5dc3"]
NOTE = (
    "memory: 1 row takes more than at e6f48508 (resnet18-b128 kitsune_trainstep_amp +13.8%); --metric memory judges it"
)


def test_growth_is_told_everywhere_and_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*COMMITS, "--results", str(RESULTS), "--machine", "nvidia-h200"]
    paths = {name: tmp_path / name for name in ("json", "markdown", "html")}
    outputs = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert compare.main([*arguments, *outputs, "--fail-on", "regression"]) == 0
    assert f"note: {NOTE}\n" in capsys.readouterr().out
    assert NOTE in json.loads(paths["json"].read_text())["notes"]
    assert "resnet18-b128 kitsune" in paths["markdown"].read_text()
    regressions = paths["html"].read_text().partition('<section id="regressions">')[2].partition("</section>")[0]
    assert "None found in 3 comparisons" in regressions
    assert f"Beside what was judged, {NOTE}.</p>" in regressions

    assert compare.main([*arguments, "--margin", "0.2"]) == 0
    assert "note: memory" not in capsys.readouterr().out, "the margin of memory is asked"
    assert compare.main([*arguments, "--metric", "memory", "--fail-on", "regression"]) == 1
    assert "note: memory" not in capsys.readouterr().out, "what is judged is no note"


def test_the_largest_changes_are_named() -> None:
    history = Store(RESULTS).load("nvidia-h200")
    commits = [next(commit for commit in history.commits if commit.startswith(name)) for name in COMMITS]
    older, newer = choose_measurements(history, *commits)
    assert older is not None
    (grown,) = memory_growth.memory_growth(older, newer, 0.03, is_product)
    comparison = replace(compared(history, *commits, folder=RESULTS), memory_growth=(grown,) * 4)
    told = memory_growth.sentence(comparison)
    assert told is not None
    assert told.startswith("memory: 4 rows take more than at e6f48508 (resnet18-b128")
    assert told.count("+13.8%") == 3
    assert ", …); --metric" in told
    assert memory_growth.sentence(replace(comparison, memory_growth=())) is None
