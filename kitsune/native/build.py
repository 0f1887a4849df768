"""Builds the module in C once for each user and interpreter, and loads it."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from kitsune.cache_files import CacheDirectory, UnsafeCacheError, content
from kitsune.config import cache_dir
from kitsune.native.facts import Fact, Facts, PythonFacts
from kitsune.native.plain_copy import PlainCopy, PythonPlainCopy

_NAME = "kitsune.native._native"
_FOLDER = Path(__file__).parent
_TIMEOUT_SECONDS = 60
_DAY_SECONDS = 86_400.0

_MOST_KEPT = 16
_LIBRARY_SECONDS = 90 * _DAY_SECONDS
_LEFTOVER_SECONDS = 3600.0
"""No build takes so long: what is older is of a process that was killed."""

_FOLDERS = "native-"  # and eight characters
_KEPT_SECONDS = {
    "native-*.so": _LIBRARY_SECONDS,
    "native-*.sha256": _LIBRARY_SECONDS,
    "native-*.tmp": _LEFTOVER_SECONDS,
    f"{_FOLDERS}????????": _LEFTOVER_SECONDS,
}
_DIGEST_BYTES = 64
_MOST_BYTES = 64 * 2**20

_log = logging.getLogger("kitsune")

_loaded: set[int] = set()
"""The descriptors of libraries that were loaded; they stay open."""


def facts_type() -> Callable[[Sequence[Fact]], Facts]:
    """What checks facts fastest here: the type in C if it can be built or has been, else `PythonFacts`.

    The first call may take a second to build it.
    """
    module = _module()
    return PythonFacts if module is None else module.Facts


def plain_copy_type() -> Callable[[Any, int, Callable[[], int | None], Callable[[], int]], PlainCopy]:
    """As `facts_type`, what copies the bytes of tensors; see `PythonPlainCopy` for the arguments."""
    module = _module()
    return PythonPlainCopy if module is None else module.PlainCopy


@cache
def _module() -> Any:
    directory, compiler = cache_dir(), _compiler()
    if directory is None or compiler is None:
        return None
    try:
        return load(directory, compiler)
    except UnsafeCacheError:  # which has told the user
        return None
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        _log.info("what is written in C, too, runs in Python, since it could not be built: %s", error)
        return None


def load(directory: Path, compiler: Sequence[str]) -> ModuleType:
    """The module, built in `directory` unless this interpreter finds it there, whole and its user's own.

    The library is opened once: what is loaded is what was checked, whatever has its name by then. Processes may race:
    files are replaced as a whole, and what was read half old, half new, is built again. Libraries that were not used
    for long are removed, and what killed builds have left.

    Raises:
        UnsafeCacheError: others could change what is in `directory`.
        OSError, ImportError, subprocess.SubprocessError: it cannot be built, kept or loaded.
    """
    source = b"\0".join(path.read_bytes() for path in _sources("*.[ch]"))
    parts = (sys.version, sysconfig.get_config_var("SOABI"), sysconfig.get_platform(), *compiler)
    key = hashlib.sha256(os.fsencode("\n".join(map(str, parts))) + source).hexdigest()[:24]
    with CacheDirectory.open(directory, create=True) as kept:
        library = _found(kept, key)
        if library is None:
            library = _built(kept, key, compiler)
        for pattern, seconds in _KEPT_SECONDS.items():
            kept.sweep(pattern, most=_MOST_KEPT, most_seconds=seconds)
    return _import(library)


def _compiler() -> Sequence[str] | None:
    """The C compiler that Triton would use; None where there is none, or an interpreter that is not foreseen."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    if sys.platform != "linux" or sys.implementation.name != "cpython" or not has_gil or not headers.exists():
        return None
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        _log.info("what is written in C, too, runs in Python: CC=%r is no command: %s", os.environ["CC"], error)
        return None
    if given:
        return given
    found = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    return None if found is None else [found]


def _found(kept: CacheDirectory, key: str) -> int | None:
    """A descriptor of the library, if it was built here as a whole."""
    names = _names(key)
    try:
        library = kept.open_file(names[0])
    except OSError:
        return None
    try:
        is_sound = kept.read(names[1], _DIGEST_BYTES).decode() == _digest(library, key)
        is_stale = time.time() - os.fstat(library).st_mtime > _DAY_SECONDS
    except (OSError, UnicodeDecodeError):
        is_sound = False
    if not is_sound:
        os.close(library)
        return None
    if is_stale:
        for name in names:
            kept.touch(name)
    return library


def _built(kept: CacheDirectory, key: str, compiler: Sequence[str]) -> int:
    """A descriptor of the library, which is built in a folder of its own and then kept.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built or kept.
    """
    name, seal = _names(key)
    with kept.folder(_FOLDERS) as folder:
        _compile(compiler, folder, name)
        library = folder.open_file(name)
        try:
            kept.write(seal, _digest(library, key).encode())
            kept.take(name, folder, name)
        except BaseException:
            os.close(library)
            raise
    return library


def _compile(compiler: Sequence[str], folder: CacheDirectory, name: str) -> None:
    """Compiles in `folder`, where what compilers keep meanwhile is out of reach for others, too."""
    command = [*compiler, "-std=c99", "-O2", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    command += [*map(str, _sources("*.c")), "-o", name]
    if os.path.dirname(command[0]):
        command[0] = os.path.abspath(command[0])
    subprocess.run(
        command,
        cwd=f"/proc/self/fd/{folder.descriptor}",
        env={**os.environ, "TMPDIR": "."},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_TIMEOUT_SECONDS,
        umask=0o077,  # nobody else may write what is loaded
    )


def _import(library: int) -> ModuleType:
    """Loads what a descriptor stands for, which stays open.

    The dynamic linker takes a path that it has seen for the library that it found there. So no number may come twice.
    """
    while library in _loaded:  # something has closed it
        library = os.dup(library)
    _loaded.add(library)
    path = f"/proc/self/fd/{library}"
    spec = spec_from_file_location(_NAME, path, loader=ExtensionFileLoader(_NAME, path))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _names(key: str) -> tuple[str, str]:
    """Those of the library and of its seal."""
    return f"native-{key}.so", f"native-{key}.sha256"


def _sources(pattern: str) -> list[Path]:
    return sorted(_FOLDER.glob(pattern))


def _digest(library: int, key: str) -> str:
    """What the seal says of the library; `key` tells it from one that was sealed under another name.

    Raises:
        OSError: it cannot be read, or is no library of ours: it is too large.
    """
    return hashlib.sha256(key.encode() + content(library, _MOST_BYTES)).hexdigest()
