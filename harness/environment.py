"""Facts of this machine and its software, its name, and the machine file that asv wants.

Only :func:`facts` needs torch; everything else works, and is quick, without importing it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from harness.whole_files import write_whole

_NAME_VARIABLE = "HARNESS_MACHINE"
_ASV_MACHINE_FILE = Path("~/.asv-machine.json")
_ASV_FILE_VERSION = 1


class MachineFileError(Exception):
    """asv's machine file cannot be read or written. The message names the file and what to do."""


@dataclass(frozen=True)
class Gpu:
    """The first visible NVIDIA GPU as the driver describes it."""

    name: str
    driver: str
    memory_bytes: int


def machine_name() -> str:
    """The name under which this machine's results are kept: its GPU, else its processor and number of cores.

    ``HARNESS_MACHINE`` overrides it, for telling apart machines of one kind.

    Raises:
        ValueError: ``HARNESS_MACHINE`` cannot be the name of a folder.
    """
    chosen = os.environ.get(_NAME_VARIABLE)
    if chosen:
        if _slug(chosen) != chosen:
            raise ValueError(
                f"{_NAME_VARIABLE} is {chosen!r}; use lower-case letters, digits, '.' and '-': {_slug(chosen)!r}"
            )
        return chosen
    gpu = visible_gpu()
    return _slug(gpu.name) if gpu is not None else _slug(f"{_cpu()} {_cores()} cores")


@cache
def visible_gpu() -> Gpu | None:
    """The GPU that torch would use, as ``nvidia-smi`` reports it; None where torch has no CUDA or there is no GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _torch_cuda_version() is None or visible in ("", "-1", "NoDevFiles"):
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    if visible:
        query.append(f"--id={visible.split(',')[0]}")
    try:
        answer = subprocess.run(query, capture_output=True, encoding="utf-8", timeout=60, check=True).stdout
        name, driver, mebibytes = (field.strip() for field in answer.splitlines()[0].split(","))
        return Gpu(name, driver, int(mebibytes) * 2**20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def asv_machine() -> dict[str, str]:
    """This machine in the fields that asv knows, and software beside them, which asv shows as facets."""
    gpu = visible_gpu()
    return {
        "machine": machine_name(),
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cpu": _cpu(),
        "num_cpu": str(_cores()),
        "ram": str(_ram_bytes()),
        "gpu": gpu.name if gpu is not None else "none",
        "driver": gpu.driver if gpu is not None else "none",
        "cuda": _torch_cuda_version() or "none",
        "torch": _version_of("torch") or "none",
        "triton": _version_of("triton") or "none",
    }


def write_asv_machine_file(path: Path | None = None) -> str:
    """Make sure that asv knows this machine, so that it never asks. Entries of other machines are kept.

    Args:
        path: the file; None is asv's own, ``~/.asv-machine.json``.

    Returns:
        The machine's name.

    Raises:
        MachineFileError: the file is damaged or cannot be written. It is then as it was.
    """
    path = (_ASV_MACHINE_FILE if path is None else path).expanduser()
    machine = asv_machine()
    known = _known_machines(path)
    if known.get(machine["machine"]) != machine:
        content = {**known, machine["machine"]: machine, "version": _ASV_FILE_VERSION}
        try:
            write_whole(path, json.dumps(content, indent=4, sort_keys=True).encode())
        except OSError as error:
            raise MachineFileError(f"{path}: cannot be written ({error.strerror}); check its permissions") from error
    return machine["machine"]


def _known_machines(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise MachineFileError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except ValueError as error:
        raise MachineFileError(f"{path}: not valid JSON ({error}); repair it or move it away") from error
    if not isinstance(content, dict) or content.get("version", _ASV_FILE_VERSION) != _ASV_FILE_VERSION:
        raise MachineFileError(f"{path}: not a version {_ASV_FILE_VERSION} machine file of asv; move it away")
    return content


def facts() -> dict[str, object]:
    """What a run records of its machine. Imports torch and, where there is a GPU, initialises CUDA.

    ``device_type`` is "cuda" or "cpu"; sizes are bytes; None stands for what this machine does not have.
    """
    import torch

    on_cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if on_cuda else None
    gpu = visible_gpu()
    return {
        "device": _cpu() if properties is None else properties.name,
        "device_type": "cuda" if on_cuda else "cpu",
        "driver": gpu.driver if on_cuda and gpu is not None else None,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
        "torch": str(torch.__version__),
        "triton": _version_of("triton"),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "ram_bytes": _ram_bytes(),
        "gpu_memory_bytes": None if properties is None else properties.total_memory,
        "compute_capability": None if properties is None else f"{properties.major}.{properties.minor}",
        "gpu_uuid": None if properties is None else str(properties.uuid),
        "boot_id": _boot_id(),
    }


def _torch_cuda_version() -> str | None:
    """The CUDA version torch was built for, without importing torch; None for a build without CUDA or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return None if match is None else match[1]


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match is not None else platform.processor() or platform.machine()


def _cores() -> int:
    """Cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _boot_id() -> str | None:
    """What the kernel drew when this machine was started; None where it draws nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
