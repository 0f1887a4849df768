"""Builds ``kitsune-harness``: this checkout's ``harness`` and ``models`` as one package, ``kitsune_harness``.

Neither of the two names may land in the packages of a project elsewhere, which may well have a ``models`` of its own.
So both are copied below one name, and the import statements that name them are rewritten; nothing else in the sources
depends on what the packages are called.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "kitsune_harness"
ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"harness": Path(), "models": Path("models")}
"""The packages, and where in the new one they lie."""
LEFT_OUT = {"distribution", "simulation", "__pycache__"}
"""Folders that concern this checkout alone: ``simulation`` makes a table of its documentation."""

_FROM = re.compile(r"^(\s*)from (harness|models)(?=[. ])", re.MULTILINE)
_IMPORT = re.compile(r"^(\s*)import (harness|models)$", re.MULTILINE)
_NEW = {"harness": NAME, "models": f"{NAME}.models"}


def renamed(source: str) -> str:
    """The source of a module with its imports from the new package."""
    source = _FROM.sub(lambda found: f"{found[1]}from {_NEW[found[2]]}", source)
    return _IMPORT.sub(lambda found: f"{found[1]}import {_NEW[found[2]]} as {found[2]}", source)


def files() -> dict[Path, Path]:
    """Every file, by its path in the new package."""
    return {
        below / path.relative_to(ROOT / package): path
        for package, below in SOURCES.items()
        for path in sorted((ROOT / package).rglob("*"))
        if path.is_file() and not LEFT_OUT & set(path.relative_to(ROOT / package).parts)
    }


def version() -> str:
    """Kitsune's own."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "kitsune" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


class BuildRenamed(build_py):
    """Writes the files where setuptools would copy them to."""

    def run(self) -> None:
        """Writes them."""
        for path, source in files().items():
            target = Path(self.build_lib, NAME, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = source.read_bytes()
            target.write_bytes(renamed(content.decode()).encode() if source.suffix == ".py" else content)


if __name__ == "__main__":
    setup(version=version(), packages=[NAME], package_dir={NAME: "."}, cmdclass={"build_py": BuildRenamed})
