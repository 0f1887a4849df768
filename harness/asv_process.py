"""asv as this harness starts it: its commands, its names for benchmarks, and one run of it from start to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from harness import supervisor
from harness.interruptions import Interrupted

SOME_FAILED = 2
"""asv's exit code where benchmarks failed."""

_POLL_SECONDS = 0.3
_STOP_SECONDS = 5.0
_MESSAGE = re.compile(r"(\[[ \d.]+%\] )?·+ (?!=|For parameters)")


def command(configuration: Path, *arguments: str) -> list[str]:
    """The command line of asv with these arguments over the commits of the project that is so configured."""
    return [sys.executable, "-m", "asv", "--config", str(configuration), *arguments]


def pattern(track: str, variant: str, case: str) -> str:
    """A regular expression for asv's names: of one variant of one case the benchmarks that ``track`` matches."""
    return rf"\.{track}\('{re.escape(variant)}', '{re.escape(case)}'\)$"


def run(
    arguments: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    log: Path,
    lock: int | None,
    on_tick: Callable[[], None],
) -> int:
    """Runs asv in a folder. Its messages appear as they come, without its tables; the log keeps all.

    Args:
        arguments: the whole command line.
        lock: as for :func:`start`.
        on_tick: called several times a second and once at the end.

    Returns:
        asv's exit code.

    Raises:
        Interrupted: as was told; asv and what it had started have ended.
    """
    process = start(arguments, folder, variables, lock, is_read=True)
    reader = threading.Thread(target=_copy_messages, args=(process, log), daemon=True)
    reader.start()  # it reads to the end whatever happens: asv would wait for ever to be read
    with ended(process):
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            on_tick()
    reader.join()
    on_tick()
    return process.returncode


def start(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str], lock: int | None, *, is_read: bool = False
) -> subprocess.Popen[str]:
    """Starts asv in a folder, below a process that ends after all that asv starts (:mod:`harness.supervisor`).

    Args:
        lock: a file that asv holds open too, so that what is locked by it stays so while asv lives.
        is_read: whether output and errors come by the process's ``stdout``; else they appear where this process's do.
    """
    above = [sys.executable, "-I", supervisor.__file__, str(os.getpid()), str(_STOP_SECONDS)]
    return subprocess.Popen(
        [*above, *arguments],
        cwd=folder,
        env=dict(variables),
        encoding="utf-8",
        errors="replace",
        pass_fds=() if lock is None else (lock,),
        stdout=subprocess.PIPE if is_read else None,
        stderr=subprocess.STDOUT if is_read else None,
    )


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process that :func:`start` has started where waiting for it is given up."""
    number: int = signal.SIGTERM
    try:
        yield
    except Interrupted as interruption:
        number = interruption.number
        raise
    finally:
        if process.poll() is None:
            process.send_signal(number)
            process.wait()


def _copy_messages(process: subprocess.Popen[str], log: Path) -> None:
    """Shows asv's messages but not its tables, which have a row for every variant of every case there is."""
    assert process.stdout is not None
    with _Log(log) as kept:
        for line in process.stdout:
            kept.write(line)
            if _MESSAGE.match(line):
                print(line, end="", flush=True)


class _Log:
    """A file of lines. Where it can no longer be written, that is said once, and the lines are lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> _Log:
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            self._give_up(error)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be flushed has been told
                self._file.close()

    def write(self, line: str) -> None:
        """Appends a line."""
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print(f"{self._path}: cannot be written ({error.strerror}); asv's output is not kept", flush=True)
        self.__exit__()
        self._file = None
