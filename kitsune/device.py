"""What this machine can do. Everything that Kitsune needs beyond plain PyTorch is asked for here."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from kitsune.errors import Refusal


def refuse_bfloat16(device: torch.device) -> Refusal | None:
    """None if `device` computes in bfloat16 natively."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    name = torch.cuda.get_device_name(device)
    return Refusal(f"{name} has no bfloat16 arithmetic", remedy="train in float32, or in float16 with a GradScaler")


def refuse_inductor(device: torch.device) -> Refusal | None:
    """None if Inductor can generate code for `device`: Triton for CUDA, a C++ compiler for the CPU."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return Refusal(
                "compile=True needs Triton, which is not installed", remedy="pip install kitsune-torch[triton]"
            )
        if torch.cuda.get_device_capability(device) < (7, 0):
            return Refusal(f"Triton needs compute capability 7.0, {torch.cuda.get_device_name(device)} is older")
        return None
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if any(shutil.which(compiler) for compiler in compilers):
        return None
    return Refusal(f"compile=True needs a C++ compiler, and none of {', '.join(compilers)} is on the PATH")


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
