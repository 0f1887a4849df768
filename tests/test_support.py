"""The table of what is supported says what the tests say."""

from pathlib import Path

import pytest

from tests import support


def test_the_document_is_up_to_date() -> None:
    written = support.DOCUMENT.read_text(encoding="utf-8")
    assert written == support.document(support.claims()), "run `python -m tests.support`"


def test_all_areas_are_there() -> None:
    areas = {claim.area for claim in support.claims()}
    assert {"Gradients", "Hyperparameters", "Precision", "Shapes and modes", "Several processes", "Failure"} <= areas


@pytest.mark.parametrize("mark", ['support("area", "what")', 'support("area", "what", "somehow")', "support(1, 2, 3)"])
def test_a_wrong_mark_is_named(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(): ...\n")
    with pytest.raises(ValueError, match=r"test_one.py, line 3: support\(area, what, how\)"):
        support.claims(tmp_path)


def test_equal_lines_are_one() -> None:
    claims = [support.Claim("Area", "what", "replayed", "tests/a.py", f"test_{name}") for name in ("one", "other")]
    assert "| what | replayed | [one](../tests/a.py), [other](../tests/a.py) |" in support.document(claims)
