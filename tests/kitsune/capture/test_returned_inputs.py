"""Results that are inputs come back as the same tensors, and the graph need not return them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kitsune.graph import dataflow
from tests.kitsune.capture.test_frontend import guarded


def counted(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    count += 1
    return x * count, count


def by_method(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, count.mul_(2).add_(1)


def by_out(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 3, torch.add(count, 1, out=count)


@pytest.mark.parametrize("function", [counted, by_method, by_out])
def test_what_is_written_in_place_comes_back_as_itself(function: Any) -> None:
    call, runner = guarded(function)
    count, wanted = torch.ones(()), torch.ones(())
    for _ in range(4):
        x = torch.randn(3)
        (result, returned), (expected, _) = call(count, x), function(wanted, x)
        assert returned is count
        assert torch.equal(count, wanted)
        assert torch.equal(result, expected)
    assert {len(dataflow.outputs(graph.graph)) for graph in runner.graphs} == {1}


def test_what_only_shares_memory_is_a_result() -> None:
    call, runner = guarded(lambda count, x: (x * 2, count.add_(1)[None], count.detach()))
    count = torch.ones(())
    _, viewed, detached = call(count, torch.ones(3))
    assert viewed.shape == (1,)
    assert detached is not count
    assert len(dataflow.outputs(runner.graphs[0].graph)) == 3


def test_a_parameter_that_is_written_without_gradients_comes_back_as_itself() -> None:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            weight /= 2
        return x * weight, weight

    call, runner = guarded(function)
    weight = torch.nn.Parameter(torch.ones(3))
    for _ in range(3):
        assert call(weight, torch.ones(3))[1] is weight
    assert weight.tolist() == [0.125] * 3
    assert len(dataflow.outputs(runner.graphs[0].graph)) == 1


def test_what_gradients_go_through_is_a_result() -> None:
    call, runner = guarded(lambda total, x: (total.add_(x.sum()), x * 2))
    total = torch.zeros(())
    call(total, torch.ones(3, requires_grad=True))
    assert len(dataflow.outputs(runner.graphs[0].graph)) == 2
