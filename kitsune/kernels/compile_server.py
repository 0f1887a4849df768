"""A process that compiles Triton's kernels into Triton's cache, each in a process of its own.

In threads, compilers wait for one another: each holds Python's lock while it reads the kernel. Processes do not, but a
training process must not be forked with its threads and its GPU, and to import torch takes each new one seconds. So
this file is run as a program that imports what is needed once, sees no GPU, has one thread, and is forked for each
kernel, as Inductor's workers are (`torch/_inductor/compile_worker`).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import types
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

_IDLE_SECONDS = 120.0
"""After so long without a kernel it ends."""

_LOOK_SECONDS = 1.0
"""So often it looks whether the process that started it is still there."""


class Start(NamedTuple):
    """What the server is told first.

    Attributes:
        path: where modules are searched, as `sys.path`.
        package: the folder of `kitsune`.
        modules: those that are imported before any kernel is compiled, for they are needed by most.
        target: the arguments of Triton's `GPUTarget`.
    """

    path: list[str]
    package: str
    modules: list[str]
    target: tuple[str, Any, int]


class Job(NamedTuple):
    """A kernel to compile.

    Attributes:
        number: tells it from others.
        module, name: where its `launch_triton.Kernel` is found.
        signature, constants, attrs: what Triton's `ASTSource` takes of it.
        options: as Triton takes them.
        environ: the environment; Triton reads much of it.
        cache: the folder of Triton's cache.
    """

    number: int
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    environ: dict[str, str]
    cache: str


def serve(parent: Connection) -> None:
    """Takes a `Start` and then jobs, and sends 0 when it is ready and the number of each job that has ended.

    It returns long after the last job.

    Raises:
        EOFError: the other end is closed.
    """
    _prepare(Start(*parent.recv()))
    parent.send(0)
    running: dict[object, tuple[BaseProcess, int]] = {}
    while True:
        ends = [process.sentinel for process, _ in running.values()]
        ready = wait([parent, *ends], None if running else _IDLE_SECONDS)
        for sentinel in [one for one in ready if one is not parent]:
            process, number = running.pop(sentinel)
            process.join()
            parent.send(number)
        if parent in ready:
            job = Job(*parent.recv())
            process = get_context("fork").Process(target=_compile, args=(job, parent), daemon=True)
            process.start()
            running[process.sentinel] = process, job.number
        if not ready:
            return


class _Driver:
    """What Triton asks a driver, of a GPU that this process does not see."""

    def __init__(self, target: object) -> None:
        self._target = target

    def get_current_target(self) -> object:
        return self._target


def _prepare(start: Start) -> None:
    sys.path[:] = start.path
    package = types.ModuleType("kitsune")  # all of it would import the compiler of PyTorch too, which takes seconds
    package.__path__ = [start.package]
    sys.modules["kitsune"] = package
    from triton.backends.compiler import GPUTarget  # where this is imported from is known since a moment ago
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    driver.set_active(_Driver(GPUTarget(*start.target)))
    for name in start.modules:
        importlib.import_module(name)
    triton_key()  # reads all of Triton; those that are forked know it


def _compile(job: Job, parent: Connection) -> None:
    parent.close()  # who waits for the server is to notice when it has ended, whatever its children do
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    os.environ.clear()
    os.environ.update(job.environ)
    triton.knobs.cache.dir = job.cache
    kernel = getattr(importlib.import_module(job.module), job.name).compiled
    source = ASTSource(kernel, job.signature, job.constants, job.attrs)
    triton.compile(source, target=driver.active.get_current_target(), options=job.options)


def end_with(parent_pid: int) -> None:
    """From now on this process ends soon after its parent, with all processes of its session.

    The pipe alone does not tell: a process that was forked from the parent holds it open, too, where the fork was none
    of Python's. An alarm comes whatever is waited for, and needs no thread; forked processes do not get it.
    """

    def look(*_: object) -> None:
        if os.getppid() != parent_pid:
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # whom it served has ended, so all it began does
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # with the connection open: the other end takes the process to have ended when it is closed
