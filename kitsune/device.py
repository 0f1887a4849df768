"""What this machine can do. Everything that Kitsune needs beyond plain PyTorch is asked for here."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from kitsune.errors import Refusal

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def refuse_bfloat16(device: torch.device) -> Refusal | None:
    """None if `device` computes in bfloat16 natively."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    name = torch.cuda.get_device_name(device)
    return Refusal(f"{name} has no bfloat16 arithmetic", remedy="train in float32, or in float16 with a GradScaler")


def refuse_inductor(device: torch.device) -> Refusal | None:
    """None if Inductor can generate code for `device`: Triton for CUDA, a C++ compiler for the CPU."""
    if device.type == "cuda":
        return refuse_triton(device, "Inductor")
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if any(shutil.which(compiler) for compiler in compilers):
        return None
    return Refusal(f"Inductor needs a C++ compiler, and none of {', '.join(compilers)} is on the PATH")


def refuse_triton(device: torch.device, purpose: str) -> Refusal | None:
    """None if Triton can generate code for a CUDA device, `purpose` being what needs it."""
    if importlib.util.find_spec("triton") is None:
        return Refusal(f"{purpose} needs Triton, which is not installed", remedy="pip install kitsune-torch[triton]")
    if torch.cuda.get_device_capability(device) < (7, 0):
        name = torch.cuda.get_device_name(device)
        return Refusal(f"{purpose} needs Triton, which needs compute capability 7.0: {name} is older")
    return _refuse_launchers(purpose)


def refuse_bulk_copies(device: torch.device) -> Refusal | None:
    """None if kernels may fetch tiles by the bulk copy engine of `device` ("tensor memory accelerator"), or need not.

    On the CPU operators are their references.
    """
    if device.type != "cuda":
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        return None
    name = torch.cuda.get_device_name(device)
    return Refusal(f"bulk copies need NVIDIA's compute capability 9.0 or later: {name} has none")


def _refuse_launchers(purpose: str) -> Refusal | None:
    """None if there is what Triton builds the launchers of its kernels with: a C compiler and Python's headers.

    Triton takes the whole of CC for the name of a program, even where it is empty.
    """
    given = os.environ.get("CC")
    if given is not None and shutil.which(given) is None:
        reason = f"{purpose} needs Triton, which needs a C compiler: CC is {given!r}, and there is no such program"
        return Refusal(reason, remedy="set CC to the name of a program, without arguments, or unset it")
    if given is None and not any(shutil.which(compiler) for compiler in ("gcc", "clang")):
        return Refusal(f"{purpose} needs Triton, which needs a C compiler: neither gcc nor clang is on the PATH")
    headers = Path(sysconfig.get_config_var("INCLUDEPY"))
    if not (headers / "Python.h").exists():
        return Refusal(f"{purpose} needs Triton, which needs Python's C headers: {headers} has no Python.h")
    return None


def refuse_streams(device: torch.device) -> Refusal | None:
    """None if captured steps may run on several streams of `device`."""
    if device.type == "cuda":
        return None
    return Refusal(f"num_streams needs CUDA streams, and the step runs on {device.type}")


def refuse_fusion(device: torch.device) -> Refusal | None:
    """None if operators of captured steps may be fused on `device`."""
    if device.type != "cuda":
        return Refusal(f"enable_fusion needs CUDA, and the step runs on {device.type}")
    return refuse_triton(device, "enable_fusion")


def stream_reader(device: torch.device) -> Callable[[], int]:
    """Tells which of the streams of `device` is current; always 0 on the CPU.

    To ask a device what it is takes longer than that, and the public way ten times as long.
    """
    if device.type != "cuda":
        return int
    return partial(torch._C._cuda_getCurrentRawStream, device.index)


def index_reader(device: torch.device) -> Callable[[], int | None]:
    """Tells which device of the type of `device` is current, by its index; always None on the CPU.

    The public way takes ten times as long.
    """
    current: Callable[[], int | None] = torch._C._cuda_getDevice if device.type == "cuda" else _no_index
    return current


def _no_index() -> None:
    return None


@contextmanager
def on_stream(stream: int, device: torch.device) -> Iterator[None]:
    """Within, a stream that has been current is so again; what was current waits for it afterwards."""
    if stream_reader(device)() == stream:
        yield
        return
    earlier = torch.cuda.ExternalStream(stream, device)
    with torch.cuda.stream(earlier):
        yield
    torch.cuda.current_stream(device).wait_stream(earlier)


def leave_recordings_alone(device: torch.device) -> None:
    """From now on no CUDA call of this thread breaks what another one records, in whichever error mode.

    By default CUDA forbids calls that may allocate while any thread records in the mode `"global"`, which is torch's
    default; they fail, and the recording too (`cuThreadExchangeStreamCaptureMode` in "CUDA Driver API").
    """
    if device.type != "cuda":
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no Linux, or no CUDA but ROCm
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
