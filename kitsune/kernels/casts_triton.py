"""The Triton kernel of `kitsune.kernels.casts`, and its launches. To be imported where Triton is installed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kitsune.kernels.adam_triton import _ALIGNMENT_BYTES, _NO_BLOCK, _at, _odd, _pick
from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.tuning import choose


class Form(NamedTuple):
    """How many elements a program casts at once, how often, and with how many warps.

    To find the tensor of a program takes a few instructions a tensor, so that large tensors are cast faster by few
    programs, and small ones by many.
    """

    block: int
    chunks: int
    num_warps: int


_FORMS = (
    Form(1024, 1, 4),
    Form(1024, 4, 4),
    Form(2048, 1, 4),
    Form(2048, 4, 4),
    Form(2048, 4, 8),
    Form(4096, 4, 8),
)

_WIDTHS = (16, 64, 128)  # numbers of tensors a launch; the arguments of the widest take 3 KiB of 4


# Sizes and first blocks come as odd numbers, 2 n + 1, so that one compilation serves all models: Triton compiles anew
# for numbers in tuples that are 1 or multiples of 16.
@launched()
def _cast(
    inputs: tl.tuple,
    outputs: tl.tuple,
    odd_sizes: tl.tuple,
    odd_first_blocks: tl.tuple,
    aligned: tl.constexpr,
    chunks: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    await_previous()
    block = tl.program_id(0)
    first_block = _pick(block, odd_first_blocks, odd_first_blocks) >> 1
    size = (_pick(block, odd_first_blocks, odd_sizes) >> 1).to(tl.int64)
    source = _pick(block, odd_first_blocks, inputs)
    result = _pick(block, odd_first_blocks, outputs)
    start = (block - first_block).to(tl.int64) * (chunks * block_size)
    if start + chunks * block_size <= size:
        for chunk in tl.static_range(chunks):
            offsets = start + chunk * block_size + tl.arange(0, block_size)
            value = tl.load(_at(source, offsets, aligned))
            tl.store(_at(result, offsets, aligned), value.to(result.dtype.element_ty))
    else:
        for chunk in tl.static_range(chunks):
            offsets = start + chunk * block_size + tl.arange(0, block_size)
            value = tl.load(_at(source, offsets, aligned), offsets < size)
            tl.store(_at(result, offsets, aligned), value.to(result.dtype.element_ty), offsets < size)


def launch(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Casts `inputs` into `outputs` on the current stream, in one launch for up to 128 tensors that hold anything.

    The arguments are those of `kitsune.kernels.casts.cast_many`, which checks them, and its results.
    """
    pairs = [(one, other) for one, other in zip(inputs, outputs, strict=True) if one.numel()]
    width = next((width for width in _WIDTHS if len(pairs) <= width), _WIDTHS[-1])
    for begin in range(0, len(pairs), width):
        _launch(pairs[begin : begin + width], width)


def _launch(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], width: int) -> None:
    sizes = [source.numel() for source, _ in pairs]
    padded = [*pairs, *[pairs[-1]] * (width - len(pairs))]
    sources, results = zip(*padded, strict=True)
    aligned = all(tensor.data_ptr() % _ALIGNMENT_BYTES == 0 for pair in pairs for tensor in pair)

    def run(form: Form) -> None:
        counts = (int(triton.cdiv(size, form.block * form.chunks)) for size in sizes)
        first_blocks = [0, *itertools.accumulate(counts)]
        num_blocks = first_blocks.pop()
        _cast[(num_blocks,)](
            sources,
            results,
            _odd(sizes + [1] * (width - len(pairs))),
            _odd(first_blocks + [_NO_BLOCK] * (width - len(pairs))),
            aligned=aligned,
            chunks=form.chunks,
            block_size=form.block,
            num_warps=form.num_warps,
        )

    source, result = pairs[0]
    run(choose(f"cast_many {source.dtype} {result.dtype} {aligned} {sizes}", _FORMS, run, source.device))
