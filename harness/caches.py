"""Where compilers keep what they made, and Kitsune what it measured: each variant of each case by itself, so that what
it finds there tells whether it has been compiled before.

A Kitsune variant's caches belong to its commit and begin empty with each run: no commit is timed on another's kernels.
The peers' are keyed by the versions that decide what a compiler makes: not every commit pays for compiling them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from harness.variants import Variant

_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "KITSUNE_CACHE_DIR": "kitsune"}


class Caches:
    """The cache folders of one run.

    Args:
        root: where all runs keep theirs.
        commit: the commit under test.
        facts: of the machine, see :func:`harness.environment.facts`.
    """

    def __init__(self, root: Path, commit: str, facts: Mapping[str, object]) -> None:
        versions = (facts["torch"], facts["triton"], facts["python"], facts["device"])
        self._peers = root / "peers" / re.sub(r"[^\w.+]+", "-", "-".join(map(str, versions)))
        self._commit = root / "commits" / commit

    def clear(self) -> None:
        """Removes what belongs to the commit: before a run, so that it begins empty; after it, as none may use it."""
        shutil.rmtree(self._commit, ignore_errors=True)

    def folder(self, case: str, variant: Variant) -> Path:
        """The folder of one variant of one case. Diagnostic variants share that of Kitsune as it is."""
        if variant.is_diagnostic:
            return self._commit / case / f"{variant.family}_{variant.precision}"
        if variant.is_kitsune:
            return self._commit / case / variant.name
        return self._peers / case / variant.name


def use(folder: Path | None) -> None:
    """From here on, this process keeps its caches in this folder; None leaves them where they are."""
    if folder is None:
        return
    for variable, name in _VARIABLES.items():
        path = folder / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # Kitsune loads nothing from one that others may write to
        os.environ[variable] = str(path)


def is_cold(folder: Path | None) -> bool:
    """Whether nothing has been kept in the folder yet."""
    return folder is None or not any(path.is_file() for path in folder.rglob("*"))
