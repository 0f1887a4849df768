import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import change_index
from harness.change_index import ChangeIndex
from harness.changepoints import ChangePoint, find_changes


def stepped(seed: int) -> list[float]:
    rng = random.Random(seed)
    return [(1.0 if index < 20 else 1.1) * math.exp(rng.gauss(0, 0.01)) for index in range(40)]


SERIES = [stepped(seed) for seed in range(4)]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The series that are searched for changes, as they are."""
    found: list[list[float]] = []

    def find(values: Sequence[float]) -> tuple[ChangePoint, ...]:
        found.append(list(values))
        return find_changes(values)

    monkeypatch.setattr(change_index, "find_changes", find)
    return found


def keep(folder: Path, series: Sequence[Sequence[float]]) -> None:
    index = ChangeIndex(folder)
    index.search(series)
    index.save()


def test_series_that_were_searched_before_are_not_searched_again(tmp_path: Path, searched: list[list[float]]) -> None:
    keep(tmp_path, SERIES[:2])
    assert searched == SERIES[:2]
    searched.clear()

    index = ChangeIndex(tmp_path)
    index.search(SERIES[:3])
    assert searched == [SERIES[2]]
    assert [index.find(values) for values in SERIES] == [find_changes(values) for values in SERIES]
    assert [len(index.find(values)) for values in SERIES] == [1, 1, 1, 1]
    assert searched == SERIES[2:]
    index.save()
    searched.clear()
    assert ChangeIndex(tmp_path).find(SERIES[3]) == find_changes(SERIES[3])
    assert searched == []


def test_another_value_is_another_series(tmp_path: Path, searched: list[list[float]]) -> None:
    keep(tmp_path, SERIES[:1])
    changed = [*SERIES[0][:-1], SERIES[0][-1] * (1 + 1e-15)]
    searched.clear()
    index = ChangeIndex(tmp_path)
    index.find(changed)
    index.find(SERIES[0][:-1])
    assert searched == [changed, SERIES[0][:-1]]


def test_what_other_code_has_found_is_found_again(
    tmp_path: Path, searched: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, SERIES[:1])
    searched.clear()
    monkeypatch.setattr(change_index, "_code", lambda: "other")
    keep(tmp_path, SERIES[:1])
    assert searched == SERIES[:1]


@pytest.mark.parametrize("library", ["asv", "np"])
def test_what_other_versions_of_libraries_have_found_is_found_again(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = change_index._code()
    change_index._code.cache_clear()
    monkeypatch.setattr(getattr(change_index, library), "__version__", "0.0")
    try:
        assert change_index._code() != before
    finally:
        change_index._code.cache_clear()


def test_entries_that_were_not_asked_for_stay_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_index, "_MOST_UNUSED", 2)
    keep(tmp_path, SERIES[:3])
    keep(tmp_path, SERIES[3:])
    kept = ChangeIndex(tmp_path)._old
    assert [change_index._digest(values) in kept for values in SERIES] == [False, True, True, True]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\x00", b'{"code": "CODE", "changes": {"a": [[1]]}}'])
def test_a_damaged_index_is_made_again(tmp_path: Path, content: bytes) -> None:
    keep(tmp_path, SERIES[:1])
    path = tmp_path / ".index" / "changes.index"
    whole = path.read_bytes()
    code = json.loads(whole)["code"]
    path.write_bytes(content.replace(b"CODE", code.encode()))
    keep(tmp_path, SERIES[:1])
    assert path.read_bytes() == whole


def test_where_nothing_can_be_written_there_is_no_index(tmp_path: Path) -> None:
    (tmp_path / ".index").write_text("in the way")
    index = ChangeIndex(tmp_path)
    assert index.find(SERIES[0]) == find_changes(SERIES[0])
    index.save()
    assert (tmp_path / ".index").read_text() == "in the way"
