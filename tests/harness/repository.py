"""Git for tests."""

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command in a folder."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
