from pathlib import Path

import numpy as np
import pytest

from harness.simulation import __main__ as simulation
from harness.simulation import histories


def test_shapes_say_where_their_steps_are() -> None:
    rng = np.random.default_rng(0)
    for noise in histories.NOISES:
        for shape in histories.SHAPES:
            history = histories.draw(noise, shape, 10.0, rng)
            jumps = np.flatnonzero(np.abs(np.diff(np.log(history.values))) > 1) + 1
            assert tuple(jumps) == history.places


def test_the_table_has_a_row_for_each_noise_and_each_finder() -> None:
    heading, rule, *rows = simulation.table(1)
    assert len(rows) == len(histories.NOISES) * len(simulation.FINDERS)
    assert {line.count("|") for line in (heading, rule, *rows)} == {heading.count("|")}


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{simulation.BEGIN}\nold\n{simulation.END}\nafter\n", encoding="utf-8")
    simulation.replace_table(document, ["new"])
    assert document.read_text(encoding="utf-8") == (f"before\n{simulation.BEGIN}\n\nnew\n\n{simulation.END}\nafter\n")


def test_a_document_without_marks_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text("no marks\n", encoding="utf-8")
    monkeypatch.setattr(simulation, "table", lambda series: iter(["| row |"]))
    assert simulation.main(["--series", "1", "--write", str(document)]) == 2
    assert "put them where the table goes" in capsys.readouterr().err
    assert document.read_text(encoding="utf-8") == "no marks\n"


def test_the_project_s_document_has_the_marks() -> None:
    content = simulation.DOCUMENT.read_text(encoding="utf-8")
    assert content.index(simulation.BEGIN) < content.index(simulation.END)
