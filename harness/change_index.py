"""Changes of level that were found before, by the values they are in: only series that have changed are searched again.

The index is content-addressed, beside the results (:mod:`harness.catalogue`): the same values always have the same
changes, whichever commits and series they belong to, so an entry can be out of date by the code alone that made it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import asv
import numpy as np

from harness import changepoints
from harness.catalogue import FOLDER, code_digest, keep
from harness.changepoints import ChangePoint, find_changes
from harness.parallel import mapped

_MANY = 20_000  # values, which take about a tenth of a second
_MOST_UNUSED = 5_000
"""So many entries are kept beside those that were asked for: other parts of the history have been looked at before."""


class ChangeIndex:
    """The changes among values, those known included.

    Args:
        folder: the results of a machine. An index that cannot be read there is an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER / "changes.index"
        self._old = _read(self._path)
        self._used: dict[str, tuple[ChangePoint, ...]] = {}

    def search(self, series: Sequence[Sequence[float]]) -> None:
        """Finds the changes of many series at once, so that :meth:`find` knows them."""
        missing = [values for values in series if _digest(values) not in self._old]
        found = mapped(find_changes, missing, is_long=sum(map(len, missing)) >= _MANY)
        self._used |= {_digest(values): changes for values, changes in zip(missing, found, strict=True)}

    def find(self, values: Sequence[float]) -> tuple[ChangePoint, ...]:
        """What `find_changes` returns for these values."""
        key = _digest(values)
        if key not in self._used:
            self._used[key] = self._old[key] if key in self._old else find_changes(values)
        return self._used[key]

    def save(self) -> None:
        """Write the index, if anything in it is new; where that is impossible, all is found again next time."""
        if self._used.keys() <= self._old.keys():
            return
        unused = [key for key in self._old if key not in self._used][-_MOST_UNUSED:]
        entries = {key: self._old[key] for key in unused} | self._used
        changes = {key: [list(vars(change).values()) for change in found] for key, found in entries.items()}
        keep(self._path, json.dumps({"code": _code(), "changes": changes}).encode())


def _digest(values: Sequence[float]) -> str:
    return hashlib.sha256(np.asarray(values, dtype=np.float64).tobytes()).hexdigest()


@lru_cache(maxsize=1)
def _code() -> str:
    return f"{code_digest([changepoints])}, asv {asv.__version__}, numpy {np.__version__}"


def _read(path: Path) -> dict[str, tuple[ChangePoint, ...]]:
    try:
        content = json.loads(path.read_bytes())
        if content["code"] != _code():
            return {}
        return {key: tuple(ChangePoint(*fields) for fields in found) for key, found in content["changes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # whatever it is, it is no index, and what is reported does not depend on it
