"""What is measured: the commits of which git checkout, and where asv's configuration and the results lie.

In a checkout of Kitsune it is Kitsune that differs from commit to commit, and everything lies where asv expects it.
Where the harness is installed, the checkout is that of the project around the working directory: its own code differs,
Kitsune is the installed one, and what the harness writes lies in one folder that git ignores.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.whole_files import write_whole

_HERE = Path(__file__).resolve().parent
_HOME = ".kitsune-harness"
_CONFIGURATION = "asv.conf.json"
_SCRATCH = ".asv"
_COMMIT_URL_VARIABLE = "HARNESS_COMMIT_URL"


class ProjectError(Exception):
    """There is no project to measure here; the message says what was looked for and what to do."""


@dataclass(frozen=True)
class Project:
    """A git checkout whose commits are measured.

    Attributes:
        root: its folder.
        home: the folder of ``asv.conf.json``, with ``results/`` and asv's ``.asv/`` in it.
        is_kitsune: whether Kitsune itself is what differs between its commits.
    """

    root: Path
    home: Path
    is_kitsune: bool

    @property
    def configuration(self) -> Path:
        """asv's configuration file."""
        return self.home / _CONFIGURATION

    @property
    def check_configuration(self) -> Path:
        """asv's configuration for a check: it writes what it notes of benchmarks and machine into :attr:`check`."""
        return self.scratch / "check.conf.json"

    @property
    def check(self) -> Path:
        """What a check has found, until the next one."""
        return self.scratch / "check"

    @property
    def results(self) -> Path:
        """The results folder."""
        return self.home / "results"

    @property
    def scratch(self) -> Path:
        """What can be made again at any time: asv's environments, compilers' caches, logs."""
        return self.home / _SCRATCH

    @property
    def measured_paths(self) -> tuple[str, ...]:
        """What of a commit is measured, relative to the root."""
        return ("kitsune",) if self.is_kitsune else (".",)

    @property
    def code_folders(self) -> tuple[Path, ...]:
        """What a project elsewhere imports its own code from, in its working tree; there need be none of these."""
        return () if self.is_kitsune else (self.root, self.root / "src")

    @contextmanager
    def alone(self) -> Iterator[int]:
        """Holds this checkout for one run: two would check out commits over one another, and disturb their times.

        The value is the descriptor of a file. A process that inherits it holds the checkout too, for as long as it
        lives.

        Raises:
            ProjectError: another run holds it.
            OSError: the lock's file cannot be written.
        """
        path = self.scratch / "run.lock"
        with path.open("a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ProjectError(
                    f"{path}: process {holder} measures in this checkout; wait for its end, or measure in another clone"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield file.fileno()

    def prepare(self) -> None:
        """Makes the folders, and outside of Kitsune's own checkout asv's configuration. ``HARNESS_COMMIT_URL`` becomes
        its ``show_commit_url``: the beginning of the addresses of commits' pages.

        Raises:
            OSError: they cannot be written.
        """
        self.scratch.mkdir(parents=True, exist_ok=True)
        if self.is_kitsune:
            return
        write_whole(self.home / ".gitignore", b"*\n")
        write_whole(self.configuration, json.dumps(_configuration(self.root), indent=4).encode() + b"\n")


def write_check_configuration(of: Project) -> None:
    """Makes the configuration of a check: the project's, but for where results go. asv takes a configuration's folder
    for the one that paths in it are relative to.

    Raises:
        OSError, ValueError: the project's configuration cannot be read, or this one not written.
    """
    given = json.loads(of.configuration.read_bytes())
    folders = {name: str(of.home / given[name]) for name in ("benchmark_dir", "env_dir", "html_dir")}
    made = {**given, **folders, "repo": str(of.root), "results_dir": str(of.check)}
    write_whole(of.check_configuration, json.dumps(made, indent=4).encode() + b"\n")


def here() -> Project:
    """The project of this process: Kitsune's checkout where the harness is part of one, else that around the working
    directory.

    Raises:
        ProjectError: the working directory lies in no git checkout.
    """
    if has_own_checkout():
        return Project(_HERE.parent, _HERE.parent, is_kitsune=True)
    root = _checkout_around(Path.cwd())
    return Project(root, root / _HOME, is_kitsune=False)


def has_own_checkout() -> bool:
    """Whether the harness is part of a checkout of Kitsune, whose commits it then measures."""
    return (_HERE.parent / _CONFIGURATION).exists()


def installed_in() -> Path:
    """The folder that the package of the harness lies in."""
    return _HERE.parent


def of_configuration(folder: Path) -> Project:
    """The project whose asv configuration, or that of its checks, lies in this folder."""
    if folder.name == _SCRATCH:
        return of_configuration(folder.parent)
    if folder.name == _HOME:
        return Project(folder.parent, folder, is_kitsune=False)
    return Project(folder, folder, is_kitsune=True)


def _checkout_around(folder: Path) -> Path:
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except OSError as error:
        raise ProjectError(f"git cannot be run ({error}); commits are measured from a git checkout") from error
    if answer.returncode != 0:
        raise ProjectError(
            f"{folder} lies in no git checkout, and commits are measured: start in your project's folder"
        )
    return Path(answer.stdout.strip())


def _configuration(root: Path) -> dict[str, object]:
    """As asv.conf.json in Kitsune's checkout, for a project elsewhere."""
    commit_url = os.environ.get(_COMMIT_URL_VARIABLE)
    return {
        "version": 1,
        "project": root.name,
        "repo": str(root),
        "branches": ["HEAD"],
        "plugins": [f".{__package__}.asv_plugin"],
        "environment_type": "shared",
        "build_command": [],
        "install_command": [],
        "uninstall_command": [],
        "launch_method": "forkserver",
        "build_cache_size": 64,
        "benchmark_dir": str(_HERE / "benchmarks"),
        "results_dir": "results",
        "env_dir": ".asv/env",
        "html_dir": ".asv/html",
        **({"show_commit_url": commit_url} if commit_url else {}),
    }
