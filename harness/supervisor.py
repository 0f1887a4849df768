"""Runs a command so that everything it starts ends with it: ``python -I supervisor.py PARENT PATIENCE COMMAND ...``.

asv's processes lie in groups of their own, and those of a measurement start others, so no signal reaches all of them.
This process adopts whatever loses its parent (Linux's "child subreaper") and ends after the last one. It ends them when
the command has ended, when a signal tells it to, and when the process that started it dies, be it killed. What it has
inherited, such as a lock, the command inherits too.

It is run as a script without anything else on its path, so it needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a run."""

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def main(parent: int, patience_s: float, command: list[str]) -> int:
    """Runs the command to its end, and ends what it leaves behind; its exit code, as shells tell it."""
    waited = {*ENDING, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    _control(_SET_CHILD_SUBREAPER, 1)
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # it died before it could be watched
    process = subprocess.Popen(command, close_fds=False, preexec_fn=_begin)
    while process.poll() is None:
        told = signal.sigwait(waited)
        if told != signal.SIGCHLD:
            _end(process, told, patience_s)
    _end_children()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _begin() -> None:
    """In the new process: signals as at the start of any, and an interrupt if this process is killed."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, signal.SIGCHLD})
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGINT)


def _end(process: subprocess.Popen[bytes], told: int, patience_s: float) -> None:
    """Asks the command to end what it has started, and then kills it. A key that interrupts this process has
    interrupted it as well.
    """
    for is_asked in (False, True) if told == signal.SIGINT else (True,):
        if is_asked:
            process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    process.kill()
    process.wait()


def _end_children() -> None:
    """Kills what is left; what a killed process has started becomes a child of this one in turn."""
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            _, _, fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            if int(fields.split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _control(option: int, value: int) -> None:
    """Linux's ``prctl``. Elsewhere the command alone is ended: nothing tells there what it has started."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
