"""Scalars that are added up in place come out the same, and what others may see is written as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kitsune.capture.sums import add_out_of_place
from tests.kitsune.capture.test_frontend import guarded

IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, "add_", "mul_"}


def from_zero(x: Tensor, weight: Tensor) -> list[Tensor]:
    total = torch.zeros(())
    for factor in (1, 2):
        total += (x * weight * factor).sum()
    total /= 2
    return [total.add_(1.0)]


def with_another(x: Tensor, weight: Tensor) -> list[Tensor]:
    penalty, total = weight.square().mean(), (x * weight).sum()
    total += penalty
    total -= 0.5
    return [total, penalty]


def viewed(x: Tensor, weight: Tensor) -> list[Tensor]:
    total = (x * weight).sum()
    before = total.detach()
    total += 1
    return [total, before]


def read_afterwards(x: Tensor, weight: Tensor) -> list[Tensor]:
    total = (x * weight).sum()
    total.add_(1)
    return [total * 2]


def of_many(x: Tensor, weight: Tensor) -> list[Tensor]:
    product = x * weight
    product += 1
    return [product]


@pytest.mark.parametrize(
    ("function", "remaining"), [(from_zero, 0), (with_another, 0), (viewed, 1), (read_afterwards, 1), (of_many, 1)]
)
def test_scalars_are_added_out_of_place_where_nobody_sees_it(
    function: Callable[..., list[Tensor]], remaining: int
) -> None:
    call, runner = guarded(function)
    x, weight = torch.randn(3), torch.randn(3, requires_grad=True)
    call(x, weight)
    (graph,) = runner.graphs
    add_out_of_place(graph)
    assert len([node for node in graph.graph.nodes if node.target in IN_PLACE]) == remaining
    for _ in range(2):
        found, wanted = call(x, weight), function(x, weight)
        assert all(map(torch.equal, found, wanted))
        grads: list[Any] = [torch.autograd.grad(results[0].sum(), weight) for results in (found, wanted)]
        assert torch.equal(grads[0][0], grads[1][0])
