"""The switches of torch that decide which kernels a call runs.

They are read at every call. The public properties of `torch.backends` take microseconds each, for Python code around
the functions that are called here.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import _C


def ambient(device: torch.device) -> Hashable:
    """What is switched on at present, as far as it concerns operators on `device`."""
    kind = device.type
    common = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        _C._get_deterministic_algorithms(),
        torch.get_default_dtype(),
    )
    if kind != "cuda":
        return common
    return (
        *common,
        _C._get_fp32_precision_getter("cuda", "matmul"),
        _C._get_fp32_precision_getter("cuda", "conv"),
        _C._get_fp32_precision_getter("cuda", "rnn"),
        _C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _C._get_cublas_allow_bf16_reduced_precision_reduction(),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
    )
