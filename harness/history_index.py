"""Ratios to controls at every measured commit, from an index: a long history is not read file by file each time.

Only files that are new or have changed since are read; the index is one array, beside the results it is made of.
"""

from __future__ import annotations

import io
import json
import math
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from harness import controls, names, selection, stats, store
from harness.catalogue import FOLDER, Stamp, code_digest, keep
from harness.controls import is_captured
from harness.names import is_product, precision_of, reference_of
from harness.parallel import mapped
from harness.selection import Case, Measurement
from harness.stats import Estimate, paired_ratio, typical_seconds
from harness.store import History

_POINT = np.dtype(
    [
        ("commit", np.int32),
        ("series", np.int32),
        ("seconds", np.float64),
        ("ratio", np.float64),
        ("low", np.float64),
        ("high", np.float64),
        ("rounds", np.int32),
        ("pairs", np.int32),
        ("freedom", np.float64),
    ]
)

Points = npt.NDArray[np.void]
Key = tuple[Case, str]
"""A case and a variant: what makes a series."""
_Held = tuple[Case, str, str]
"""A case, a variant, and the control that it is held against."""


@dataclass(frozen=True)
class Value:
    """A variant at one commit: its seconds per step, and its time as a multiple of its control's."""

    commit: str
    seconds: float
    ratio: Estimate


class Values(Sequence[Value]):
    """The values of a series in the order of the commits, which are made as they are looked at: there may be many."""

    def __init__(self, commits: Sequence[str], points: Points) -> None:
        self._commits = commits
        self._points = points

    def __len__(self) -> int:
        return len(self._points)

    @overload
    def __getitem__(self, index: int) -> Value: ...

    @overload
    def __getitem__(self, index: slice) -> Values: ...

    def __getitem__(self, index: int | slice) -> Value | Values:
        if isinstance(index, slice):
            return Values(self._commits, self._points[index])
        commit, _, seconds, ratio, low, high, rounds, pairs, freedom = self._points[index].item()
        estimate = Estimate(ratio, low, high, rounds, pairs, None if math.isnan(freedom) else freedom)
        return Value(self._commits[commit], seconds, estimate)

    @property
    def commits(self) -> list[str]:
        """The commits of the values."""
        return [self._commits[number] for number in self._points["commit"].tolist()]

    @property
    def ratios(self) -> list[float]:
        """The ratios to the control alone."""
        ratios: list[float] = self._points["ratio"].tolist()
        return ratios

    @property
    def seconds(self) -> list[float]:
        """The seconds alone."""
        seconds: list[float] = self._points["seconds"].tolist()
        return seconds


@dataclass(frozen=True)
class _Index:
    """Points of commits, given with the stamps of their files; ``commit`` and ``series`` of a point count in these."""

    commits: tuple[tuple[str, Stamp], ...]
    series: tuple[_Held, ...]
    points: Points


def series_values(history: History) -> dict[Key, dict[str, Values]]:
    """The values of each of Kitsune's forms, as users run them, against each control that was timed beside it, eager or
    captured by hand: in the order of the commits, those without a value left out. Series are in the order in which they
    first appear. The index is of all that was loaded, whatever part of it the history is.

    Rounds of a commit are pooled as in a comparison: those of the newest run's environment.
    """
    index = _updated(history.whole())
    position = {commit: place for place, commit in enumerate(history.commits)}
    commits = [commit for commit, _ in index.commits]
    places = np.array([position.get(commit, -1) for commit in commits], dtype=np.int64)[index.points["commit"]]
    shown = index.points[places >= 0]
    ordered = shown[np.lexsort((places[places >= 0], shown["series"]))]
    starts = np.searchsorted(ordered["series"], np.arange(len(index.series) + 1))
    found: dict[Key, dict[str, Values]] = {}
    for (case, variant, control), start, end in zip(index.series, starts, starts[1:], strict=False):
        if start < end and history.is_about(case.model):
            found.setdefault((case, variant), {})[control] = Values(commits, ordered[start:end])
    return found


def _updated(history: History) -> _Index:
    """The index with exactly the history's commits; it is written where anything had to be made."""
    path = history.folder / FOLDER / "history.npz"
    wanted = tuple((commit, history.stamp(commit)) for commit in history.commits)
    old = _read(path)
    if old is not None and set(old.commits) == set(wanted):
        return old
    index = _extended(old or _Index((), (), np.empty(0, _POINT)), history, wanted)
    keep(path, _encoded(index))
    return index


def _extended(old: _Index, history: History, wanted: tuple[tuple[str, Stamp], ...]) -> _Index:
    place = {commit: number for number, commit in enumerate(wanted)}
    moved = np.array([place.get(commit, -1) for commit in old.commits], dtype=np.int32)
    kept = old.points[moved[old.points["commit"]] >= 0].copy()
    kept["commit"] = moved[kept["commit"]]
    known = set(old.commits)
    series = {key: number for number, key in enumerate(old.series)}
    missing = [number for number, commit in enumerate(wanted) if commit not in known]
    measured = mapped(
        lambda number: list(_points(selection.measurement(history, wanted[number][0]))),
        missing,
        is_long=sum(wanted[number][1][0] for number in missing) >= store.MANY_BYTES,
    )
    new = [
        (number, series.setdefault(key, len(series)), *numbers)
        for number, points in zip(missing, measured, strict=True)
        for key, numbers in points
    ]
    return _Index(wanted, tuple(series), np.concatenate([kept, np.array(new, dtype=_POINT)]))


def _points(measured: Measurement) -> Iterator[tuple[_Held, tuple[float, float, float, float, int, int, float]]]:
    for case, rounds in measured.rounds.items():
        timed = measured.variants(case)
        for variant in filter(is_product, timed):
            seconds = typical_seconds([entry.blocks[variant].seconds for entry in rounds if variant in entry.blocks])
            for control in filter(partial(_is_control, variant), timed):
                pairs = measured.pairs(case, variant, control)
                if pairs:
                    ratio = paired_ratio(pairs)
                    freedom = math.nan if ratio.freedom is None else ratio.freedom
                    numbers = (seconds, ratio.ratio, ratio.low, ratio.high, ratio.rounds, ratio.pairs, freedom)
                    yield (case, variant, control), numbers


def _is_control(variant: str, peer: str) -> bool:
    return peer == reference_of(variant) or (is_captured(peer) and precision_of(peer) == precision_of(variant))


@lru_cache(maxsize=1)
def _code() -> str:
    return code_digest([sys.modules[__name__], controls, names, selection, stats, *store.reader_modules()])


def _encoded(index: _Index) -> bytes:
    header = {
        "code": _code(),
        "commits": index.commits,
        "series": [[asdict(case), variant, control] for case, variant, control in index.series],
    }
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), points=index.points)
    return buffer.getvalue()


def _read(path: Path) -> _Index | None:
    """The index; None where there is none, or one that other code has made."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            header: Mapping[str, object] = json.loads(arrays["header"].tobytes())
            points = arrays["points"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # whatever it is, it is no index, and results do not depend on it
    if header.get("code") != _code() or points.dtype != _POINT:
        return None
    commits, series = header["commits"], header["series"]
    assert isinstance(commits, list)
    assert isinstance(series, list)
    return _Index(
        tuple((commit, (stamp[0], stamp[1], stamp[2])) for commit, stamp in commits),
        tuple((Case(**case), variant, control) for case, variant, control in series),
        points,
    )
