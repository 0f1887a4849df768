"""The cache of measured times on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from kitsune.config import cache_dir
from kitsune.timing.identity import identity

_FORMAT = 1
_MOST_ENTRIES = 20_000
_MOST_BYTES = 8 * 2**20
_MOST_FILES = 16
_MOST_US = 1e12  # beyond all that anybody waits for
_LOCK_SECONDS = 2.0


class CostCache:
    """Microseconds by signature, kept in one JSON file for each `identity`.

    Threads may share one. Processes may share the file: it is replaced as a whole, under a lock, and
    what others wrote meanwhile is kept. A file that is damaged, too large or about another identity
    counts as empty and is replaced by the next `save`. The oldest entries beyond 20,000 are dropped,
    and so are the files of a directory that have not been written for longest beyond 16.

    Args:
        directory: where the file lies; None: nothing is read or written.
        identity: what the times depend on beside the signature.
    """

    def __init__(self, directory: Path | None, identity: Mapping[str, str]) -> None:
        self._identity = dict(identity)
        text = json.dumps(self._identity, sort_keys=True)
        name = hashlib.sha256(f"{_FORMAT} {text}".encode()).hexdigest()[:24]
        self.path = None if directory is None else directory / f"costs-{name}.json"
        self._guard = threading.Lock()
        self._new: dict[str, float] = {}
        self._known = self._read()

    @classmethod
    def of(cls, device: torch.device) -> CostCache:
        """The cache of the user for `device`."""
        return cls(cache_dir(), identity(device))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        with self._guard:
            return not self._known

    def get(self, key: str) -> float | None:
        with self._guard:
            return self._known.get(key)

    def put(self, key: str, us: float) -> None:
        """Raises ValueError unless `us` is a finite number from 0 up."""
        if not _is_time(us):
            raise ValueError(f"the time of {key} is {us!r}; allowed: finite microseconds from 0 up")
        with self._guard:
            self._known[key] = self._new[key] = float(us)

    def save(self) -> str | None:
        """Writes what was put since the last time. None if all is well, else why it was not written."""
        with self._guard:
            if self.path is None or not self._new:
                return None
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with _locked(self.path.parent / "costs.lock"):
                    self._known = _newest({**self._read(), **self._new})
                    self._write(self.path)
                    _prune(self.path.parent)
            except OSError as error:
                return f"measured costs were not kept in {self.path}: {error}"
            self._new.clear()
            return None

    def _read(self) -> dict[str, float]:
        if self.path is None:
            return {}
        try:
            if self.path.stat().st_size > _MOST_BYTES:
                return {}
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return {}
        costs = content.get("us")
        if content.get("identity") != self._identity or not isinstance(costs, dict):
            return {}
        if content.get("seal") != _seal(costs) or not all(_is_time(us) for us in costs.values()):
            return {}
        return {key: float(us) for key, us in costs.items()}

    def _write(self, path: Path) -> None:
        seal = _seal(self._known)
        content = {"format": _FORMAT, "identity": self._identity, "seal": seal, "us": self._known}
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, allow_nan=False)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _seal(costs: Mapping[str, object]) -> str:
    """Tells a file that was written whole from one in which anything has changed since."""
    return hashlib.sha256(json.dumps(costs).encode()).hexdigest()


def _is_time(us: object) -> bool:
    return isinstance(us, (int, float)) and not isinstance(us, bool) and 0 <= us < _MOST_US


def _newest(costs: dict[str, float]) -> dict[str, float]:
    return dict(list(costs.items())[-_MOST_ENTRIES:])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of `path`; goes on without it after two seconds: then an entry may be lost, no file damaged."""
    with open(path, "a") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _lock(file) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield


def _lock(file: IO[str]) -> bool:
    """Whether the lock is held now. Without locks the file is still replaced as a whole, by whoever comes last."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _prune(directory: Path) -> None:
    """Removes what has not been written for longest: files of other identities, and what killed processes left."""
    for pattern in ("costs-*.json", "costs-*.tmp"):
        written = {path: _written_at(path) for path in directory.glob(pattern)}
        for path in sorted(written, key=lambda path: (-written[path], path))[_MOST_FILES:]:
            path.unlink(missing_ok=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
