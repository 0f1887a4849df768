"""Tensors at places in a block of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kitsune.memory.pool import Block


def place(block: Block, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the memory of `block`, whose values are whatever lies there.

    It is a tensor of its own rather than a view in autograd's sense: tensors in one block have separate version
    counters, so that writing to one is no change of another. It keeps the block's memory, but not its right to
    it: after `MemoryPool.give` the bytes may belong to others.

    Args:
        offset: the byte at which its first element lies, a multiple of the size of an element.
        size: elements in each dimension.
        stride: as many, in elements; none is negative.

    Raises:
        ValueError: the tensor does not lie inside the block, is not aligned, or is none.
    """
    if len(size) != len(stride) or any(number < 0 for number in (*size, *stride)):
        raise ValueError(f"size {tuple(size)} and stride {tuple(stride)} do not describe a tensor")
    if offset < 0 or offset % dtype.itemsize:
        raise ValueError(f"offset {offset} is no multiple of {dtype.itemsize}, the bytes of an element of {dtype}")
    last = -1 if 0 in size else sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    end = offset + (last + 1) * dtype.itemsize
    if end > block.num_bytes:
        raise ValueError(f"a tensor from byte {offset} to {end} is not inside a block of {block.num_bytes} bytes")
    tensor = torch.empty(0, dtype=dtype, device=block.memory.device)
    begin = block.memory.storage_offset() + offset
    return tensor.set_(block.memory.untyped_storage(), begin // dtype.itemsize, tuple(size), tuple(stride))
