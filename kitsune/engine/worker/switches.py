"""The switches of torch on which kernels, their times and their results depend: read in one process, set in another."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

_PLAIN = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "utils.deterministic.fill_uninitialized_memory",
)
"""Attributes of `torch` that are set as they are read."""

_KERNELS_OF_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def switches() -> dict[str, Any]:
    """Those of this process, by name."""
    found: dict[str, Any] = {name: attrgetter(name)(torch) for name in _PLAIN}
    found["deterministic"] = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    found["threads"] = torch.get_num_threads()
    found["blas"] = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    for name in _KERNELS_OF_ATTENTION:
        found[name] = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
    return found


def set_switches(wanted: Mapping[str, Any]) -> None:
    """Sets all of them in this process.

    Raises:
        RuntimeError, ValueError: torch does not take one here.
    """
    present = switches()
    for name in _PLAIN:
        if wanted[name] != present[name]:
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(torch), attribute, wanted[name])
    enabled, warns = wanted["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.set_num_threads(wanted["threads"])
    if wanted["blas"] != present["blas"]:
        torch.backends.cuda.preferred_blas_library(wanted["blas"])
    for name in _KERNELS_OF_ATTENTION:
        if wanted[name] != present[name]:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(wanted[name])
    if (left := {name for name, value in switches().items() if value != wanted[name]}) != set():
        raise ValueError(f"torch did not take {', '.join(sorted(left))}")
