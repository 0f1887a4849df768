"""Products of matrices in rows that are spaced apart, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kitsune.kernels.products import addmm_in_rows
from tests.kitsune.kernels.interpreter import error, normal

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(8, 6, 37), (1, 5, 3), (33, 16, 1), (7, 1, 10), (0, 4, 3), (4, 0, 3)]


def matrices(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A bias, and matrices whose product has rows of the last number; the second one is stored by columns."""
    rows, inner, columns = shape
    sizes = [(columns,), (rows, inner), (columns, inner)]
    bias, matrix, other = [normal(size, dtype, device, place) for place, size in enumerate(sizes)]
    return bias, matrix, other.t()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_product(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype, device: str) -> None:
    bias, matrix, other = matrices(shape, dtype, device)
    columns = shape[2]
    for row_stride in (columns, columns + 27):
        made = addmm_in_rows(bias if has_bias else None, matrix, other, row_stride=row_stride)
        exact = matrix.double() @ other.double() + (bias.double() if has_bias else 0)
        own = torch.addmm(bias, matrix, other) if has_bias else matrix @ other
        assert (made.dtype, made.shape) == (own.dtype, own.shape)
        assert made.stride() == (row_stride, 1)
        assert not made.numel() or error(made, exact) <= 2 * error(own, exact) + torch.finfo(dtype).eps


def test_other_biases() -> None:
    bias, matrix, other = matrices((4, 3, 5), torch.float32, "cpu")
    for added in (torch.ones(()), bias[:1], bias.expand(4, 5), torch.arange(4.0)[:, None]):
        assert torch.equal(addmm_in_rows(added, matrix, other, row_stride=8), torch.addmm(added, matrix, other))


def test_traced_it_has_the_same_layout_and_counts_its_operations() -> None:
    bias, matrix, other = matrices((4, 3, 5), torch.bfloat16, "cpu")
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        fake = addmm_in_rows(*(mode.from_tensor(one) for one in (bias, matrix, other)), row_stride=64)
    assert (fake.shape, fake.stride(), fake.dtype) == ((4, 5), (64, 1), torch.bfloat16)
    assert counter.get_total_flops() == 2 * 4 * 3 * 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"matrix": torch.ones(4)}, r"takes \(M, K\) and \(K, N\): got \(4,\) and \(3, 5\)"),
        ({"other": torch.ones(4, 5)}, r"got \(4, 3\) and \(4, 5\)"),
        ({"other": torch.ones(3, 5).double()}, "one dtype and device: got torch.float32 on cpu and torch.float64"),
        ({"bias": torch.ones(5).half()}, "one dtype and device"),
        ({"bias": torch.ones(7)}, r"adds what can be expanded to \(4, 5\): got \(7,\)"),
        ({"bias": torch.ones(2, 4, 5)}, r"adds what can be expanded to \(4, 5\): got \(2, 4, 5\)"),
        ({"row_stride": 4}, "row_stride of at least 5, the length of a row: got 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = {"bias": torch.ones(5), "matrix": torch.ones(4, 3), "other": torch.ones(3, 5), "row_stride": 5}
    with pytest.raises(ValueError, match=message):
        addmm_in_rows(**{**given, **changed})
