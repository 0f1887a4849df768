"""`kitsune::addmm_in_rows`: a matrix product whose rows lie further apart than they are long.

Libraries multiply matrices fast whose rows begin at multiples of 16 bytes. Where the number of columns does not make
it so, as in the logits of a vocabulary of 50257 tokens, rows that are spaced apart do, for the product and for all
that read it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

torch.library.define(
    "kitsune::addmm_in_rows", "(Tensor? bias, Tensor matrix, Tensor other, *, int row_stride) -> Tensor"
)


def addmm_in_rows(bias: Tensor | None, matrix: Tensor, other: Tensor, *, row_stride: int) -> Tensor:
    """`matrix @ other + bias`, as PyTorch computes it, in another layout.

    Args:
        bias: what `torch.addmm` adds, or None.
        matrix: (M, K), of a dtype that `torch.mm` takes.
        other: (K, N), of the same dtype.
        row_stride: how many elements lie from one row of the result to the next, N or more.

    Returns:
        (M, N) with strides (row_stride, 1).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the rows would overlap.
    """
    return torch.ops.kitsune.addmm_in_rows.default(  # type: ignore[no-any-return]
        bias, matrix, other, row_stride=row_stride
    )


def _result(bias: Tensor | None, matrix: Tensor, other: Tensor, *, row_stride: int) -> Tensor:
    name = "addmm_in_rows"
    if matrix.dim() != 2 or other.dim() != 2 or matrix.shape[1] != other.shape[0]:
        raise ValueError(f"{name} takes (M, K) and (K, N): got {tuple(matrix.shape)} and {tuple(other.shape)}")
    for operand in (other, bias):
        if operand is not None and (operand.dtype, operand.device) != (matrix.dtype, matrix.device):
            raise ValueError(
                f"{name} takes operands of one dtype and device: got {matrix.dtype} on {matrix.device} and "
                f"{operand.dtype} on {operand.device}"
            )
    shape = (matrix.shape[0], other.shape[1])
    if bias is not None and not _expands_to(bias.shape, shape):
        raise ValueError(f"{name} adds what can be expanded to {shape}: got {tuple(bias.shape)}")
    if row_stride < shape[1]:
        raise ValueError(f"{name} takes a row_stride of at least {shape[1]}, the length of a row: got {row_stride}")
    return matrix.new_empty_strided(shape, (row_stride, 1))


def _expands_to(shape: torch.Size, wanted: tuple[int, int]) -> bool:
    own = (1,) * (len(wanted) - len(shape)) + tuple(shape)
    return len(own) == len(wanted) and all(size in (1, other) for size, other in zip(own, wanted, strict=True))


def _computed(bias: Tensor | None, matrix: Tensor, other: Tensor, *, row_stride: int) -> Tensor:
    result = _result(bias, matrix, other, row_stride=row_stride)
    if bias is None:
        return torch.mm(matrix, other, out=result)
    return torch.addmm(bias, matrix, other, out=result)


torch.library.register_fake("kitsune::addmm_in_rows", _result)
for _device in ("CPU", "CUDA"):
    torch.library.impl("kitsune::addmm_in_rows", _device, _computed)


@register_flop_formula(torch.ops.kitsune.addmm_in_rows)
def _flops(
    bias: object, matrix: tuple[int, int], other: tuple[int, int], *, row_stride: int, out_shape: object = None
) -> int:
    return 2 * matrix[0] * matrix[1] * other[1]
