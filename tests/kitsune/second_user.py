"""Whether tests can act as another user of the machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile

OTHER = 65534
"""The number of a user of every system, who is nobody."""

_BECOMES_OTHER = f"""
import os, sys
os.chown(sys.argv[1], {OTHER}, {OTHER})
os.setgroups([])
os.setgid({OTHER})
os.setuid({OTHER})
"""


def _can_become_other() -> bool:
    """Root can; but not where it is root of a container alone, or has been denied it."""
    with tempfile.NamedTemporaryFile() as file:
        program = [sys.executable, "-S", "-c", _BECOMES_OTHER, file.name]
        return subprocess.run(program, capture_output=True, check=False).returncode == 0


HAS_SECOND_USER = _can_become_other()
