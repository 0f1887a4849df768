"""What operators over the rows of tensors share: which tensors they take, and how those lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**30  # rows, or columns: they are counted in int32, with room for a tile


def num_rows(tensor: Tensor) -> int:
    """How many rows there are: all dimensions but the last count them."""
    return math.prod(tensor.shape[:-1])


def row_stride(operator: str, name: str, tensor: Tensor) -> int:
    """How many elements lie from one row (*, N) to the next; 0 where there are no two rows.

    Raises:
        ValueError: a row is not contiguous, or the rows are not evenly spaced.
    """
    stride = expected = None
    even = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        even &= expected in (None, step)
        stride, expected = step if stride is None else stride, step * size
    if tensor.numel() and not even:
        raise ValueError(
            f"{operator} takes {name} with contiguous, evenly spaced rows: "
            f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return stride or 0


def check_rows(operator: str, name: str, tensor: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raises ValueError unless `tensor` has that shape, on that device, a known dtype, and evenly spaced rows."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{operator} takes {name} in float32, bfloat16 or float16: got {tensor.dtype}")
    if tensor.shape != tuple(shape) or tensor.device != device:
        raise ValueError(
            f"{operator} takes {name} of shape {tuple(shape)} on {device}: got {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.dim() < 1 or tensor.shape[-1] < 1 or max(num_rows(tensor), tensor.shape[-1]) > _MOST:
        raise ValueError(
            f"{operator} takes {name} of at most {_MOST} rows of 1 to {_MOST} columns: got {tuple(tensor.shape)}"
        )
    row_stride(operator, name, tensor)


def check_vector(
    operator: str, name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raises ValueError unless `tensor` has that shape, one of the dtypes, that device, and is contiguous."""
    if tensor.shape != tuple(shape) or tensor.dtype not in dtypes or tensor.device != device:
        raise ValueError(
            f"{operator} takes {name} of shape {tuple(shape)} in {' or '.join(map(str, dtypes))} on {device}: "
            f"got {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{operator} takes {name} dense in memory: got strides {tensor.stride()}")
