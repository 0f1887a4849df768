"""Copies tensors to memory of a graph at every replay, past torch's dispatcher where their bytes lie alike.

It calls the driver (`cuMemcpyDtoDAsync` in "CUDA Driver API"), as torch does in the end.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from kitsune.device import index_reader, stream_reader
from kitsune.kernels.casts import is_dense
from kitsune.native.build import plain_copy_type


class Copier:
    """Copies tensors to `memory`, as `memory.copy_` does without autograd, on the stream that is current."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        device = memory.device
        # Of complex tensors the bytes do not tell whether they are conjugate.
        copy = _driver_copy(device.type) if is_dense(memory) and not memory.is_complex() else None
        self._copy_plainly = (
            _nothing if copy is None else plain_copy_type()(memory, copy, index_reader(device), stream_reader(device))
        )

    def __call__(self, tensor: torch.Tensor) -> None:
        if not self._copy_plainly(tensor):
            self.memory.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)


def _nothing(_tensor: torch.Tensor) -> bool:
    return False


@cache
def _driver_copy(kind: str) -> int | None:
    """The address of the driver's function for devices of a type; None where there is none, as on the CPU and for ROCm.

    See `kitsune.native.plain_copy.COPY`.
    """
    if kind != "cuda":
        return None
    try:
        copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    except (OSError, AttributeError):
        return None
    return ctypes.cast(copy, ctypes.c_void_p).value
