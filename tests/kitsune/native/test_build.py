"""Building, keeping and finding the C module."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

from kitsune import cache_files
from kitsune.native import build
from kitsune.native.facts import Facts, PythonFacts, item
from kitsune.native.plain_copy import PythonPlainCopy
from tests.kitsune.training import FORMS, compare

pytestmark = pytest.mark.skipif(build._compiler() is None, reason="there is no C compiler")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def real_compiler() -> list[str]:
    found = build._compiler()
    assert found is not None
    return list(found)


@pytest.fixture(scope="module")
def compiler(real_compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One that takes no time: it gives what was compiled once."""
    place = tmp_path_factory.mktemp("compiler")
    build.load(place, real_compiler)
    (library,) = place.glob("*.so")
    script = place / "compiler"
    script.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {library} "$last"\n')
    script.chmod(0o755)
    return [str(script)]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, and a module that has not been asked for yet."""
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path / "cache"))
    build._module.cache_clear()
    cache_files._tell.cache_clear()
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


def test_it_is_built_once(real_compiler: list[str], tmp_path: Path) -> None:
    assert works(build.load(tmp_path, real_compiler).Facts)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(path.suffix for path in files) == [".sha256", ".so"]
    assert works(build.load(tmp_path, real_compiler).Facts)
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
    with library.open("rb") as file:
        seal.write_text(build._digest(file.fileno(), "another"))


def link_to_another(library: Path, seal: Path) -> None:
    """What it leads to may change between two looks."""
    library.rename(library.with_name("moved"))
    library.symlink_to(library.with_name("moved"))


def second_name(library: Path, seal: Path) -> None:
    """Whoever has the other name may write to it."""
    library.with_name("moved").hardlink_to(library)


def pipe(library: Path, seal: Path) -> None:
    library.unlink()
    os.mkfifo(library)


def pipe_for_a_seal(library: Path, seal: Path) -> None:
    seal.unlink()
    os.mkfifo(seal)


def endless_library(library: Path, seal: Path) -> None:
    os.truncate(library, 2**40)


def endless_seal(library: Path, seal: Path) -> None:
    os.truncate(seal, 2**40)


SPOILERS = [
    spoil_library, spoil_seal, lose_seal, binary_seal, open_to_all, foreign_pair, link_to_another, second_name, pipe,
    pipe_for_a_seal, endless_library, endless_seal,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS)
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
    assert len(list(tmp_path.glob("native-*"))) == 2


@pytest.mark.parametrize("ending", [".so", ".sha256"])
def test_a_directory_in_their_place_is_borne(fresh: Path, ending: str, caplog: pytest.LogCaptureFixture) -> None:
    build.facts_type()
    (path,) = fresh.glob(f"*{ending}")
    path.unlink()
    (path / "part").mkdir(parents=True)
    build._module.cache_clear()
    caplog.set_level("INFO", logger="kitsune")
    assert build.facts_type() is PythonFacts
    assert str(path.name) in caplog.text
    assert not [folder for folder in fresh.iterdir() if len(folder.name) == len("native-") + 8]


def test_a_directory_that_others_can_change_is_not_used(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.mkdir()
    fresh.chmod(0o777)
    for _ in range(2):
        build._module.cache_clear()
        assert build.facts_type() is PythonFacts
        assert build.plain_copy_type() is PythonPlainCopy
    (record,) = caplog.records
    assert str(fresh) in record.getMessage()
    assert "chmod" in record.getMessage()
    assert not list(fresh.iterdir())


def test_two_libraries_are_not_taken_for_each_other(compiler: list[str], tmp_path: Path) -> None:
    """Though the linker knows them by the numbers of descriptors, and something has closed all these."""
    first = build.load(tmp_path, compiler)
    for descriptor in build._loaded:
        with suppress(OSError):
            os.close(descriptor)
    libraries = mapped_libraries(tmp_path)
    second = build.load(tmp_path, [*compiler, "-g"])
    assert len(mapped_libraries(tmp_path)) == len(libraries) + 1
    assert works(first.Facts)
    assert works(second.Facts)


def mapped_libraries(directory: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(directory) in line}


def test_what_is_not_used_any_more_makes_room(compiler: list[str], tmp_path: Path) -> None:
    for number in range(30):
        old = tmp_path / f"native-{number:024}.so"
        for path in (old, old.with_suffix(".sha256")):
            path.touch(0o700)
            aged(path, 1e5 + number)
    for name, seconds in (("native-abcdef12", 4000.0), ("native-abcdef13", 30.0), ("native-x.so.1234.tmp", 4000.0)):
        path = tmp_path / name
        path.touch() if "tmp" in name else path.mkdir()
        aged(path, seconds)
    aged(tmp_path / f"native-{0:024}.so", 1e7)
    (tmp_path / "other.so").touch()
    build.load(tmp_path, compiler)
    assert len(list(tmp_path.glob("native-*.so"))) == len(list(tmp_path.glob("native-*.sha256"))) == 16
    assert not (tmp_path / f"native-{0:024}.so").exists(), "it is the oldest"
    assert (tmp_path / f"native-{3:024}.so").exists()
    left = {path.name for path in tmp_path.iterdir() if path.suffix not in (".so", ".sha256")}
    assert left == {"native-abcdef13"}, "a build may be at work there"
    assert (tmp_path / "other.so").exists()


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_is_in_use_stays(compiler: list[str], tmp_path: Path) -> None:
    build.load(tmp_path, compiler)
    for path in tmp_path.iterdir():
        aged(path, 80 * 86_400.0)
    build.load(tmp_path, compiler)
    assert all(time.time() - path.stat().st_mtime < 86_400.0 for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        aged(path, 100 * 86_400.0)
    build.load(tmp_path, [*compiler, "-g0"])
    assert len(list(tmp_path.iterdir())) == 2, "the other one was not used for a hundred days"


def test_a_build_that_takes_long_is_not_swept_away(compiler: list[str], tmp_path: Path) -> None:
    """By another process, in whose eyes it is old: a machine may have slept meanwhile."""
    slow = tmp_path / "slow"
    marks = tmp_path / "begun", tmp_path / "goes-on"
    script = f'touch {marks[0]}\nwhile [ ! -e {marks[1]} ]; do sleep 0.05; done\nexec {" ".join(compiler)} "$@"\n'
    slow.write_text(f"#!/bin/sh\n{script}")
    slow.chmod(0o755)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build.load, cache, [str(slow)])
        while not marks[0].exists():
            time.sleep(0.01)
        (folder,) = cache.glob("native-????????")
        aged(folder, 1e6)
        build.load(cache, compiler)
        assert folder.exists()
        marks[1].touch()
        assert works(building.result().Facts)
    assert not folder.exists()


def test_what_a_killed_build_has_left_is_swept_away(compiler: list[str], tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nkill -9 $PPID\n")
    script.chmod(0o755)
    process = get_context("fork").Process(target=build.load, args=(tmp_path / "cache", [str(script)]))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (folder,) = (tmp_path / "cache").iterdir()
    build.load(tmp_path / "cache", compiler)
    assert folder.exists(), "it is young"
    aged(folder, 4000.0)
    build.load(tmp_path / "cache", compiler)
    assert not folder.exists()


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


FAILING = ["false", "/nowhere/cc", "no-such-compiler -O2", "/", "true", "cat", "\udcff"]


@pytest.mark.parametrize("command", FAILING)
def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CC", command)
    assert build.facts_type() is PythonFacts
    assert not list(fresh.iterdir())


@pytest.mark.parametrize("command", ["gcc '", '"', "gcc \\"])
def test_a_compiler_that_is_no_command(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kitsune")
    monkeypatch.setenv("CC", command)
    assert build.facts_type() is PythonFacts
    assert "CC=" in caplog.text
    assert not fresh.exists()


@pytest.mark.parametrize("command", ["", " ", "\t"])
def test_an_empty_name_of_a_compiler_is_none(fresh: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CC", command)
    assert build.facts_type() is not PythonFacts


def test_a_compiler_is_found_from_the_working_directory(
    real_compiler: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text(f'#!/bin/sh\nexec {" ".join(real_compiler)} "$@"\n')
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./mine")
    assert build.facts_type() is not PythonFacts


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_whatever_the_umask_is_others_cannot_write(real_compiler: list[str], tmp_path: Path, mask: int) -> None:
    earlier = os.umask(mask)
    try:
        build.load(tmp_path / "a" / "cache", real_compiler)
    finally:
        os.umask(earlier)
    made = [tmp_path / "a", tmp_path / "a" / "cache", *(tmp_path / "a" / "cache").iterdir()]
    assert len(made) == 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)


@pytest.mark.parametrize("command", ["gcc '", "no-such-compiler", ""])
def test_training_goes_on_without(fresh: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CC", command)
    for form in FORMS:
        assert compare(form).status().mode == "replay"


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
