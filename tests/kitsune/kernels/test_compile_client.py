"""Kernels compiled by another process: what this one finds afterwards, and what happens where that one fails.

Tests run in processes that take it that there is a GPU (see `offline`): on others, kernels are other ones.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kitsune.kernels import compile_client, compile_server
from kitsune.kernels.compile_client import CompileServer, Elsewhere
from tests.kitsune.kernels.offline import choose_first, pretending
from tests.kitsune.kernels.test_launches import all_kernels, launch_all, launch_scalars

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER, AMPERE = ("cuda", 90, 32), ("cuda", 80, 32)
SCALARS = "kitsune.kernels.scalars_triton"
SECONDS = 120.0

Found = list[tuple[str, bool]]
"""Each kernel that a process made, in order, and whether it was found in Triton's cache."""


def scalars(width: int = 1) -> None:
    from kitsune.kernels import scalars_triton

    scalars_triton.launch([torch.zeros(()) for _ in range(width)], 1)


def started(target: Any = HOPPER) -> CompileServer:
    """The server of this process, ready."""
    server = CompileServer(target, [SCALARS])
    compile_client._shared.server = server
    assert server.is_ready(SECONDS)
    return server


def made(launch: Callable[[], None], cache: Path, *, elsewhere: bool = True) -> Found:
    import triton

    found: Found = []
    triton.knobs.cache.dir = str(cache)
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
    with compile_client.elsewhere() if elsewhere else nullcontext():
        launch()
    return found


def compiled_by_the_server(cache: Path) -> tuple[Found, Found]:
    choose_first()
    server = started()
    try:
        return made(launch_all, cache), made(launch_scalars, cache)
    finally:
        server.close()


def test_what_the_server_has_compiled_is_found(tmp_path: Path) -> None:
    found, again = pretending(compiled_by_the_server, tmp_path)
    assert {name for name, _ in found} == set(all_kernels())
    assert all(was_found for _, was_found in found)
    assert not again  # it is known by now


def compiled_here(cache: Path) -> Found:
    server = started()
    try:
        return made(scalars, cache, elsewhere=False)
    finally:
        server.close()


def test_only_where_it_is_asked_for(tmp_path: Path) -> None:
    assert pretending(compiled_here, tmp_path) == [("_add_to_scalars", False)]


def compiled_for_another_target(cache: Path) -> Found:
    server = started(AMPERE)
    try:
        return made(scalars, cache)
    finally:
        server.close()


def test_for_another_target_this_process_compiles(tmp_path: Path) -> None:
    assert pretending(compiled_for_another_target, tmp_path) == [("_add_to_scalars", False)]


def compiled_after_a_kill(cache: Path) -> tuple[Found, bool]:
    server = started()
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    found = made(scalars, cache)
    server.close()
    return found, server.has_ended


def test_a_server_that_was_killed_costs_nothing_else(tmp_path: Path) -> None:
    assert pretending(compiled_after_a_kill, tmp_path) == ([("_add_to_scalars", False)], True)


def hanging(cache: Path, how: str) -> tuple[Found, bool, bool]:
    """What is made of a kernel that hangs; whether the server has ended then, and its children."""
    server = started()
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children")
    compile_client._MOST_SECONDS = 1.0 if how == "given up" else SECONDS
    fifo = cache / "fifo"  # who opens it for reading waits
    os.mkfifo(fifo)
    os.environ["TRITON_PTXAS_PATH"] = str(_program(cache, f"cat {fifo}"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made, scalars, cache / "cache")
        _await(lambda: bool(children.read_text()))
        (child,) = map(int, children.read_text().split())
        del os.environ["TRITON_PTXAS_PATH"]
        if how == "killed":
            os.kill(server._process.pid, signal.SIGKILL)
        elif how == "closed":
            server.close()
        found = waiting.result(SECONDS)
    _await(lambda: not _runs(child))
    return found, server.has_ended, _runs(child)


def _program(folder: Path, command: str) -> Path:
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\ncase $* in *--version*) echo 'release 13.0, V13.0.0';; *) {command};; esac\n")
    path.chmod(0o755)
    return path


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "closed", "given up"])
def test_nobody_waits_for_a_kernel_that_hangs(how: str, tmp_path: Path) -> None:
    found, has_ended, child_runs = pretending(hanging, tmp_path, how)
    assert found == [("_add_to_scalars", False)]
    assert has_ended
    assert not child_runs


def compiled_by_threads(cache: Path) -> Found:
    import triton

    server, found = started(), []
    triton.knobs.cache.dir = str(cache)
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))

    def launch(width: int) -> None:
        with compile_client.elsewhere():
            scalars(width)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, (1, 2, 20, 200)))
    server.close()
    return found


def test_threads_share_it(tmp_path: Path) -> None:
    assert pretending(compiled_by_threads, tmp_path) == [("_add_to_scalars", True)] * 4


def failed(cache: Path) -> tuple[list[str], Found]:
    """Kernels that Triton refuses: the errors that this process meets, and what becomes of the next one."""
    from kitsune.kernels import scalars_triton

    server, errors = started(), []
    texts = torch.zeros(()), "no number"
    try:
        for _ in range(2):
            try:
                made(lambda: scalars_triton._add_to_scalars[(1,)](texts, 1), cache)
            except Exception as error:  # noqa: BLE001 - what it is, is asked below
                errors.append(type(error).__name__)
        return errors, made(scalars, cache)
    finally:
        server.close()


def test_errors_are_those_of_this_process(tmp_path: Path) -> None:
    """And those after them too: Triton leaves its mode in force when a compilation has failed."""
    errors, found = pretending(failed, tmp_path)
    assert len(errors) == 2
    assert len(set(errors)) == 1
    assert "RuntimeError" not in errors
    assert found == [("_add_to_scalars", True)]


def not_sent(cache: Path) -> bool:
    """What cannot be told to another process is compiled here."""
    server = started()
    src, target, options = (type("Given", (), {})() for _ in range(3))
    src.signature, src.constants, src.attrs = {}, {(0,): lambda: None}, {}
    target.backend, target.arch, target.warp_size = HOPPER

    def compiles() -> object:
        return src, target, options

    try:
        return Elsewhere(server, SCALARS, "_add_to_scalars").submit(compiles).result() == (src, target, options)
    finally:
        server.close()


def test_what_cannot_be_sent_is_compiled_here(tmp_path: Path) -> None:
    assert pretending(not_sent, tmp_path)


def test_what_triton_hands_over_may_look_otherwise() -> None:
    """Then nothing is asked of the server; the first argument would fail if it were."""
    assert Elsewhere(None, SCALARS, "_add_to_scalars").submit(lambda: 3).result() == 3  # type: ignore[arg-type]


def test_it_ends_when_it_is_closed() -> None:
    server = CompileServer(HOPPER, [])
    server.close()
    assert server.has_ended
    assert server._process.returncode == -signal.SIGKILL
    assert not server.is_ready()
    server.close()


def abandoned(parent: Connection) -> None:
    parent.send(CompileServer(HOPPER, [])._process.pid)
    os._exit(0)


def test_it_ends_with_its_parent() -> None:
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=abandoned, args=(theirs,))
    process.start()
    pid = ours.recv()
    _await(lambda: not _runs(pid))
    assert not _runs(pid)
    process.join()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # its parent is gone; who has taken it over may let it wait


def idle(connection: Connection) -> None:
    compile_server._IDLE_SECONDS = 0.1
    compile_server.serve(connection)


def test_it_ends_when_it_is_not_needed() -> None:
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=idle, args=(theirs,))
    process.start()
    package = str(Path(compile_server.__file__).parents[1])
    ours.send(tuple(compile_server.Start(list(sys.path), package, [], HOPPER)))
    process.join(SECONDS)
    assert process.exitcode == 0
    assert ours.recv() == 0


class Host(NamedTuple):
    """A machine, as far as it matters whether a server is started."""

    has_cuda: bool = True
    processors: int = 64
    gpus: tuple[tuple[int, int], ...] = ((9, 0),)
    executable: str = sys.executable
    frozen: bool = False
    interprets: bool = False

    def pretend(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: self.has_cuda)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        patch.setattr(torch.cuda, "get_device_capability", lambda index: self.gpus[index])
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(self.processors)))
        patch.setattr(compile_client, "_target", lambda: HOPPER)
        patch.setattr(sys, "executable", self.executable)
        patch.setattr(sys, "frozen", self.frozen, raising=False)
        patch.setenv("TRITON_INTERPRET", str(int(self.interprets)))  # a knob that was set would not follow it any more


@pytest.mark.parametrize(
    ("host", "is_started"),
    [
        (Host(), True),
        (Host(gpus=((9, 0), (9, 0))), True),
        (Host(gpus=((9, 0), (8, 0))), False),
        (Host(has_cuda=False), False),
        (Host(processors=3), False),
        (Host(executable=""), False),
        (Host(executable="/nowhere/python"), False),
        (Host(frozen=True), False),
        (Host(interprets=True), False),
    ],
)
def test_it_is_started_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch, host: Host, is_started: bool) -> None:
    host.pretend(monkeypatch)
    shared = compile_client._Shared()
    shared.start()
    server = shared.server
    shared.start()
    assert shared.server is server
    assert (server is not None) == is_started
    shared.close()


@pytest.mark.parametrize("code", [0, 1])
def test_one_that_failed_is_not_started_again(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    Host().pretend(monkeypatch)
    shared = compile_client._Shared()
    shared.start()
    first = shared.server
    assert first is not None
    first.close()
    first._process.returncode = code  # 0: it was not needed
    shared.start()
    assert (shared.server is first) == (code != 0)
    shared.close()


def test_without_a_thread_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Host().pretend(monkeypatch)

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    shared = compile_client._Shared()
    shared.start()
    assert shared.server is None


def test_it_is_the_parents() -> None:
    """After a fork, as of a loader of data, the child has none."""
    shared = compile_client._Shared()
    server = shared.server = CompileServer(HOPPER, [])
    pid = os.fork()
    if pid == 0:
        assert server._connection is not None
        os._exit(0 if shared.server is None and server._connection.closed else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    shared.close()


def forked_from_c(parent: Connection) -> None:
    """A trainer that ends, and a process that was forked from it by no means of Python's, which goes on."""
    server = CompileServer(HOPPER, [])
    libc = ctypes.PyDLL(None)  # which keeps Python's lock
    pid = libc.fork()
    if pid == 0:
        libc.sleep(600)
        os._exit(0)
    parent.send((server._process.pid, pid))
    os._exit(0)


def test_a_process_forked_from_c_does_not_keep_it_alive() -> None:
    """Though it holds the pipe open: no handler of Python's has closed it."""
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=forked_from_c, args=(theirs,))
    process.start()
    server, fork = ours.recv()
    process.join()
    try:
        _await(lambda: not _runs(server))
        assert not _runs(server)
        assert _runs(fork), "the pipe was closed, then"
    finally:
        os.kill(fork, signal.SIGKILL)


def of_another_process(parent: Connection) -> None:
    """What a process that was forked from C does with the server: whether it is ready there, and whether it took it."""
    server = compile_client._shared.server = CompileServer(HOPPER, [])
    server.is_ready(SECONDS)
    libc = ctypes.PyDLL(None)
    reading, writing = os.pipe()
    pid = libc.fork()
    if pid == 0:
        with compile_client.elsewhere():
            told = [server.is_ready(), server._send(("job",)), compile_client.current() is not None]
        compile_client._shared.close()  # as at the end of the process
        os.write(writing, str(told).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    parent.send((os.read(reading, 100).decode(), server.is_ready(SECONDS), _runs(server._process.pid)))
    server.close()


def test_a_process_forked_from_c_leaves_it_alone() -> None:
    """Nobody would answer there, and it is the parent's."""
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=of_another_process, args=(theirs,))
    process.start()
    assert ours.poll(SECONDS), "it waits for an answer"
    assert ours.recv() == ("[False, False, False]", True, True)
    process.join(SECONDS)
    assert process.exitcode == 0


def test_after_a_fork_another_one_can_be_started() -> None:
    """A thread of the parent may have been starting one, which is not there to give the lock back."""
    shared = compile_client._Shared()
    shared._starting.acquire()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if shared._starting.acquire(timeout=5.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shared._starting.release()


@pytest.mark.gpu
def test_forms_are_compiled_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import triton

    from kitsune.kernels import linear_triton, tuning

    caplog.set_level(logging.DEBUG, logger="kitsune")  # with what goes wrong in the server, if that starts here
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(tuning, "_costs", lambda device: tuning.CostCache(tmp_path, {}))
    found: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    compile_client.start()
    server = compile_client._shared.server
    assert server is not None
    assert server.is_ready(SECONDS)
    x, weight, bias = (torch.randn(*size, device="cuda") for size in ((48, 96), (80, 96), (80,)))
    y = torch.empty(48, 80, device="cuda")
    linear_triton.linear(x, weight, bias, y, torch.empty(0, device="cuda"), activation="relu", allow_tf32=False)
    torch.testing.assert_close(y, torch.relu(x @ weight.t() + bias), rtol=1e-4, atol=1e-4)
    assert len(found) > 1
    assert all(found), [path.name for path in tmp_path.iterdir()]
