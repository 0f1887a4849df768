"""Which models of other people's libraries are captured, with the reasons for those that are not.

    python -m tests.benchmarks.coverage [--library timm] [--models NAME ...] [--json FILE] [--markdown FILE]
    python -m tests.benchmarks.coverage --show FILE ... --markdown FILE

Each model trains in a process of its own, with and without Kitsune, within a limit of time and memory: what becomes of
one of them ends no other. `--json` is written after each model; rows that the file has of other models stay, so that
some can be measured again. `--show` measures nothing: it takes the rows of such files.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.processes import Launcher, ProcessFailed
from tests.benchmarks.coverage import table
from tests.benchmarks.coverage.sample import LIBRARIES, Library, library
from tests.benchmarks.coverage.training import Job, Row, measure, portable

_COMMAND = "python -m tests.benchmarks.coverage --json FILE --markdown docs/coverage.md"


def main(arguments: Sequence[str] | None = None, libraries: Mapping[str, str] = LIBRARIES) -> None:
    """Does what the command line says.

    Args:
        libraries: by name, the module that knows each.
    """
    given = _parser(libraries).parse_args(arguments)
    if given.show:
        _show(given)
        return
    names = given.library or list(libraries)
    known = {name: library(libraries[name]) for name in names}
    for name in [name for name in names if (reason := known[name].missing()) is not None]:
        print(f"{name} is skipped: {reason}", flush=True)
        del known[name]
    versions = _versions(known)
    kept = _kept(given.json, versions, given.steps)
    launcher = Launcher()
    jobs = _jobs(known, libraries, given)
    for number, job in enumerate(jobs, 1):
        row = _row(launcher, job, given.limit)
        kept[job.library, job.family] = row
        took = "" if row.capture_s is None else f", {row.capture_s:.1f} s"
        print(
            f"[{number}/{len(jobs)}] {row.library} {row.model}: {row.outcome}{took} {row.reason}".rstrip(), flush=True
        )
        if given.json is not None:
            _write(given.json, versions, given.steps, kept.values())
    for name in known:
        print(f"{name}: {table.counts(row for row in kept.values() if row.library == name)}")
    if given.markdown is not None:
        text = table.document(kept.values(), versions, given.steps, _COMMAND)
        given.markdown.write_text(text, encoding="utf-8")


def _show(given: argparse.Namespace) -> None:
    """Writes a table of the rows of files.

    Raises:
        SystemExit: these are of different versions, or there is nowhere to write it.
    """
    if given.markdown is None:
        raise SystemExit("--show needs a place to write to: --markdown FILE")
    versions: dict[str, str] = {}
    kept: dict[tuple[str, str], Row] = {}
    for file in given.show:
        kept |= _kept(file, versions, given.steps)
        versions |= json.loads(file.read_text(encoding="utf-8"))["versions"]
    text = table.document(kept.values(), versions, given.steps, _COMMAND)
    given.markdown.write_text(text, encoding="utf-8")


def _parser(libraries: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--library", choices=list(libraries), action="append", help="only this one (default: all)")
    parser.add_argument("--models", nargs="+", metavar="FAMILY", help="only these families (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="of each training (default: 4)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each model (default: 600)")
    parser.add_argument("--memory", type=float, default=12.0, help="GiB for each model (default: 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows are kept")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="measure nothing; rows of these files")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where the table is written")
    return parser


def _jobs(known: Mapping[str, Library], libraries: Mapping[str, str], given: argparse.Namespace) -> list[Job]:
    """Those that are asked for, in the order of the libraries.

    Raises:
        SystemExit: a family that was named is in none of them.
    """
    memory_bytes = int(given.memory * 2**30)
    families = [(name, family) for name, one in known.items() for family in one.families()]
    unknown = set(given.models or ()) - {family for _, family in families}
    if unknown:
        raise SystemExit(f"no library has the families {', '.join(sorted(unknown))}; see --help for --library")
    wanted = [(name, family) for name, family in families if not given.models or family in given.models]
    return [Job(name, libraries[name], family, given.steps, memory_bytes) for name, family in wanted]


def _row(launcher: Launcher, job: Job, limit_s: float) -> Row:
    make = partial(Row, job.library, job.family)
    try:
        return launcher.run(measure, job, timeout_s=limit_s)
    except ProcessFailed as failure:
        lines = failure.reason.splitlines()
        is_late = lines[0].startswith("not finished")
        model = (failure.note or "").split(" ")[1:2]
        return make(
            model[0] if model and " with " in (failure.note or "") else job.family,
            "not finished" if is_late else "fails",
            reason=portable(lines[0] if is_late else f"{lines[0]} {lines[-1]}"),
        )


def _versions(known: Mapping[str, Library]) -> dict[str, str]:
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    for one in known.values():
        found |= one.versions()
    return found


def _kept(file: Path | None, versions: Mapping[str, str], steps: int) -> dict[tuple[str, str], Row]:
    """The rows that a file has already.

    Raises:
        SystemExit: they are of other versions.
    """
    if file is None or not file.exists():
        return {}
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    before = document["versions"]
    others = [name for name in versions if before.get(name, versions[name]) != versions[name]]
    if others or document["steps"] != steps:
        raise SystemExit(
            f"{file} is of other versions ({', '.join(others) or 'steps'}): name another file, or delete it"
        )
    return {(row["library"], row["family"]): Row(**row) for row in document["rows"]}


def _write(file: Path, versions: Mapping[str, str], steps: int, rows: Any) -> None:
    document = {"versions": dict(versions), "steps": steps, "rows": [row.as_dict() for row in rows]}
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
