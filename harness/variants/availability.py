"""Whether a variant can run here, and if not, why not."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import torch

from harness.failures import describe
from harness.variants.catalogue import Variant

_KITSUNE_NAMES = ("KitsuneOptimizer", "TrainStep")


def unavailable(variant: Variant, device: torch.device, kitsune_root: Path | None) -> str | None:
    """Why the variant cannot run on this device; None if it can.

    Args:
        variant: the variant.
        device: what it would run on.
        kitsune_root: the folder in which the commit under test is checked out, from which ``kitsune`` must come; None
            accepts the one that imports.
    """
    if variant.cuda_only is not None and device.type != "cuda":
        return variant.cuda_only
    reason = _precision(variant, device)
    if reason is None and variant.compile_mode is not None:
        reason = _compiler(device)
    if reason is None and variant.is_kitsune:
        reason = _kitsune(kitsune_root, variant.options)
    return reason


def _precision(variant: Variant, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if variant.precision == "amp" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{name} has no bfloat16 arithmetic"
    if variant.precision == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} has no TF32 arithmetic (it needs compute capability 8.0)"
    return None


def _compiler(device: torch.device) -> str | None:
    """Inductor needs Triton (and for that a C compiler) on CUDA and a C++ compiler on the CPU."""
    if device.type != "cuda":
        return _missing("a C++ compiler", "CXX", ("g++", "clang++", "c++"))
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton, which is not installed"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return f"Triton needs compute capability 7.0, which {torch.cuda.get_device_name(device)} lacks"
    return _missing("a C compiler", "CC", ("gcc", "clang", "cc"))


def _missing(what: str, variable: str, usual: tuple[str, ...]) -> str | None:
    candidates = (os.environ[variable],) if os.environ.get(variable) else usual
    if any(shutil.which(candidate) for candidate in candidates):
        return None
    return f"torch.compile needs {what}, and none of {', '.join(candidates)} is on the PATH"


def _kitsune(root: Path | None, options: Collection[str]) -> str | None:
    """Older commits may lack the package, its names, or these options of it."""
    spec = importlib.util.find_spec("kitsune")
    if spec is None or spec.origin is None or (root is not None and not _inside(Path(spec.origin), root)):
        return "this commit has no kitsune"
    try:
        import kitsune
    except Exception as error:  # noqa: BLE001  # the commit under test may break in any way, and that is its reason
        return f"this commit's kitsune cannot be imported: {describe(error).splitlines()[0]}"
    needed = (*_KITSUNE_NAMES, "Config") if options else _KITSUNE_NAMES
    absent = [name for name in needed if not hasattr(kitsune, name)]
    if options and not absent:
        known = {field.name for field in dataclasses.fields(kitsune.Config)}
        absent = [f"option {name}" for name in options if name not in known]
    return f"this commit's kitsune has no {' and no '.join(absent)}" if absent else None


def _inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())
