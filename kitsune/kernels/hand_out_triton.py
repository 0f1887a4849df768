"""The Triton kernel of `kitsune.execution.handout`, and its launch. To be imported where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched

_MOST_PER_WARP = 1024  # elements


# One compilation serves all alignments: there must be none in the midst of a recording.
@launched(do_not_specialize=["value", "cell", "count", "pitch"])
def _hand_out(value: tl.tensor, cell: tl.tensor, count: int, pitch: int, block_size: tl.constexpr) -> None:
    await_previous()
    place = tl.load(cell).to(tl.pointer_type(value.dtype.element_ty))
    offsets = tl.arange(0, block_size)
    tl.store(place + offsets, tl.load(value + offsets, offsets < count), offsets < count)
    tl.debug_barrier()  # all warps have read the cell
    tl.store(cell, (place + pitch).to(tl.int64))


def hand_out(value: torch.Tensor, cell: torch.Tensor, pitch: int) -> None:
    """Copies a value to the address that a cell holds, and moves that on; on the current stream.

    Args:
        value: at most some thousand elements, dense in memory, on the current CUDA device.
        cell: one int64 there: the address of memory for so many elements of that type.
        pitch: by how many elements the address is moved.
    """
    count = value.numel()
    num_warps = 1 if count <= _MOST_PER_WARP else 8
    _hand_out[(1,)](value, cell, count, pitch, block_size=triton.next_power_of_2(count), num_warps=num_warps)
