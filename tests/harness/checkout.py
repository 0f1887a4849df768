"""A small repository with this checkout's harness and models, in which asv can run in seconds."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# One small case, hardly measured: these tests judge what is kept, not what it says.
_SMALL = """

CASES = (Case("mlp", 4, "cpu", 4, default=True),)
_SHORT = dict.fromkeys(_SHORT, Effort(2, (2, 3), 0.05, 0.001, 0.05, 60.0, 120.0))
"""

KITSUNE = '''
"""A Kitsune that changes nothing."""

import torch


class Status:
    mode, replays = "eager", 0

    def as_dict(self):
        return {"mode": "eager", "reason": "a stand-in"}


class KitsuneOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizer, params, **options):
        self.inner = optimizer(params, **options)

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()

    def status(self):
        return Status()


class TrainStep:
    def __init__(self, model, loss_fn, optimizer, **options):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def status(self):
        return Status()
'''


class Checkout:
    """The repository under ``folder``; its home directory is there too, so nothing of the user's is touched."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        self._home = folder / "home"
        self.root.mkdir(parents=True)
        self._home.mkdir()
        for package in ("harness", "models"):
            shutil.copytree(ROOT / package, self.root / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "asv.conf.json", self.root)
        with (self.root / "harness" / "profiles.py").open("a") as profiles:
            profiles.write(_SMALL)
        (self.root / ".gitignore").write_text(".asv/\nresults/\n__pycache__/\n")
        self.git("init", "--quiet", "--initial-branch=main")

    def clone(self, folder: Path, *options: str) -> Checkout:
        """A clone of this repository below another folder, made with these options of ``git clone``."""
        clone = copy.copy(self)
        clone.root = folder / "clone"
        self.git("clone", "--quiet", *options, f"file://{self.root}", str(clone.root))
        return clone

    def git(self, *arguments: str) -> str:
        """The output of a git command."""
        identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, message: str, kitsune: str | None = None) -> str:
        """Commits everything, with this text as ``kitsune/__init__.py`` where one is given; the full hash."""
        if kitsune is not None:
            (self.root / "kitsune").mkdir(exist_ok=True)
            (self.root / "kitsune" / "__init__.py").write_text(kitsune)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        return self.git("rev-parse", "HEAD")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs ``python ARGUMENTS`` in the root; output and errors together in ``stdout``."""
        process = self.start(*arguments, **variables)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Starts ``python ARGUMENTS`` as :meth:`run` does, in a process group of its own."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ASV_", "HARNESS_"))},
            "HOME": str(self._home),
            "HARNESS_MACHINE": "test-machine",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(_is_elsewhere, os.environ.get("PYTHONPATH", "").split(os.pathsep))),
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_heed_hangups,
        )


def _heed_hangups() -> None:
    """Under `nohup` they are ignored, as in all that is started there."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _is_elsewhere(folder: str) -> bool:
    """Whether what is imported from `folder` is not of the checkout that these tests belong to."""
    return folder != "" and not Path(folder).resolve().is_relative_to(ROOT)
