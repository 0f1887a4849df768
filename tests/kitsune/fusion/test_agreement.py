"""What counts as agreement of a replacement with what it replaces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitsune.capture.trace import trace
from kitsune.fusion.agreement import agree, examples
from kitsune.fusion.match import Alone
from tests.kitsune.fusion.running import parts

CPU = torch.device("cpu")
X = torch.zeros(4, 4)


def half_forgotten(x: Tensor) -> list[Tensor]:
    return [torch.cat([torch.zeros_like(x[:1]), x[1:]]).sin() * 2]


def in_another_type(x: Tensor) -> list[Tensor]:
    return [(x.sin() * 2).bfloat16()]


def hardly_updated(x: Tensor) -> list[Tensor]:
    return [x.mul_(1.00095).sum()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: [x.sin() * 2], half_forgotten),
        (lambda x: [x.sin() * 2], in_another_type),
        (lambda x: [x.mul_(1.001).sum()], hardly_updated),
        (lambda x: [torch.where(x.isnan(), x, x * 2)], lambda x: [x * 2.5]),
    ],
)
def test_small_differences_are_seen(before: Callable[..., list[Tensor]], after: Callable[..., list[Tensor]]) -> None:
    assert agree(parts(before, before, X), CPU)
    assert not agree(parts(before, after, X), CPU)


def test_masks_are_not_all_the_same() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    with_mask = trace(lambda x, mask: [torch.where(mask, x, 0)], [X, mask])
    without = trace(lambda x, mask: [x * 0], [X, mask])
    given = trace(lambda *tensors: list(tensors), [X, mask])
    assert not agree(Alone(with_mask, without, given), CPU)


def test_low_precision_is_allowed_its_rounding() -> None:
    def before(x: Tensor) -> list[Tensor]:
        return [(x.bfloat16().sin() * 3).float()]

    assert agree(parts(before, lambda x: [x.sin() * 3], X), CPU)
    assert not agree(parts(lambda x: [x.sin() * 3], before, X), CPU)


def test_float32_stays_float32() -> None:
    """An error as of TF32 in one of two operands is ten times that of a sum in another order."""

    def summed(x: Tensor) -> list[Tensor]:
        return [x.sin() @ x.t()]

    def in_another_order(x: Tensor) -> list[Tensor]:
        return [x[:, 512:].sin() @ x[:, 512:].t() + x[:, :512].sin() @ x[:, :512].t()]

    given = torch.zeros(8, 1024)
    assert agree(parts(summed, in_another_order, given), CPU)
    assert not agree(parts(summed, lambda x: [summed(x)[0] * (1 + 2e-5)], given), CPU)


def in_float32_alone(x: Tensor, y: Tensor) -> list[Tensor]:
    """As PyTorch's own kernels do where cuDNN's do not."""
    return [(x.bfloat16().float() @ y.float()).bfloat16()]


def in_parts(x: Tensor, y: Tensor) -> list[Tensor]:
    """A product whose sums are rounded again and again, as those of some libraries are."""
    total = torch.zeros(4, 4, dtype=torch.bfloat16)
    for one, other in zip(x.bfloat16().split(4, 1), y.split(4), strict=True):
        total = (total + one @ other).to(torch.bfloat16)
    return [total]


def test_a_replacement_may_be_more_exact() -> None:
    given = torch.zeros(4, 1024), torch.zeros(1024, 4, dtype=torch.bfloat16)
    assert agree(parts(in_parts, in_float32_alone, *given), CPU)
    assert not agree(parts(in_float32_alone, in_parts, *given), CPU)
    assert not agree(parts(in_parts, lambda x, y: [in_float32_alone(x, y)[0] * 1.03], *given), CPU)


def counting(x: Tensor, total: Tensor) -> list[Tensor]:
    total.add_(in_parts(x, x.t().bfloat16())[0].float())
    return []


def counting_alone(x: Tensor, total: Tensor) -> list[Tensor]:
    total.add_(in_float32_alone(x, x.t().bfloat16())[0].float())
    return []


def test_so_may_what_it_writes() -> None:
    given = torch.zeros(4, 1024), torch.zeros(4, 4)
    assert agree(parts(counting, counting_alone, *given), CPU)


def test_examples_are_valid_and_repeat() -> None:
    numbers = torch.zeros(5, dtype=torch.int64)
    inputs = torch.zeros(3, 2).t(), torch.zeros(3), numbers, torch.zeros((), dtype=torch.half), X[:1].expand(7, 4)
    given = trace(lambda *tensors: list(tensors), inputs)
    made = examples(given, CPU)
    for one, wanted in zip(made, inputs, strict=True):
        assert (one.dtype, one.size(), one.stride()) == (wanted.dtype, wanted.size(), wanted.stride())
    assert (made[1] > 0).all()
    assert not made[2].any()
    assert all(map(torch.equal, made, examples(given, CPU)))
