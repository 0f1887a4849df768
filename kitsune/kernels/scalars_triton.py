"""The Triton kernel of `kitsune.kernels.scalars`, and its launch. To be imported where Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched

_WIDTHS = (1, 8, 64, 256)  # numbers of scalars a launch; a kernel takes 4 KiB of arguments


# One compilation of each width serves all numbers. Addresses in tuples are specialized: those that are multiples of 16,
# as of tensors that have memory of their own, share one.
@launched(do_not_specialize=["number"])
def _add_to_scalars(scalars: tl.tuple, number: tl.tensor) -> None:
    await_previous()
    place = scalars[0]
    for index in tl.static_range(1, len(scalars)):
        place = tl.where(tl.program_id(0) == index, scalars[index], place)
    tl.store(place, (tl.load(place) + number).to(place.dtype.element_ty))


def launch(scalars: Sequence[torch.Tensor], number: int) -> None:
    """Adds `number` to `scalars` on the current stream, in one launch for up to 256 of them.

    The arguments are those of `kitsune.kernels.scalars.add_to_scalars_`, which checks them.
    """
    width = next((width for width in _WIDTHS if len(scalars) <= width), _WIDTHS[-1])
    for first in range(0, len(scalars), width):
        part = scalars[first : first + width]
        padded = (*part, *[part[-1]] * (width - len(part)))
        _add_to_scalars[(len(part),)](padded, number, num_warps=1)
