"""Kernels compiled by another process: what this one finds afterwards, and what happens where that one fails.

Tests run in processes that take it that there is a GPU (see `offline`): on others, kernels are other ones.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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


def killed_in_the_midst(cache: Path) -> bool:
    """Whether a thread that waits for it goes on."""
    server = started()
    os.kill(server._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made, scalars, cache)
        while len(server._waiting) == 0:
            time.sleep(0.01)
        os.kill(server._process.pid, signal.SIGKILL)
        return waiting.result(SECONDS) == [("_add_to_scalars", False)]


def test_nobody_waits_for_a_server_that_has_ended(tmp_path: Path) -> None:
    assert pretending(killed_in_the_midst, tmp_path)


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


def failed(cache: Path) -> str:
    """A kernel that Triton refuses: the error that this process meets, as without the server."""
    from kitsune.kernels import casts_triton

    server = started()
    try:
        made(lambda: casts_triton._cast[(1,)](1, 2, 3), cache)
    except TypeError as error:
        return str(error)
    finally:
        server.close()
    return ""


def test_errors_are_those_of_this_process(tmp_path: Path) -> None:
    assert "missing" in pretending(failed, tmp_path)


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
    assert server._process.returncode == 0
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
    deadline = time.monotonic() + SECONDS
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
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


def test_where_no_process_can_be_started_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(compile_client._Shared, "_target", lambda self: HOPPER)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    shared = compile_client._Shared()
    shared.start()
    assert shared.server is None


@pytest.mark.parametrize(("has_cuda", "processors"), [(False, 64), (True, 2)])
def test_it_is_started_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch, has_cuda: bool, processors: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    shared = compile_client._Shared()
    shared.start()
    assert shared.server is None


def test_it_is_the_parents() -> None:
    """After a fork, as of a loader of data, the child has none."""
    shared = compile_client._Shared()
    shared.server = CompileServer(HOPPER, [])
    pid = os.fork()
    if pid == 0:
        os._exit(0 if shared.server is None else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    shared.close()


@pytest.mark.gpu
def test_forms_are_compiled_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton

    from kitsune.kernels import linear_triton, tuning

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
    assert all(found)
