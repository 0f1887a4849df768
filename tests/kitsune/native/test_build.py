"""Building, keeping and finding the C module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kitsune.native import build
from kitsune.native.facts import Facts, PythonFacts, item
from kitsune.native.plain_copy import PythonPlainCopy

pytestmark = pytest.mark.skipif(build._compiler() is None, reason="there is no C compiler")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def compiler() -> list[str]:
    found = build._compiler()
    assert found is not None
    return list(found)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, and a module that has not been asked for yet."""
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "cache"))
    build._module.cache_clear()
    yield tmp_path / "cache"
    build._module.cache_clear()


def check(facts: Facts, holder: dict[str, object]) -> None:
    assert facts.hold() is True
    holder["part"] = object()
    assert facts.hold() is False


def works(checker: object) -> bool:
    holder: dict[str, object] = {"part": object()}
    assert callable(checker)
    check(checker([item(holder, "part")]), holder)
    return True


def test_it_is_built_once(compiler: list[str], tmp_path: Path) -> None:
    assert works(build.load(tmp_path, compiler).Facts)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(path.suffix for path in files) == [".sha256", ".so"]
    assert works(build.load(tmp_path, compiler).Facts)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


def spoil_library(library: Path, _seal: Path) -> None:
    data = library.read_bytes()
    library.write_bytes(data[: len(data) // 2])


def spoil_seal(_library: Path, seal: Path) -> None:
    seal.write_text("0" * 64)


def lose_seal(_library: Path, seal: Path) -> None:
    seal.unlink()


def binary_seal(_library: Path, seal: Path) -> None:
    seal.write_bytes(b"\xff\xfe")


def open_to_all(library: Path, _seal: Path) -> None:
    library.chmod(0o777)


def foreign_pair(library: Path, seal: Path) -> None:
    """A whole library, sealed under another name."""
    shutil.copy("/bin/true", library)
    seal.write_text(build._digest(library, "another"))


@pytest.mark.parametrize("spoil", [spoil_library, spoil_seal, lose_seal, binary_seal, open_to_all, foreign_pair])
def test_what_cannot_be_trusted_is_built_again(compiler: list[str], tmp_path: Path, spoil: object) -> None:
    build.load(tmp_path, compiler)
    (library,), (seal,) = tmp_path.glob("*.so"), tmp_path.glob("*.sha256")
    before = library.read_bytes()
    inode = library.stat().st_ino
    # A library in use must not be written to, so that a copy takes its place first.
    shutil.copy(library, tmp_path / "copy")
    os.replace(tmp_path / "copy", library)
    assert callable(spoil)
    spoil(library, seal)
    assert works(build.load(tmp_path, compiler).Facts)
    assert len(library.read_bytes()) == len(before)
    assert library.stat().st_ino != inode
    assert library.stat().st_mode & 0o022 == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_the_name_depends_on_the_compiler_and_the_interpreter(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load(tmp_path, compiler)
    build.load(tmp_path, [*compiler, "-g0"])
    monkeypatch.setattr(sys, "version", "another")
    build.load(tmp_path, compiler)
    assert len(list(tmp_path.glob("*.so"))) == 3


def test_the_compiled_types_are_found(fresh: Path) -> None:
    checker = build.facts_type()
    assert checker is not PythonFacts
    assert checker is build.facts_type()
    assert works(checker)
    assert build.plain_copy_type() is not PythonPlainCopy
    assert len(list(fresh.iterdir())) == 2


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    assert build.facts_type() is PythonFacts
    assert build.plain_copy_type() is PythonPlainCopy


@pytest.mark.parametrize("command", ["false", "/nowhere/cc", "true"])
def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CC", command)
    assert build.facts_type() is PythonFacts
    assert not list(fresh.iterdir())


def test_a_directory_that_cannot_be_made(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert build.facts_type() is PythonFacts
    monkeypatch.setattr(build, "cache_dir", lambda: None)
    build._module.cache_clear()
    assert build.facts_type() is PythonFacts


def test_an_interpreter_without_a_lock(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"Py_GIL_DISABLED": 1}
    monkeypatch.setattr(build.sysconfig, "get_config_var", variables.get)
    assert build.facts_type() is PythonFacts


@pytest.mark.slow
def test_processes_that_race(tmp_path: Path) -> None:
    program = (
        "from kitsune.native.build import facts_type; from kitsune.native.facts import item; "
        "print(facts_type().__name__, facts_type()([item({1: 2}, 1)]).hold())"
    )
    environment = {**os.environ, "KITSUNE_CACHE_DIR": str(tmp_path)}

    def run(_: int) -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == ["Facts True"] * 3
    assert len(list(tmp_path.iterdir())) == 2
