"""The Triton kernel of `kitsune.execution.handout`, and its launch. To be imported where Triton is installed."""

from __future__ import annotations

import torch
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched


# One compilation serves all alignments: there must be none in the midst of a recording.
@launched(do_not_specialize=["value", "cell"])
def _hand_out(value: tl.tensor, cell: tl.tensor) -> None:
    await_previous()
    place = tl.load(cell).to(tl.pointer_type(value.dtype.element_ty))
    tl.store(place, tl.load(value))
    tl.store(cell, (place + 1).to(tl.int64))


def hand_out(value: torch.Tensor, cell: torch.Tensor) -> None:
    """Copies a value to the address that a cell holds, and makes that the address after it; on the current stream.

    Args:
        value: of one element, on the current CUDA device.
        cell: one int64 there: the address of memory for an element of that type.
    """
    _hand_out[(1,)](value, cell, num_warps=1)
