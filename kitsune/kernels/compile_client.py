"""Has kernels compiled by another process (`compile_server`), so that Python's lock is free meanwhile.

What was compiled is found in Triton's cache under Triton's own key, which covers the kernel's source, its arguments and
the versions. So whatever goes wrong there costs time only: what is not found is compiled here.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another one than Python's, before 3.11
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

_MOST_SECONDS = 120.0  # for a kernel; what takes longer hangs

Target = tuple[str, Any, int]
"""The arguments of Triton's `GPUTarget`."""


class CompileServer:
    """The other process. It ends with this one, when it is closed, or some minutes after it was last needed.

    It is this process's alone. In one that was forked from it, it has ended.

    Args:
        target: what kernels are compiled for.
        modules: imported there before the first kernel.

    Raises:
        OSError, RuntimeError: no process can be started, or no thread.
    """

    def __init__(self, target: Target, modules: Sequence[str]) -> None:
        self.target = target
        self._owner = os.getpid()
        self._numbers, self._sending = itertools.count(1), threading.Lock()
        self._starting: Future[None] = Future()
        self._waiting = {0: self._starting}
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", compile_server.__file__, str(theirs.fileno()), str(self._owner)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the training
                env={**_environ(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._connection: Connection | None = ours
        self._listener = threading.Thread(target=self._listen, args=(ours,), name="kitsune-compile-server", daemon=True)
        try:
            self._listener.start()
        except RuntimeError:
            self._kill()
            self._process.wait()
            ours.close()
            raise
        self._send(tuple(Start(list(sys.path), str(Path(__file__).parents[1]), list(modules), target)))

    @property
    def has_ended(self) -> bool:
        return self._connection is None or not self._is_ours

    @property
    def may_be_replaced(self) -> bool:
        """Whether it has ended because it was not needed, or is another process's."""
        return self.has_ended and (self._process.returncode == 0 or not self._is_ours)

    def is_ready(self, timeout: float = 0.0) -> bool:
        """Whether it has imported what it needs, within so many seconds, and runs."""
        if not self._is_ours:  # nobody would answer
            return False
        try:
            self._starting.result(timeout)
        except FutureTimeoutError:
            return False
        return not self.has_ended

    def compile(self, module: str, name: str, source: Any, options: dict[str, Any], cache: str) -> None:
        """Puts a kernel into Triton's cache, or does nothing if it cannot. If it takes minutes, the server is closed.

        Args:
            module, name: where the `launch_triton.Kernel` is found.
            source: an `ASTSource` of it.
            options: as Triton takes them.
            cache: the folder of Triton's cache.
        """
        number = next(self._numbers)
        done = self._waiting[number] = Future()
        job = Job(number, module, name, source.signature, source.constants, source.attrs, options, _environ(), cache)
        if not self._send(tuple(job)):
            self._waiting.pop(number, None)
            return
        try:
            done.result(_MOST_SECONDS)
        except FutureTimeoutError:
            _log.debug("compile server: %s took too long", name)
            self.close()

    def close(self) -> None:
        """Ends the process at once, and what it compiles."""
        if self._is_ours:
            self._kill()
            self._listener.join()

    def abandon(self) -> None:
        """In a process that was forked: lets go of the server, which is the parent's."""
        if self._connection is not None:
            self._connection.close()

    @property
    def _is_ours(self) -> bool:
        """Not so after a fork, of which Python knows nothing where it was none of Python's."""
        return os.getpid() == self._owner

    def _kill(self) -> None:
        """With its children, and theirs: it leads a session. What Triton writes to its cache is moved there whole."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, what: tuple[Any, ...]) -> bool:
        """Whether it was sent."""
        if not self._is_ours:  # whoever holds the lock may be in the other process
            return False
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
            self._kill()  # its children, if something else has killed it
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
        self._is_wanted, self._starting = True, threading.Lock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):  # else there are no forks
            os.register_at_fork(after_in_child=self.forget)

    def start(self) -> None:
        """Starts it, where that is worth it and it does not run. One that failed is not started again."""
        with self._starting:
            if self._is_wanted and (self.server is None or self.server.may_be_replaced):
                self._is_wanted = _can_start()
                self.server = self._started() if self._is_wanted else None

    def _started(self) -> CompileServer | None:
        modules = [f"kitsune.kernels.{path.stem}" for path in sorted(Path(__file__).parent.glob("*_triton.py"))]
        try:
            return CompileServer(_target(), modules)
        except (OSError, RuntimeError) as error:
            _log.debug("compile server: it did not start: %s", error)
            self._is_wanted = False
            return None

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def forget(self) -> None:
        """In a process that was forked: it is the parent's, and so is the thread that may be starting one."""
        if self.server is not None:
            self.server.abandon()
        self.server = None
        self._starting = threading.Lock()


def _can_start() -> bool:
    """Where GPUs differ, kernels do, and the server sees none of them."""
    if sys.platform != "linux" or not torch.cuda.is_available():
        return False
    if not sys.executable or getattr(sys, "frozen", False):  # that is no Python, but an application
        return False
    from triton import knobs  # Triton is optional

    if knobs.runtime.interpret:  # nothing is compiled
        return False
    kinds = set(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))
    return len(kinds) == 1 and len(os.sched_getaffinity(0)) >= _LEAST_PROCESSORS


def _target() -> Target:
    from triton.runtime import driver  # Triton is optional

    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def _environ() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


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
