"""What measured times depend on beside the operator."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import torch


def identity(device: torch.device) -> dict[str, str]:
    """What times depend on beside the operator: the device, and everything that brings or chooses its kernels.

    Kitsune stands with a digest of its sources, which is finer than its version.
    """
    facts = {"torch": torch.__version__, "triton": _triton_version(), "kitsune": _digest_of_sources()}
    if device.type != "cuda":
        return {"device": f"{device.type} {_cpu_name()}", "threads": str(torch.get_num_threads()), **facts}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "driver": _first_line(Path("/proc/driver/nvidia/version"), "") or "unknown",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        **facts,
    }


@functools.cache
def _triton_version() -> str:
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") is not None else "none"


@functools.cache
def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _cpu_name() -> str:
    return _first_line(Path("/proc/cpuinfo"), "model name") or platform.machine()


def _first_line(path: Path, beginning: str) -> str | None:
    """The first line with that beginning, without what is before a colon; None where there is no such file or line."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(beginning)), None)
