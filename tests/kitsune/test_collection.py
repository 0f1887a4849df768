"""What becomes of garbage, in this process and in those forked from it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from kitsune import collection
from kitsune.collection import no_garbage_collection

PROGRAM = """
import gc, os, runpy, sys
spare_garbage_in_forks = runpy.run_path(sys.argv[2])["spare_garbage_in_forks"]

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        if os.getpid() != parent:
            os.write(1, b"destroyed in the child\\n")

parent = os.getpid()
gc.disable()
if sys.argv[1] == "spared":
    for _ in range(2):
        spare_garbage_in_forks()
Cycle()
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    gc.collect()
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.parametrize(("kind", "wanted"), [("spared", ""), ("as it is", "destroyed in the child\n")])
def test_a_forked_process_leaves_garbage_alone(kind: str, wanted: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, collection.__file__], capture_output=True, text=True, check=True
    )
    assert run.stdout == wanted


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_goes_on_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with no_garbage_collection():
            assert not gc.isenabled()
            with no_garbage_collection():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_the_first_thread_to_leave_does_not_let_it_go_on_in_another() -> None:
    is_inside, may_leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    def stay() -> None:
        with no_garbage_collection():
            is_inside.set()
            may_leave.wait(10)
            seen.append(gc.isenabled())

    thread = threading.Thread(target=stay)
    with no_garbage_collection():
        thread.start()
        assert is_inside.wait(10)
    may_leave.set()
    thread.join()
    assert seen == [False]
    assert gc.isenabled()
