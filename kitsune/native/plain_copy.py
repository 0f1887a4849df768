"""Copies of tensors whose bytes lie as those of some memory, past torch's dispatcher.

They are written twice: here, and in `plain_copy.c`, which takes a third of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
"""Takes the addresses of a copy and of what is copied, a number of bytes and a stream; returns 0 if it is under way."""


class PlainCopy(Protocol):
    """Copies tensors to some memory."""

    def __call__(self, tensor: Any) -> bool:
        """Whether a copy of the bytes is under way; else nothing is done.

        They are not what the memory is to have where dtype, layout or device are others, the tensor has no bytes, or
        they are those of the negative numbers. A stream of another device than the current one is not meant, either.
        """


class PythonPlainCopy:
    """Copies without anything that has to be built.

    Args:
        memory: a tensor, which is to live as long as this does.
        copy: the address of a function as `COPY` describes it.
        current_index: tells the index of the current device.
        current_stream: tells which of its streams is current.
    """

    def __init__(
        self,
        memory: Any,
        copy: int,
        current_index: Callable[[], int | None],
        current_stream: Callable[[], int],
    ) -> None:
        self._dtype, self._device = memory.dtype, memory.device
        self._shape, self._stride = memory.shape, memory.stride()
        self._address, self._num_bytes = memory.data_ptr(), memory.nbytes
        self._copy, self._current_index, self._current_stream = COPY(copy), current_index, current_stream

    def __call__(self, tensor: Any) -> bool:
        is_alike = (
            tensor.dtype is self._dtype
            and tensor.stride() == self._stride
            and tensor.shape == self._shape
            and tensor.device == self._device
            # The number of a stream is another one's where another device is current.
            and self._current_index() == self._device.index
            and not tensor.is_neg()
        )
        address = tensor.data_ptr() if is_alike else 0
        return address != 0 and self._copy(self._address, address, self._num_bytes, self._current_stream()) == 0
