"""The cache of measured times on disk."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from kitsune.cache_files import CacheDirectory
from kitsune.config import cache_dir
from kitsune.timing.identity import identity

_FORMAT = 1
_MOST_ENTRIES = 20_000
_MOST_BYTES = 8 * 2**20
_MOST_FILES = 16
_MOST_US = 1e12  # beyond all that anybody waits for
_LOCK_SECONDS = 2.0
_LEFTOVER_SECONDS = 3600.0  # what a killed process has left

_shared: dict[tuple[str, str], CostCache] = {}
"""By directory and identity."""


class CostCache:
    """Microseconds by signature, kept in one JSON file for each `identity`.

    Threads may share one. Processes may share the file: it is replaced as a whole, under a lock, and
    what others wrote meanwhile is kept. A file that is damaged, too large, somebody else's or about another
    identity counts as empty and is replaced by the next `save`. The oldest entries beyond 20,000 are dropped,
    and so are the files of a directory that have not been written for longest beyond 16. Nothing is read
    or written where others can change the directory (see `cache_files`).

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
        self._written = self._time_of_file()
        self._known = self._read()

    @classmethod
    def of(cls, device: torch.device) -> CostCache:
        """The cache of the user for `device`: one for all of this process, with what others have kept by now."""
        facts = identity(device)
        key = str(cache_dir()), json.dumps(facts, sort_keys=True)
        if key not in _shared:
            _shared[key] = cls(cache_dir(), facts)
        else:
            _shared[key]._look_again()
        return _shared[key]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        with self._guard:
            return not self._known

    def entries(self) -> dict[str, float]:
        """All that is known."""
        with self._guard:
            return dict(self._known)

    def adopt(self, costs: Mapping[str, float]) -> None:
        """Takes what another process has measured, and keeps it."""
        for key, us in costs.items():
            if self.get(key) != us:
                self.put(key, us)

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
                with CacheDirectory.open(self.path.parent, create=True) as directory:
                    self._save(directory, self.path.name)
            except OSError as error:
                return f"measured costs were not kept in {self.path}: {error}"
            self._new.clear()
            return None

    def _look_again(self) -> None:
        """Reads the file once more if it was written since."""
        with self._guard:
            written = self._time_of_file()
            if written != self._written:
                self._written = written
                self._known = {**self._read(), **self._new}

    def _time_of_file(self) -> int | None:
        try:
            return None if self.path is None else self.path.stat().st_mtime_ns
        except OSError:
            return None

    def _save(self, directory: CacheDirectory, name: str) -> None:
        """The lock may be held for long: then an entry may be lost, but no file is damaged."""
        with directory.locked("costs.lock", _LOCK_SECONDS):
            self._known = _newest({**self._read_from(directory, name), **self._new})
            content = {"format": _FORMAT, "identity": self._identity, "seal": _seal(self._known), "us": self._known}
            directory.write(name, json.dumps(content, allow_nan=False).encode())
            directory.sweep("costs-*.json", most=_MOST_FILES)
            directory.sweep("costs-*.tmp", most=_MOST_FILES, most_seconds=_LEFTOVER_SECONDS)

    def _read(self) -> dict[str, float]:
        if self.path is None:
            return {}
        try:
            with CacheDirectory.open(self.path.parent) as directory:
                return self._read_from(directory, self.path.name)
        except OSError:
            return {}

    def _read_from(self, directory: CacheDirectory, name: str) -> dict[str, float]:
        try:
            content = json.loads(directory.read(name, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return {}
        costs = content.get("us")
        if content.get("identity") != self._identity or not isinstance(costs, dict):
            return {}
        if not all(map(_is_time, costs.values())) or content.get("seal") != _seal(costs):
            return {}
        return {key: float(us) for key, us in costs.items()}


def _seal(costs: Mapping[str, object]) -> str:
    """Tells a file that was written whole from one in which anything has changed since."""
    return hashlib.sha256(json.dumps(costs).encode()).hexdigest()


def _is_time(us: object) -> bool:
    return isinstance(us, (int, float)) and not isinstance(us, bool) and 0 <= us < _MOST_US


def _newest(costs: dict[str, float]) -> dict[str, float]:
    return dict(list(costs.items())[-_MOST_ENTRIES:])
