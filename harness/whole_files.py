"""Files that are read whole, and written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_STANDARD_OUTPUT = 1


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part, even if the process is killed.

    Of a link the file at its end is written. What cannot be replaced without loss is written to instead, and may then
    get a part: a pipe, a device, and whatever this process's standard output is.

    Raises:
        OSError: the file cannot be written; the old content is still there.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is not None and _is_standard_output(found):
        _write_to(os.dup(_STANDARD_OUTPUT), content)
    elif found is not None and not stat.S_ISREG(found.st_mode):
        _write_to(os.open(path, os.O_WRONLY), content)
    else:
        _replace(Path(os.path.realpath(path)), content)


def read_whole(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, or is none: a pipe would keep its reader waiting.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def _is_standard_output(found: os.stat_result) -> bool:
    """Whether this process prints to it: a file that was replaced would be lost, with all that is printed."""
    try:
        return os.path.samestat(found, os.fstat(_STANDARD_OUTPUT))
    except OSError:
        return False


def _write_to(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(content)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
