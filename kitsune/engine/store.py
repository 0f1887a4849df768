"""What was found for a program, and which of it was chosen, on disk: the next run starts with that."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kitsune.cache_files import CacheDirectory
from kitsune.config import cache_dir
from kitsune.engine.worker.messages import Faster
from kitsune.timing.identity import identity

_MOST_FILES = 256
_MOST_BYTES = 256 * 2**20
_LEFTOVER_SECONDS = 3600.0  # what a killed process has left
_SEAL_BYTES = 32
_MOST_CHOICE_BYTES = 4096

_log = logging.getLogger("kitsune")


class ProgramStore:
    """The faster forms of programs, a file for each program, in the user's cache.

    A file that is damaged, too large, or somebody else's counts as absent. Nothing is read or written where others can
    change the directory, for code is loaded from it (see `kitsune.cache_files`).

    Args:
        directory: None: nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def read_choice(self, key: str) -> dict[str, Any] | None:
        """What was chosen for the program with a `key_of`; None where that is not known."""
        content = self._read(_choice_name(key), _MOST_CHOICE_BYTES)
        if content is None:
            return None
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def write_choice(self, key: str, choice: Mapping[str, Any]) -> None:
        """Keeps what was chosen, as JSON."""
        self._write(_choice_name(key), json.dumps(choice).encode(), "choice-*.json")

    @classmethod
    def of_user(cls) -> ProgramStore:
        """The one in the user's cache."""
        return cls(cache_dir())

    def read(self, key: str) -> tuple[Faster, ...] | None:
        """What was kept for the program with a `key_of`; None where nothing is there."""
        content = self._read(_name(key), _MOST_BYTES)
        if content is None:
            return None
        seal, body = content[:_SEAL_BYTES], content[_SEAL_BYTES:]
        if hashlib.sha256(body).digest() != seal:
            return None
        with suppress(Exception):  # whatever it is, it is of no use
            found: tuple[Faster, ...] = pickle.loads(body)
            return found
        return None

    def write(self, key: str, programs: Sequence[Faster]) -> None:
        """Keeps what was found; says in the log why not, if it cannot."""
        body = pickle.dumps(tuple(programs), pickle.HIGHEST_PROTOCOL)
        if len(body) + _SEAL_BYTES <= _MOST_BYTES:
            self._write(_name(key), hashlib.sha256(body).digest() + body, "program-*.bin")

    def _read(self, name: str, most_bytes: int) -> bytes | None:
        if self._directory is None:
            return None
        try:
            with CacheDirectory.open(self._directory) as directory:
                content = directory.read(name, most_bytes)
                directory.touch(name)
                return content
        except OSError:
            return None

    def _write(self, name: str, content: bytes, pattern: str) -> None:
        if self._directory is None:
            return
        try:
            with CacheDirectory.open(self._directory, create=True) as directory:
                directory.write(name, content)
                directory.sweep(pattern, most=_MOST_FILES)
                leftovers = f"{pattern.partition('.')[0]}.tmp"
                directory.sweep(leftovers, most=_MOST_FILES, most_seconds=_LEFTOVER_SECONDS)
        except OSError as error:
            _log.info("what was found for a program was not kept in %s: %s", self._directory, error)


def key_of(program: str, device: torch.device, options: Mapping[str, Any]) -> str:
    """A key for a program: equal where the same forms serve, in all processes.

    Args:
        program: its `digest`.
        device: where it runs.
        options: on what else the forms depend, as torch's switches.
    """
    facts = {
        "program": program,
        "identity": identity(device),
        "options": {name: repr(one) for name, one in options.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _name(key: str) -> str:
    return f"program-{key}.bin"


def _choice_name(key: str) -> str:
    return f"choice-{key}.json"
