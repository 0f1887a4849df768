"""What is known of files without reading them again: indexes of results, which may be thrown away at any time.

They lie in a hidden folder beside the results they are made of, where neither asv nor git looks at them. An entry
counts only for a file that has not changed since and for the code that made it; all else is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from harness.whole_files import write_whole

FOLDER = ".index"
"""The folder of indexes within that of a machine's results."""

Stamp = tuple[int, int, int]
"""Size in bytes, and the nanoseconds at which content and file were last changed: another stamp, another content."""


def stamp(path: Path) -> Stamp:
    """The stamp of a file.

    Raises:
        OSError: there is no such file, or it cannot be asked.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def code_digest(modules: Iterable[ModuleType]) -> str:
    """A digest of the source code of modules: what they made is out of date once they change."""
    digest = hashlib.sha256()
    for module in modules:
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()


class Catalogue:
    """Entries about files, by their names, in one JSON file.

    Args:
        path: the catalogue's file; a missing or unreadable one is an empty catalogue.
        code: the digest of the code that makes the entries.
    """

    def __init__(self, path: Path, code: str) -> None:
        self._path = path
        self._code = code
        self._old = self._read()
        self._new: dict[str, tuple[Stamp, object]] = {}

    def find(self, name: str, at: Stamp) -> object | None:
        """The entry of a file that has this stamp; None where there is none."""
        known, entry = self._old.get(name, (None, None))
        if known != at or entry is None:
            return None
        self._new[name] = (at, entry)
        return entry

    def add(self, name: str, at: Stamp, entry: object) -> None:
        """Keep an entry (what JSON can hold, not None) about a file with this stamp."""
        self._new[name] = (at, entry)

    def save(self) -> None:
        """Write what was found or added, and forget all else; where that is impossible, it is made again next time."""
        if self._new == self._old:
            return
        files = {name: {"stamp": at, "entry": entry} for name, (at, entry) in sorted(self._new.items())}
        keep(self._path, json.dumps({"code": self._code, "files": files}).encode())

    def _read(self) -> dict[str, tuple[Stamp, object]]:
        try:
            content = json.loads(self._path.read_bytes())
            if content["code"] != self._code:
                return {}
            return {name: (_stamp_of(file["stamp"]), file["entry"]) for name, file in content["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # whatever it is, it is no catalogue, and results do not depend on it


def keep(path: Path, content: bytes) -> None:
    """Write an index, whole. Where that is impossible there is none: it only saves time."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, content)


def _stamp_of(values: list[int]) -> Stamp:
    size, content, file = values
    return size, content, file
