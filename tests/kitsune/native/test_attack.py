"""Another user who wants code of theirs to be run by a training: a watcher that puts its own library wherever one is
built, kept or looked for.

As root there is really a second user, as a rule. Else the watcher is the same user, and the training takes itself for
another one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from kitsune import cache_files
from kitsune.cache_files import CacheDirectory
from kitsune.native import build
from tests.kitsune.second_user import HAS_SECOND_USER, OTHER

pytestmark = pytest.mark.skipif(build._compiler() is None, reason="there is no C compiler")

ATTACKER, USER = (OTHER, 1) if HAS_SECOND_USER else (os.geteuid(), os.geteuid())
PAUSE = 0.005  # before what was kept is loaded, so that the watcher gets its turn where there are few processors

Load = Callable[[Path, Sequence[str]], object]
Layout = Callable[[Path, int], None]
"""Makes the place in which the cache is, for a training of that user."""

PAYLOAD = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) { close(open(MARK, O_CREAT | O_WRONLY, 0666)); }
"""

WATCHER = """
import hashlib, os, re, sys, time
place, payload, attacker = sys.argv[1], sys.argv[2], int(sys.argv[3])
if os.geteuid() != attacker:
    os.setgroups([])
    os.setgid(attacker)
    os.setuid(attacker)
os.umask(0)
data = open(payload, "rb").read()

def put(path, content):
    try:
        with open(path + ".mine", "wb") as file:
            file.write(content)
        os.chmod(path + ".mine", 0o755)
        os.rename(path + ".mine", path)
    except OSError:
        pass

def exchange(folder):
    try:
        os.rename(folder, folder + ".theirs")
        os.mkdir(folder, 0o777)
    except OSError:
        pass

def plant(folder, name):
    found = re.match(r"native-([0-9a-f]{24})[.](so|sha256)$", name)
    if found:
        put(f"{folder}/native-{found[1]}.so", data)
        put(f"{folder}/native-{found[1]}.sha256", hashlib.sha256(found[1].encode() + data).hexdigest().encode())

def names(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []

cache, turn = place + "/cache", 0
print("ready", flush=True)
while True:
    turn += 1
    way = int(time.monotonic() * 8) % 3
    for name in names(cache):
        plant(cache, name)
        if re.match(r"native-\\w{8}$", name):
            if way == 1:
                exchange(f"{cache}/{name}")
            if way:
                for part in names(f"{cache}/{name}"):
                    plant(f"{cache}/{name}", part)
    if turn % 5 == 0 and not os.path.islink(cache):
        exchange(cache)
    if os.path.islink(cache) or not os.path.lexists(cache):
        try:
            os.symlink(place + "/mine" if turn % 2 else place + "/theirs", cache + ".link")
            os.rename(cache + ".link", cache)
        except OSError:
            pass
"""
"""What it does takes turns: libraries that are kept, those that are being built, and the folders of these."""


class Tools(NamedTuple):
    """What is built once, in a place that everybody can reach.

    Attributes:
        place: where it is.
        payload: the library that the watcher puts everywhere; it makes a mark when it is loaded.
        compiler: it takes a moment, and gives what `build` would have compiled.
        mark: see `payload`.
    """

    place: Path
    payload: Path
    compiler: Path
    mark: Path


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    tools = Tools(place, place / "payload.so", place / "compiler", place / "marks" / "mark")
    make(tools.mark.parent, 0o777, os.geteuid())
    (place / "payload.c").write_text(PAYLOAD)
    given = build._compiler()
    assert given is not None
    command = [*given, "-shared", "-fPIC", f'-DMARK="{tools.mark}"', str(place / "payload.c"), "-o", str(tools.payload)]
    subprocess.run(command, check=True)
    build.load(place / "built", given)
    (library,) = (place / "built").glob("*.so")
    shutil.copy(library, place / "library.so")
    tools.compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {place / "library.so"} "$last"\nsleep 0.01\n')
    for path in (tools.payload, place / "library.so", tools.compiler):
        path.chmod(0o755)
    yield tools
    subprocess.run(["rm", "-rf", str(place)], check=False)


class Attack:
    """A watcher, and a training of the user `uid` that builds and loads again and again, each time another library.

    Attributes:
        where: the cache is in this place.
        tries: how many libraries there were.
    """

    def __init__(self, tools: Tools, uid: int) -> None:
        self.where = make(Path(tempfile.mkdtemp(dir=tools.place)), 0o755, uid)
        self.tries = get_context("fork").Value("i", 0)
        self._tools, self._uid = tools, uid
        tools.mark.unlink(missing_ok=True)

    def succeeds(self, load: Load, seconds: float = 1.0) -> bool:
        """Whether the training runs the watcher's code within so many seconds."""
        script = [sys.executable, "-S", "-c", WATCHER, str(self.where), str(self._tools.payload), str(ATTACKER)]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "ready\n"
            training = get_context("fork").Process(target=self._train, args=(load, seconds))
            training.start()
            training.join(seconds + 60.0)
            training.kill()
            watcher.kill()
        assert training.exitcode == 0
        return self._tools.mark.exists()

    def _train(self, load: Load, seconds: float) -> None:
        if HAS_SECOND_USER and self._uid:
            os.setgroups([])
            os.setgid(self._uid)
            os.setuid(self._uid)
        deadline = time.monotonic() + seconds
        while not self._tools.mark.exists() and (time.monotonic() < deadline or self.tries.value < 5):
            self.tries.value += 1
            clear(self.where / "cache")
            for _ in range(2):  # it is built, and then found
                with suppress(OSError, ImportError, subprocess.SubprocessError):
                    load(self.where / "cache", [str(self._tools.compiler), f"-DTRY={self.tries.value}"])
        os._exit(0)


def clear(folder: Path) -> None:
    """Removes what the last try has left there, and the watcher."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@pytest.fixture(params=[0, USER] if HAS_SECOND_USER else [USER], ids=lambda uid: "root" if uid == 0 else "user")
def uid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whose the training is."""
    if not HAS_SECOND_USER:
        monkeypatch.setattr(os, "geteuid", lambda: USER + 1)
    value: int = request.param
    return value


def make(path: Path, mode: int, uid: int) -> Path:
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    if HAS_SECOND_USER:
        os.chown(path, uid, uid)
    return path


def of_the_attacker(where: Path, uid: int) -> None:
    make(where / "cache", 0o777, ATTACKER)


def open_to_all(where: Path, uid: int) -> None:
    make(where / "cache", 0o777, uid)


def open_above(where: Path, uid: int) -> None:
    make(where / "cache", 0o700, uid)
    make(where, 0o777, uid)


def below_the_attackers(where: Path, uid: int) -> None:
    make(where / "cache", 0o700, uid)
    make(where, 0o755, ATTACKER)


def behind_a_link(where: Path, uid: int) -> None:
    make(where / "theirs", 0o700, uid)
    make(where / "mine", 0o777, ATTACKER)
    make(where, 0o1777, uid)


def not_there_yet(where: Path, uid: int) -> None:
    """As in `/tmp`, where whoever is first makes it."""
    make(where, 0o1777, 0)


LAYOUTS = [of_the_attacker, open_to_all, open_above, below_the_attackers, behind_a_link, not_there_yet]


@pytest.fixture
def attack(tools: Tools, uid: int, monkeypatch: pytest.MonkeyPatch) -> Attack:
    load = build._import
    monkeypatch.setattr(build, "_import", lambda library: (time.sleep(PAUSE), load(library)))
    return Attack(tools, uid)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_nobody_elses_code_is_run(attack: Attack, uid: int, layout: Layout) -> None:
    layout(attack.where, uid)
    assert not attack.succeeds(build.load)
    assert attack.tries.value >= 5


@pytest.mark.skipif(not HAS_SECOND_USER, reason="needs a second user, whose files are told from one's own")
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.__name__)
def test_nor_would_it_be_in_a_directory_that_is_open(
    attack: Attack, uid: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded was opened once, is one's own, and is what the compiler wrote."""
    monkeypatch.setattr(cache_files, "_check_own", lambda *_: None)
    monkeypatch.setattr(cache_files, "_check_above", lambda *_: None)
    layout(attack.where, uid)
    assert not attack.succeeds(build.load)
    assert attack.tries.value >= 5


def test_the_attack_succeeds_without_the_rule(attack: Attack, uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((cache_files, "_check_own"), (cache_files, "_check_above"), (CacheDirectory, "_check")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    of_the_attacker(attack.where, uid)
    assert attack.succeeds(build.load, seconds=60.0)


def load_by_name(directory: Path, compiler: Sequence[str]) -> None:
    """What is not to be done: each time the file is what has the name by then."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"native-{abs(hash(tuple(compiler))) % 16**24:024x}.so"
    with tempfile.TemporaryDirectory(dir=directory, prefix="native-") as folder:
        subprocess.run([*compiler, "-o", f"{folder}/{name}"], check=True, capture_output=True)
        os.chmod(f"{folder}/{name}", 0o700)
        os.replace(f"{folder}/{name}", directory / name)
    time.sleep(PAUSE)
    loader = ExtensionFileLoader(build._NAME, str(directory / name))
    spec = spec_from_file_location(build._NAME, directory / name, loader=loader)
    assert spec is not None
    module_from_spec(spec)


def test_the_attack_succeeds_where_names_are_looked_up(attack: Attack, uid: int) -> None:
    of_the_attacker(attack.where, uid)
    assert attack.succeeds(load_by_name, seconds=60.0)
