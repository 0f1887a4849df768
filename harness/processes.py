"""Fresh processes: each runs one function on one job, and whatever becomes of it, the caller goes on.

A process is forked from a server that has imported torch but touched no device, so it starts in milliseconds and shares
no state with those before it. Where CUDA does not work in such a process, it is spawned from nothing instead.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Generic, Literal, TypeVar

from harness.failures import describe, last_lines

Job = TypeVar("Job")
Result = TypeVar("Result")
Note = Callable[[str], None]
Method = Literal["forkserver", "spawn"]

_FAREWELL_SECONDS = 5.0
_PRELOAD = [f"{__package__}.preload"]


class ProcessFailed(Exception):
    """A process that did not return a result.

    ``reason`` says in its first line what became of it, then what it wrote last; ``note`` is the last thing it said
    that it was doing (None: nothing).
    """

    def __init__(self, reason: str, note: str | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.note = note


class Launcher:
    """Runs functions in fresh processes, one at a time.

    Args:
        method: "forkserver" starts quickly; "spawn" imports everything anew in each process.
    """

    def __init__(self, method: Method = "forkserver") -> None:
        self.method = method
        self._context: SpawnContext | ForkServerContext
        if method == "spawn":
            self._context = multiprocessing.get_context("spawn")
        else:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(_PRELOAD)
            ensure_running()  # it imports while the caller goes on

    def run(self, function: Callable[[Job, Note], Result], job: Job, *, timeout_s: float) -> Result:
        """``function(job, note)`` in a fresh process.

        Args:
            function: importable by name; it may call ``note(text)`` to say what it is doing.
            job: picklable, as is the result.
            timeout_s: seconds after which the process is killed.

        Raises:
            ProcessFailed: the function raised, the process died, or it took too long.
        """
        with tempfile.TemporaryDirectory(prefix="harness-") as folder:
            output = Path(folder) / "output"
            return _Child(self._context, function, job, output).result(time.monotonic() + timeout_s, timeout_s)


class _Child(Generic[Job, Result]):
    """One process from its start to its end."""

    def __init__(
        self,
        context: SpawnContext | ForkServerContext,
        function: Callable[[Job, Note], Result],
        job: Job,
        output: Path,
    ) -> None:
        self._output = output
        self._note: str | None = None
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(sender, output, function, job))
        self._process.start()
        sender.close()

    def result(self, deadline: float, timeout_s: float) -> Result:
        """Waits for the function's result; the process has ended when this returns or raises."""
        patience_s = 0.0
        try:
            while self._receiver.poll(max(0.0, deadline - time.monotonic())):
                kind, content = self._receiver.recv()
                if kind == "note":
                    self._note = content
                    continue
                patience_s = _FAREWELL_SECONDS
                if kind == "error":
                    raise ProcessFailed(content, self._note)
                return content  # type: ignore[no-any-return]  # what the function returned, through a pipe
            raise self._failure(f"not finished after {timeout_s:.0f} s and killed")
        except EOFError:
            self._process.join()
            raise self._failure(_exit_text(self._process.exitcode)) from None
        finally:
            self._end(patience_s)

    def _failure(self, what: str) -> ProcessFailed:
        doing = f" (while it was at: {self._note})" if self._note else ""
        try:
            written = last_lines(self._output.read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            written = ""
        return ProcessFailed(f"{what}{doing}\n{written}".strip(), self._note)

    def _end(self, patience_s: float) -> None:
        """Nothing more is expected of the process: it may end by itself for so long, then it is killed."""
        self._receiver.close()
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(sender: Connection, output: Path, function: Callable[[Job, Note], Result], job: Job) -> None:
    """The life of a child: everything it prints goes to a file, its notes and its result through the pipe."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    try:
        result = function(job, lambda text: sender.send(("note", text)))
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to the parent
        sender.send(("error", describe(error)))
    else:
        sender.send(("result", result))


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ": the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"the process was killed by {name}{hint}"
    return f"the process ended with exit code {code} and no result"
