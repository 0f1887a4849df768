"""asv's own files among the results, which the harness never reads: whether asv can."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.whole_files import read_whole

BENCHMARKS = "benchmarks.json"
MACHINE = "machine.json"
VERSIONS = {BENCHMARKS: 2, MACHINE: 1}
"""The versions of asv's formats; any other file holds results."""
RESULTS_VERSION = 2
_NEEDED = ("commit_hash", "date", "env_name", "params", "python", "requirements", "results")


def not_json(root: Path, machine: str) -> list[tuple[Path, str]]:
    """The files of all machines and of this one that are no JSON objects, and why not.

    Args:
        root: the results folder.
    """
    return [(path, content) for path, content in _contents(root, machine) if isinstance(content, str)]


def unusable(root: Path, machine: str, commits: Iterable[str]) -> list[tuple[Path, str]]:
    """The files that asv cannot use, and those that are missing beside others, each with what is wrong.

    Args:
        root: the results folder.
        commits: full hashes of those that are measured.
    """
    found = [(path, problem) for path, content in _contents(root, machine) if (problem := _problem(path, content))]
    folder = root / machine
    results = [path.name for path in folder.glob("*.json") if path.name != MACHINE]
    if not results:
        return found
    told = "is missing: asv cannot show its results without it. The next run makes it again"
    found += [(path, told) for path in (root / BENCHMARKS, folder / MACHINE) if not path.exists()]
    known = {name.partition("-")[0] for name in results}
    told = (
        "is missing, as where a run ends before asv has written it: asv shows nothing of the commit."
        " The same run with --resume makes it from the samples"
    )
    return found + [(folder / f"{commit[:8]}-*.json", told) for commit in commits if commit[:8] not in known]


def _contents(root: Path, machine: str) -> Iterator[tuple[Path, dict[str, object] | str]]:
    """The files, each with what is in it, or why that is no JSON object."""
    for path in sorted([*root.glob("*.json"), *(root / machine).glob("*.json")]):
        yield path, _content(path)


def _content(path: Path) -> dict[str, object] | str:
    try:
        content = json.loads(read_whole(path))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    return content if isinstance(content, dict) else "not a JSON object"


def _problem(path: Path, content: dict[str, object] | str) -> str | None:
    if isinstance(content, str):
        return content
    version, expected = content.get("version"), VERSIONS.get(path.name, RESULTS_VERSION)
    if version != expected:
        return f"its version is {version!r}, where asv's is {expected}: asv does not read it"
    missing = [name for name in _NEEDED if name not in content] if path.name not in VERSIONS else []
    return f"lacks {', '.join(missing)}: asv does not read it" if missing else None
