"""What operators over batches of images (N, C, H, W) share: windows, layouts, and the limits of 32-bit offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST_ELEMENTS = 2**30  # of one image: its offsets are 32-bit numbers in the kernels, blocks beyond the end included

ZERO = 0
"""An argument of kernels, whose value the compiler does not know: numbers to which it is added may be any of 32 bits.
Otherwise LLVM computes with small coordinates as pairs of 16 bits, and there ptxas (12.8 and 12.9, for compute
capability 9.0) errs: where only one half of `add.s16x2` of a register and a constant is used, it adds 0. To the
compiler it is a multiple of 16, so that addresses stay aligned."""


def windows(size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    """How many windows fit along height and width, rounded down: `(size + 2 padding - kernel) // stride + 1`."""
    return [
        (length + 2 * pad - extent) // step + 1
        for length, extent, step, pad in zip(size, kernel, stride, padding, strict=True)
    ]


def dense(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """An uninitialized tensor (N, C, H, W) beside `like`, in the strides of channels_last or contiguous tensors.

    Raises:
        ValueError: one image has more than 2**30 elements.
    """
    if math.prod(shape[1:]) > _MOST_ELEMENTS:
        raise ValueError(f"one image of a result may have 2**30 elements: got {list(shape[1:])}")
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(list(shape), dtype=dtype, device=like.device, memory_format=memory_format)


def check_images(name: str, images: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError unless `images` has four dimensions, on `device`, and none spans more than 2**30 elements."""
    if images.dim() != 4 or images.device != device:
        raise ValueError(
            f"{name} must have four dimensions (N, C, H, W) and lie on {device}: "
            f"got {tuple(images.shape)} on {images.device}"
        )
    span = sum((size - 1) * step for size, step in zip(images.shape[1:], images.stride()[1:], strict=True))
    if span >= _MOST_ELEMENTS:
        raise ValueError(f"one image of {name} may span 2**30 elements: got {span + 1}")
