"""Faster forms of programs are kept on disk, and nothing is read that was not written whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kitsune.engine.store import ProgramStore, key_of
from kitsune.engine.worker.messages import Faster
from kitsune.plan import Fusion

FOUND = (Faster(b"program", (), (Fusion("region", ("add", "mul"), 2.0, 1.0, None),)),)
KEY = key_of("graph", torch.device("cpu"), {})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    ProgramStore(tmp_path / "cache").write(KEY, FOUND)
    assert ProgramStore(tmp_path / "cache").read(KEY) == FOUND
    assert ProgramStore(tmp_path / "cache").read(key_of("another", torch.device("cpu"), {})) is None


def test_that_nothing_is_faster_is_kept_too(tmp_path: Path) -> None:
    ProgramStore(tmp_path).write(KEY, ())
    assert ProgramStore(tmp_path).read(KEY) == ()


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
def test_a_damaged_file_counts_as_absent(damage: str, tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    store.write(KEY, FOUND)
    (file,) = tmp_path.glob("program-*.bin")
    content = file.read_bytes()
    damaged = {"cut": content[:-1], "changed": content[:-1] + b"x", "empty": b"", "other": b"x" * 100}[damage]
    file.write_bytes(damaged)
    assert store.read(KEY) is None


def test_nothing_is_read_where_others_may_write(tmp_path: Path) -> None:
    ProgramStore(tmp_path / "cache").write(KEY, FOUND)
    (tmp_path / "cache").chmod(0o777)
    assert ProgramStore(tmp_path / "cache").read(KEY) is None


def test_without_a_directory_nothing_is_kept() -> None:
    store = ProgramStore(None)
    store.write(KEY, FOUND)
    assert store.read(KEY) is None


def test_keys_tell_apart_what_forms_depend_on() -> None:
    cpu = torch.device("cpu")
    keys = {
        KEY,
        key_of("graph", cpu, {"is_whole": True}),
        key_of("graph", cpu, {"is_whole": False}),
        key_of("g", cpu, {}),
    }
    assert len(keys) == 4


def test_what_was_chosen_is_read(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    assert store.read_choice(KEY) is None
    store.write_choice(KEY, {"form": "fused", "num_streams": 2})
    assert ProgramStore(tmp_path).read_choice(KEY) == {"form": "fused", "num_streams": 2}
    assert store.read(KEY) is None, "that is another file"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 10_000])
def test_a_damaged_choice_counts_as_absent(content: bytes, tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    store.write_choice(KEY, {})
    (file,) = tmp_path.glob("choice-*.json")
    file.write_bytes(content)
    assert store.read_choice(KEY) is None
