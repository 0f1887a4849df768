"""Has kernels compiled by another process (`compile_server`), so that Python's lock is free meanwhile.

What was compiled is found in Triton's cache under Triton's own key, which covers the kernel's source, its arguments and
the versions. So whatever goes wrong there costs time only: what is not found is compiled here.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kitsune.kernels import compile_server
from kitsune.kernels.compile_server import Job, Start

_log = logging.getLogger("kitsune")

_LEAST_PROCESSORS = 4  # where there are fewer, one process more takes from training what it gives to compiling

_CLOSING_SECONDS = 5.0

Target = tuple[str, Any, int]
"""The arguments of Triton's `GPUTarget`."""


class CompileServer:
    """The other process. It ends with this one, when it is closed, or some minutes after it was last needed.

    Args:
        target: what kernels are compiled for.
        modules: imported there before the first kernel.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, target: Target, modules: Sequence[str]) -> None:
        self.target = target
        self._numbers, self._sending = itertools.count(1), threading.Lock()
        self._starting: Future[None] = Future()
        self._waiting = {0: self._starting}
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", compile_server.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the training
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        self._connection: Connection | None = ours
        self._listener = threading.Thread(target=self._listen, args=(ours,), name="kitsune-compile-server", daemon=True)
        self._listener.start()
        self._send(tuple(Start(list(sys.path), str(Path(__file__).parents[1]), list(modules), target)))

    @property
    def has_ended(self) -> bool:
        return self._connection is None

    def is_ready(self, timeout: float = 0.0) -> bool:
        """Whether it has imported what it needs, within so many seconds, and runs."""
        try:
            self._starting.result(timeout)
        except TimeoutError:
            return False
        return not self.has_ended

    def compile(self, module: str, name: str, source: Any, options: dict[str, Any], cache: str) -> None:
        """Puts a kernel into Triton's cache, or does nothing if it cannot.

        Args:
            module, name: where the `launch_triton.Kernel` is found.
            source: an `ASTSource` of it.
            options: as Triton takes them.
            cache: the folder of Triton's cache.
        """
        number = next(self._numbers)
        done = self._waiting[number] = Future()
        environ = {key: value for key, value in os.environ.items() if key.startswith("TRITON_")}
        job = Job(number, module, name, source.signature, source.constants, source.attrs, options, environ, cache)
        if self._send(tuple(job)):
            done.result()
        else:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """Ends the process, and what it compiles."""
        if not self._send(None):
            return
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listener.join()

    def _send(self, what: tuple[Any, ...] | None) -> bool:
        """Whether it was sent."""
        with self._sending:
            if self._connection is None:
                return False
            try:
                self._connection.send(what)
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:  # Python's ways to refuse
                _log.debug("compile server: a kernel was not sent: %s", error)
                return False
        return True

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._waiting.pop(connection.recv()).set_result(None)
        except (EOFError, OSError):
            self._process.wait()
        with self._sending:  # from now on nothing is sent
            self._connection = None
            connection.close()
        while self._waiting:
            _, one = self._waiting.popitem()
            one.set_result(None)


class Elsewhere(Executor):
    """For `triton.AsyncCompileMode`: compiles a kernel once a server has put it into the cache, if it can.

    Args:
        module, name: where the `launch_triton.Kernel` is found.
    """

    def __init__(self, server: CompileServer, module: str, name: str) -> None:
        self._server, self._module, self._name = server, module, name

    def submit(self, compiles: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """What Triton hands over takes nothing."""
        self._ask(inspect.getclosurevars(compiles).nonlocals)
        made: Future[Any] = Future()
        try:
            made.set_result(compiles())
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            made.set_exception(error)
        return made

    def _ask(self, given: Any) -> None:
        """The function that Triton hands over tells nothing of the kernel; its variables do, in all versions so far."""
        from triton import knobs  # Triton is optional

        source, target, options = (given.get(name) for name in ("src", "target", "options"))
        if source is None or target is None or options is None:
            return
        if (target.backend, target.arch, target.warp_size) == self._server.target:
            self._server.compile(self._module, self._name, source, dict(options.__dict__), knobs.cache.dir)


class _Shared:
    """The server of this process."""

    def __init__(self) -> None:
        self.server: CompileServer | None = None
        self._starting = threading.Lock()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.forget)

    def start(self) -> None:
        """Starts it, where that is worth it and it does not run."""
        if not torch.cuda.is_available() or (os.cpu_count() or 1) < _LEAST_PROCESSORS or not sys.executable:
            return
        with self._starting:
            if self.server is None or self.server.has_ended:
                self.server = self._started()

    def _started(self) -> CompileServer | None:
        modules = [f"kitsune.kernels.{path.stem}" for path in sorted(Path(__file__).parent.glob("*_triton.py"))]
        try:
            return CompileServer(self._target(), modules)
        except OSError as error:
            _log.debug("compile server: it did not start: %s", error)
            return None

    def _target(self) -> Target:
        from triton.runtime import driver  # Triton is optional

        target = driver.active.get_current_target()
        return target.backend, target.arch, target.warp_size

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def forget(self) -> None:
        """In a process that was forked: it is the parent's."""
        self.server = None


_shared = _Shared()
start = _shared.start

_elsewhere: ContextVar[bool] = ContextVar("kitsune_compile_elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within, on this thread, the server compiles, once it is ready."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def current() -> CompileServer | None:
    """The server by which this thread is to have kernels compiled, if there is one."""
    server = _shared.server if _elsewhere.get() else None
    return server if server is not None and server.is_ready() else None
