"""asv's environment for this project: it shares torch and everything else with the Python that runs asv.

In a checkout of Kitsune only ``kitsune`` comes from the commit under test; ``harness`` and ``models`` are the working
tree's, so that every commit is measured by the same instrument. In a project elsewhere everything of its own comes from
the commit, and harness and Kitsune are the installed ones. Nothing is built, installed or downloaded; making an
environment takes a second.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

from asv import environment, util
from asv.machine import Machine

from harness.environment import MachineFileError, write_asv_machine_file
from harness.project import of_configuration

_FROM_COMMIT = "kitsune"
_FROM_TREE = ("harness", "models")


def setup() -> None:
    """Called by asv when it loads this plugin: tells it about this machine, so that it never asks.

    Raises:
        asv.util.UserError: the machine file cannot be read or written.
    """
    try:
        setattr(Machine, "hardcoded_machine_name", write_asv_machine_file())  # noqa: B010  # asv types it as None
    except (MachineFileError, ValueError) as error:
        raise util.UserError(str(error)) from error


class SharedEnvironment(environment.Environment):
    """A virtual environment without packages of its own.

    For Kitsune its path holds, in this order: a folder of links to the commit's ``kitsune`` and the working tree's
    ``harness`` and ``models``, then every package folder of the Python that runs asv. A commit without ``kitsune``
    leaves a link that leads nowhere, so that the working tree's is not found in its place. For a project elsewhere the
    commit's checkout and the ``src`` in it stand first.
    """

    tool_name: str = "shared"  # type: ignore[assignment]  # asv types its base class's as None
    matches_python_fallback = False

    def __init__(
        self,
        conf: object,
        python: str,
        requirements: dict[str, str],
        tagged_env_vars: Mapping[tuple[str, str], str],
    ) -> None:
        if not self.matches(python):
            raise environment.EnvironmentUnavailable(
                f"Python {python} was asked for, but packages are shared with the Python {_running_version()} of asv"
            )
        self._requirements = requirements  # asv's constructor reads it
        self._measured = of_configuration(Path.cwd())  # asv has changed to its configuration's folder
        super().__init__(conf, _running_version(), requirements, tagged_env_vars)  # type: ignore[no-untyped-call]
        self._base_requirements: dict[str, str] = {}  # asv would install its own packages

    @classmethod
    def matches(cls, python: str) -> bool:
        """Whether this is the version of the Python that runs asv."""
        return python in ("same", _running_version())

    def check_presence(self) -> bool:
        """Whether the environment exists and still shares the folders it should."""
        try:
            paths = self._path_file().read_text(encoding="utf-8")
        except OSError:
            return False
        return paths == self._path_file_text() and bool(super().check_presence())  # type: ignore[no-untyped-call]

    def _setup(self) -> None:
        folder = Path(self._path)
        venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(folder)
        if self._measured.is_kitsune:
            links = self._links()
            links.mkdir()
            (links / _FROM_COMMIT).symlink_to(folder / "project" / _FROM_COMMIT)
            for package in _FROM_TREE:
                (links / package).symlink_to(self._measured.root / package)
        self._path_file().write_text(self._path_file_text(), encoding="utf-8")
        pip = folder / "bin" / "pip"  # asv takes an environment without one for damaged
        pip.write_text("#!/bin/sh\necho 'packages are shared: install into the Python that runs asv' >&2; exit 1\n")
        pip.chmod(0o755)

    def run(self, args: list[str], **kwargs: object) -> object:
        """Runs the environment's Python."""
        return self.run_executable("python", args, **kwargs)  # type: ignore[no-untyped-call]

    def _links(self) -> Path:
        return Path(self._path) / "packages"

    def _path_file(self) -> Path:
        packages = sysconfig.get_path("purelib", "posix_prefix", vars={"base": self._path, "platbase": self._path})
        return Path(packages) / "shared.pth"

    def _path_file_text(self) -> str:
        """Lines of a .pth file: what comes from the commit, then the host's package folders with their own .pth files.

        Of the folders of a project elsewhere those that do not exist yet are put in too, which a plain line would not.
        """
        checkout = Path(self._path) / "project"
        own = [checkout, checkout / "src"]
        first = (
            [str(self._links())] if self._measured.is_kitsune else [f"import sys; sys.path += {list(map(str, own))}"]
        )
        not_shared = {self._measured.root, *self._measured.code_folders, self._measured.home}
        shared = [f"import site; site.addsitedir({str(folder)!r})" for folder in _host_packages(not_shared)]
        return "\n".join([*first, *shared]) + "\n"


def _running_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _host_packages(but: Iterable[Path]) -> list[Path]:
    """The package folders on this Python's path: all of it but the standard library and these folders."""
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    own |= {folder / "lib-dynload" for folder in own} | {folder.resolve() for folder in but}
    folders = [Path(entry).resolve() for entry in sys.path if entry and Path(entry).is_dir()]
    return [folder for folder in dict.fromkeys(folders) if folder not in own]
