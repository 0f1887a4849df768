import os
from pathlib import Path

import pytest

import harness.catalogue
import harness.names
from harness.catalogue import Catalogue, code_digest, stamp


def test_entries_come_back_for_the_same_stamp_and_code(tmp_path: Path) -> None:
    path = tmp_path / "new" / "index.json"
    catalogue = Catalogue(path, "code")
    catalogue.add("a", (1, 2, 3), {"runs": [1]})
    catalogue.save()

    again = Catalogue(path, "code")
    assert again.find("a", (1, 2, 3)) == {"runs": [1]}
    assert again.find("a", (1, 2, 4)) is None
    assert again.find("b", (1, 2, 3)) is None
    assert Catalogue(path, "other code").find("a", (1, 2, 3)) is None


def test_what_is_not_asked_for_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    catalogue = Catalogue(path, "code")
    catalogue.add("a", (1, 2, 3), 1)
    catalogue.add("b", (1, 2, 3), 2)
    catalogue.save()
    second = Catalogue(path, "code")
    second.find("b", (1, 2, 3))
    second.save()
    assert Catalogue(path, "code").find("a", (1, 2, 3)) is None
    assert Catalogue(path, "code").find("b", (1, 2, 3)) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"code": "code", "files": {"a": 1}}', b"\xff\x00"])
def test_a_damaged_index_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(content)
    assert Catalogue(path, "code").find("a", (1, 2, 3)) is None


def test_where_nothing_can_be_written_there_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    catalogue = Catalogue(tmp_path / "file" / "index.json", "code")
    catalogue.add("a", (1, 2, 3), 1)
    catalogue.save()
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_file_of_the_same_size_and_time_has_another_stamp_when_it_was_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("one")
    other.write_text("two")
    before = stamp(path)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert stamp(path)[:2] == before[:2]
    assert stamp(path) != before


def test_a_digest_is_that_of_the_source() -> None:
    assert code_digest([harness.names]) == code_digest([harness.names])
    assert code_digest([harness.names]) != code_digest([harness.catalogue])
