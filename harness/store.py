"""The only reader and writer of ``results/``, but for the traces there (:mod:`harness.traces`).

``results/<machine>/<full commit hash>.samples.jsonl`` holds one JSON object a line (see :mod:`harness.records`),
beside the files asv keeps there itself. A file is replaced as a whole or left as it was, writers wait for one another,
and what cannot be read is named in :attr:`History.damage` and skipped, so that one bad line never hides the others.

Of many commits few are looked at closely, so a history reads their files when it is asked for them. Which runs there
are, and what is damaged, is kept in an index (:mod:`harness.catalogue`). To put results of several machines or branches
together is to copy files: each has its own, unless the same commit was measured on the same machine twice.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from harness import asv_files, continuation, memory_timeline, phases, plan_fields, profiles, records, replay_plans
from harness.catalogue import FOLDER, Catalogue, Stamp, code_digest, stamp
from harness.parallel import mapped
from harness.records import SCHEMA, Blocks, Phases, Profile, Record, RecordError, Round, Run, Skip, parse_record
from harness.revisions import history_order
from harness.whole_files import read_whole, write_whole

__all__ = [
    "SCHEMA",
    "Blocks",
    "Damage",
    "History",
    "Phases",
    "Profile",
    "ResultsError",
    "Round",
    "Run",
    "Skip",
    "Store",
]

_SUFFIX = ".samples.jsonl"
_OPEN_FILES = 8
"""How many commits' samples a history keeps in memory."""
MANY_BYTES = 5 << 20
"""So many bytes of samples take longer to read, about a quarter of a second, than it takes to start processes."""
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


class ResultsError(Exception):
    """Results that cannot be read or written. ``path`` is the file or folder; the message says what to do."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


@dataclass(frozen=True)
class Damage:
    """Something that could not be used and was skipped. ``line`` counts from 1; None is the whole file."""

    path: Path
    line: int | None
    problem: str


@dataclass(frozen=True)
class _Measured:
    """Everything readable in the file of one commit, in the order it was written."""

    runs: tuple[Run, ...]
    rounds: tuple[Round, ...]
    profiles: tuple[Profile, ...]
    phases: tuple[Phases, ...]
    skips: tuple[Skip, ...]

    def of_models(self, models: frozenset[str]) -> _Measured:
        return _Measured(
            self.runs,
            tuple(entry for entry in self.rounds if entry.model in models),
            tuple(entry for entry in self.profiles if entry.model in models),
            tuple(entry for entry in self.phases if entry.model in models),
            tuple(entry for entry in self.skips if entry.model in models),
        )


_NOTHING = _Measured((), (), (), (), ())


@dataclass(frozen=True)
class History:
    """What one machine measured.

    ``commits`` are full hashes, oldest first: in the order of git's history where the results lie inside a checkout
    that knows them; commits it does not know come before those it knows, by the start of their first run. ``folder`` is
    where the results of the machine lie. A part of what was loaded (:meth:`without_snapshots`, :meth:`of_models`) reads
    the same files.
    """

    machine: str
    folder: Path
    commits: tuple[str, ...]
    damage: tuple[Damage, ...]
    _runs: Mapping[str, tuple[Run, ...]] = field(repr=False)
    _stamps: Mapping[str, Stamp] = field(repr=False)
    _measured: Callable[[str], _Measured] = field(repr=False, compare=False)
    _models: frozenset[str] | None = None

    def stamp(self, commit: str) -> Stamp:
        """What the file of a measured commit is recognised by."""
        return self._stamps[commit]

    @property
    def models(self) -> tuple[str, ...]:
        """The models of all rounds, in the order of the results."""
        return tuple(dict.fromkeys(entry.model for commit in self.commits for entry in self.rounds(commit)))

    def is_snapshot(self, commit: str) -> bool:
        """Whether it is the state of a working tree and no commit of the history."""
        return any(run.snapshot_of is not None for run in self.runs(commit))

    def without_snapshots(self, but: Iterable[str] = ()) -> History:
        """The history without states of the working tree, except these."""
        kept = set(but)
        commits = tuple(commit for commit in self.commits if commit in kept or not self.is_snapshot(commit))
        return replace(self, commits=commits)

    def of_models(self, models: Iterable[str]) -> History:
        """The same runs, and of what they measured the part that concerns these models."""
        return replace(self, _models=frozenset(models))

    def is_about(self, model: str) -> bool:
        """Whether rounds of this model belong to the history."""
        return self._models is None or model in self._models

    def whole(self) -> History:
        """Everything that was loaded, of which this may be a part."""
        return replace(self, commits=tuple(self._runs), _models=None)

    def damage_of(self, commit: str) -> tuple[Damage, ...]:
        """What could not be read of a commit."""
        return tuple(entry for entry in self.damage if entry.path.name == f"{commit}{_SUFFIX}")

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Commits of whose files damage has left nothing."""
        names = [entry.path.name for entry in self.damage if entry.path.name.endswith(_SUFFIX)]
        commits = dict.fromkeys(name[: -len(_SUFFIX)] for name in names)
        return tuple(commit for commit in commits if _COMMIT.fullmatch(commit) and commit not in self._runs)

    def runs(self, commit: str) -> tuple[Run, ...]:
        """The runs on a commit, earliest first; empty for a commit that was not measured."""
        return self._runs.get(commit, ())

    def rounds(self, commit: str) -> tuple[Round, ...]:
        """The rounds of all runs on a commit, as written."""
        return self._part(commit).rounds

    def profiles(self, commit: str) -> tuple[Profile, ...]:
        """The profiles of all runs on a commit, as written."""
        return self._part(commit).profiles

    def phases(self, commit: str) -> tuple[Phases, ...]:
        """The phases told apart by all runs on a commit, as written."""
        return self._part(commit).phases

    def skips(self, commit: str) -> tuple[Skip, ...]:
        """The skipped and failed variants of all runs on a commit, as written."""
        return self._part(commit).skips

    def _part(self, commit: str) -> _Measured:
        if commit not in self._runs:
            return _NOTHING
        found = self._measured(commit)
        return found if self._models is None else found.of_models(self._models)


class Store:
    """The ``results/`` folder.

    Args:
        root: the folder; it need not exist before the first :meth:`append`.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def machines(self) -> list[str]:
        """Names of the machines that have samples, sorted."""
        try:
            return sorted({path.parent.name for path in self.root.glob(f"*/*{_SUFFIX}")})
        except OSError as error:
            raise ResultsError(self.root, f"cannot be listed ({error.strerror}); check its permissions") from error

    def append(self, machine: str, commit: str, records: Sequence[Mapping[str, object]]) -> Path:
        """Add records to a commit's file: all of them, or none where anything goes wrong.

        Earlier lines are kept byte for byte. ``schema`` is filled in where absent; a loss that is not finite is kept as
        null.

        Args:
            machine: the folder's name, one path component.
            commit: full commit hash, lower-case.
            records: at least one mapping as :mod:`harness.records` describes them.

        Returns:
            The file.

        Raises:
            ResultsError: a record would not be readable again, a name is unusable, or the file cannot be written.
        """
        path = self._path(machine, commit)
        lines = "".join(_encoded(record, path, commit) for record in records).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent / ".lock"):
                for leftover in path.parent.glob(f".{path.name}.*.tmp"):
                    leftover.unlink()
                earlier = read_whole(path) if path.exists() else b""
                if earlier and not earlier.endswith(b"\n"):
                    earlier += b"\n"
                write_whole(path, earlier + lines)
        except OSError as error:
            raise ResultsError(
                path, f"cannot be written ({error.strerror}); earlier results are untouched. Free it and run again"
            ) from error
        return path

    def load(self, machine: str, commits: Iterable[str] | None = None) -> History:
        """Read a machine's results.

        Args:
            machine: one of :meth:`machines`.
            commits: full hashes to restrict reading to; None reads all.

        Raises:
            ResultsError: there is no such machine. Damage inside its files, asv's included, is never an error.
        """
        folder = self.root / machine
        if machine not in self.machines():
            known = ", ".join(self.machines()) or "none yet"
            raise ResultsError(folder, f"holds no samples; machines with results: {known}")
        wanted = None if commits is None else set(commits)
        damage: list[Damage] = []
        stamps: dict[str, Stamp] = {}
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            commit = path.name[: -len(_SUFFIX)]
            if not _COMMIT.fullmatch(commit):
                damage.append(Damage(path, None, "the name does not begin with a full commit hash"))
                continue
            try:
                stamps[commit] = stamp(path)
            except OSError as error:
                damage.append(_unreadable(path, error))
        runs: dict[str, tuple[Run, ...]] = {}
        for commit, outline in _outlines(folder, stamps).items():
            if wanted is None or commit in wanted:
                damage += outline.damage
                if outline.runs:
                    runs[commit] = outline.runs
        damage += [Damage(path, None, told) for path, told in asv_files.unusable(self.root, machine, sorted(runs))]
        ordered = self._ordered(runs)
        runs = {commit: runs[commit] for commit in ordered}
        return History(machine, folder, ordered, tuple(damage), runs, stamps, self._reader(machine))

    def set_asv_s_damage_aside(self, machine: str) -> tuple[Damage, ...]:
        """Renames files of asv's that are no JSON to ``<name>.damaged``: asv would stop at them, and makes new ones.

        Returns:
            What was wrong, under the files' new names.

        Raises:
            ResultsError: a file cannot be renamed.
        """
        found = []
        for path, problem in asv_files.not_json(self.root, machine):
            aside = path.with_name(f"{path.name}.damaged")
            try:
                path.replace(aside)
            except OSError as error:
                raise ResultsError(path, f"is damaged ({problem}) and cannot be renamed ({error.strerror})") from error
            found.append(Damage(aside, None, problem))
        return tuple(found)

    def _reader(self, machine: str) -> Callable[[str], _Measured]:
        """What reads a commit's file, and remembers the last ones."""

        @lru_cache(maxsize=_OPEN_FILES)
        def read(commit: str) -> _Measured:
            path = self._path(machine, commit)
            try:
                return _read(path, commit)[0]
            except OSError as error:
                raise ResultsError(path, f"could be read before and cannot now ({error.strerror})") from error

        return read

    def _ordered(self, runs: Mapping[str, Sequence[Run]]) -> tuple[str, ...]:
        position = history_order(runs, self.root)

        def age(commit: str) -> tuple[int, datetime, str]:
            return position.get(commit, -1), runs[commit][0].started, commit

        return tuple(sorted(runs, key=age))

    def _path(self, machine: str, commit: str) -> Path:
        if not machine or machine.startswith(".") or Path(machine).name != machine:
            raise ResultsError(self.root, f"{machine!r} cannot be a machine's folder; give one plain name")
        if not _COMMIT.fullmatch(commit):
            raise ResultsError(self.root / machine, f"{commit!r} is not a full lower-case commit hash")
        return self.root / machine / f"{commit}{_SUFFIX}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file that exists only while it is held or waited for.

    The system drops the lock of a process that dies. A waiter may get the lock of a file that its holder has removed
    meanwhile; it then starts again with the file that now has the name.
    """
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(path, handle):
                try:
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _encoded(record: Mapping[str, object], path: Path, commit: str) -> str:
    """One line of the file, proved readable."""
    fields: dict[str, object] = {"schema": SCHEMA, **record}
    losses = fields.get("losses")
    if isinstance(losses, (list, tuple)):
        fields["losses"] = [_finite_or_none(entry) for entry in losses]
    try:
        line = json.dumps(fields, allow_nan=False, separators=(",", ":"))
        parsed = parse_record(json.loads(line))
    except (RecordError, TypeError, ValueError) as error:
        raise ResultsError(path, f"nothing written: a {fields.get('kind')!r} record is unusable: {error}") from error
    if isinstance(parsed, Run) and parsed.commit != commit:
        raise ResultsError(path, f"nothing written: the run record is of commit {parsed.commit!r}")
    return line + "\n"


def _finite_or_none(entry: object) -> object:
    if isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], float):
        return [entry[0], entry[1] if math.isfinite(entry[1]) else None]
    return entry


@dataclass(frozen=True)
class _Outline:
    """What is known of a file without its samples. It is not kept where the file could not be read."""

    runs: tuple[Run, ...]
    damage: tuple[Damage, ...]
    is_kept: bool = True


def _outlines(folder: Path, stamps: Mapping[str, Stamp]) -> dict[str, _Outline]:
    """Those of commits, from the catalogue where it has them: to make them, all samples must be looked at."""
    catalogue = Catalogue(folder / FOLDER / "runs.index", _reader_digest())
    paths = {commit: folder / f"{commit}{_SUFFIX}" for commit in stamps}
    entries = {commit: catalogue.find(paths[commit].name, at) for commit, at in stamps.items()}
    known = {commit: _decoded(entry, paths[commit]) for commit, entry in entries.items() if isinstance(entry, dict)}
    missing = [commit for commit in stamps if commit not in known]
    are_many = sum(stamps[commit][0] for commit in missing) >= MANY_BYTES
    made = mapped(lambda commit: _outline(paths[commit], commit), missing, is_long=are_many)
    for commit, outline in zip(missing, made, strict=True):
        known[commit] = outline
        if outline.is_kept:
            catalogue.add(paths[commit].name, stamps[commit], _entry(outline))
    catalogue.save()
    return {commit: known[commit] for commit in stamps}


def _outline(path: Path, commit: str) -> _Outline:
    try:
        measured, damage = _read(path, commit)
    except OSError as error:
        return _Outline((), (_unreadable(path, error),), is_kept=False)
    return _Outline(measured.runs, tuple(damage))


def _entry(outline: _Outline) -> dict[str, object]:
    """An outline as the catalogue keeps it."""
    fields = [
        {**asdict(run), "kind": "run", "schema": SCHEMA, "started": run.started.isoformat()} for run in outline.runs
    ]
    return {"runs": fields, "damage": [(entry.line, entry.problem) for entry in outline.damage]}


def _decoded(entry: Mapping[str, list[Any]], path: Path) -> _Outline:
    known = [parse_record(fields) for fields in entry["runs"]]
    damage = tuple(Damage(path, *one) for one in entry["damage"])
    return _Outline(tuple(run for run in known if isinstance(run, Run)), damage)


def _unreadable(path: Path, error: OSError) -> Damage:
    return Damage(path, None, f"cannot be read ({error.strerror})")


def reader_modules() -> tuple[ModuleType, ...]:
    """The modules that decide what is read of a file, and what is damaged in it."""
    return sys.modules[__name__], records, continuation, memory_timeline, phases, plan_fields, profiles, replay_plans


@lru_cache(maxsize=1)
def _reader_digest() -> str:
    return code_digest(reader_modules())


def _read(path: Path, commit: str) -> tuple[_Measured, list[Damage]]:
    """Everything readable in a file, and what is not. A file is written with its first records, so none is empty.

    Raises:
        OSError: the file itself cannot be read.
    """
    damage: list[Damage] = []
    numbered: list[tuple[int, Record]] = []
    content = read_whole(path).removeprefix(codecs.BOM_UTF8)  # which editors leave
    if not content.strip():
        damage.append(Damage(path, None, "is empty: what was measured is lost, as where a disk is full"))
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            numbered.append((number, _parsed(line, commit)))
        except RecordError as error:
            damage.append(Damage(path, number, str(error)))
    return _measured(path, numbered, damage), damage


def _parsed(line: bytes, commit: str) -> Record:
    try:
        record = parse_record(_DECODER.decode(line.decode()))
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON ({error})") from None
    if isinstance(record, Run) and record.commit != commit:
        raise RecordError(f"a run of commit {record.commit!r} in the file of another commit")
    return record


def _refuse_constant(name: str) -> None:
    raise RecordError(f"{name} is not a finite number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _measured(path: Path, numbered: Sequence[tuple[int, Record]], damage: list[Damage]) -> _Measured:
    """Sort records by kind, leaving out repeated ones and those whose run is unknown."""
    known = {record.run for _, record in numbered if isinstance(record, Run)}
    seen: dict[tuple[object, ...], int] = {}
    kept: list[Record] = []
    for number, record in numbered:
        key = _identity(record)
        if record.run not in known:
            damage.append(Damage(path, number, f"its run {record.run!r} has no readable run record"))
        elif key in seen:
            damage.append(Damage(path, number, f"repeats line {seen[key]}"))
        else:
            seen[key] = number
            kept.append(record)
    runs = sorted((record for record in kept if isinstance(record, Run)), key=lambda run: run.started)
    return _Measured(
        tuple(runs),
        tuple(record for record in kept if isinstance(record, Round)),
        tuple(record for record in kept if isinstance(record, Profile)),
        tuple(record for record in kept if isinstance(record, Phases)),
        tuple(record for record in kept if isinstance(record, Skip)),
    )


def _identity(record: Record) -> tuple[object, ...]:
    """What may stand in a file once: counting the same round twice would make an interval falsely tight."""
    if isinstance(record, Run):
        return Run, record.run
    if isinstance(record, Round):
        return Round, record.run, record.device, record.case, record.round
    return type(record), record.run, record.device, record.case, record.variant
