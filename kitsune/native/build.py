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
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from kitsune.config import cache_dir
from kitsune.native.facts import Fact, Facts, PythonFacts
from kitsune.native.plain_copy import PlainCopy, PythonPlainCopy

_NAME = "kitsune.native._native"
_FOLDER = Path(__file__).parent
_TIMEOUT_SECONDS = 60

_log = logging.getLogger("kitsune")


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
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        _log.info("what is written in C, too, runs in Python, since it could not be built: %s", error)
        return None


def load(directory: Path, compiler: Sequence[str]) -> ModuleType:
    """The module, built in `directory` unless this interpreter finds it there, whole and its user's own.

    Processes may race: files are replaced as a whole, and what was read half old, half new, is built again.

    Raises:
        OSError, ImportError, subprocess.SubprocessError: it cannot be built, kept or loaded.
    """
    source = b"\0".join(path.read_bytes() for path in _sources("*.[ch]"))
    parts = (sys.version, sysconfig.get_config_var("SOABI"), sysconfig.get_platform(), *compiler)
    key = hashlib.sha256("\n".join(map(str, parts)).encode() + source).hexdigest()[:24]
    library = directory / f"native-{key}.so"
    seal = library.with_suffix(".sha256")
    if not _is_sound(library, seal, key):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix="native-") as folder:
            built, mark = Path(folder) / library.name, Path(folder) / seal.name
            _compile(compiler, built)
            mark.write_text(_digest(built, key))
            os.replace(built, library)
            os.replace(mark, seal)
    spec = spec_from_file_location(_NAME, library, loader=ExtensionFileLoader(_NAME, str(library)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiler() -> Sequence[str] | None:
    """The C compiler that Triton would use; None where there is none, or an interpreter that is not foreseen."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    if sys.platform != "linux" or sys.implementation.name != "cpython" or not has_gil or not headers.exists():
        return None
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    return None if found is None else [found]


def _compile(compiler: Sequence[str], library: Path) -> None:
    options = ["-std=c99", "-O2", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    command = [*compiler, *options, *map(str, _sources("*.c")), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)
    library.chmod(0o700)  # nobody else may write what is loaded, whatever the umask is


def _sources(pattern: str) -> list[Path]:
    return sorted(_FOLDER.glob(pattern))


def _is_sound(library: Path, seal: Path, key: str) -> bool:
    """Whether `library` was built here as a whole, and nobody but the user could have written to it since."""
    try:
        status = library.stat()
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return is_own and seal.read_text() == _digest(library, key)
    except (OSError, UnicodeDecodeError):
        return False


def _digest(library: Path, key: str) -> str:
    return hashlib.sha256(key.encode() + library.read_bytes()).hexdigest()
