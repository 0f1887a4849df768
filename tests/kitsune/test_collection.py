"""What becomes of garbage, in this process and in those forked from it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kitsune import collection

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
