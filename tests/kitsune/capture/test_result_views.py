"""Results that share memory are views of what a graph returns, or inputs themselves."""

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


def halves(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (x * weight).chunk(2)


def itself_and_views(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    hidden = x * weight
    return hidden[None], hidden, hidden.detach(), hidden.unflatten(0, (2, 2)).mT[1]


def views_of_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return x * weight, weight[:2], x.expand(2, 4)


def used_and_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    mean, scale = (x * weight).split(2)
    return mean * scale, mean, scale


def broadcast(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The second one stays as it is, as its shape does."""
    hidden = x * weight
    return torch.broadcast_tensors(hidden[:1], hidden, torch.ones(1))


def the_same_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    hidden = x * weight
    return hidden, hidden.contiguous(), hidden.add_(1)


@pytest.mark.parametrize(
    "function", [halves, itself_and_views, views_of_inputs, used_and_returned, broadcast, the_same_twice]
)
def test_results_that_share_memory_are_views(function: Any) -> None:
    call, runner = guarded(function)
    weight = torch.nn.Parameter(torch.randn(4))
    for _ in range(3):
        x = torch.randn(4)
        found, wanted = call(x, weight), function(x, weight)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            assert (one.stride(), one.storage_offset(), one._is_view()) == (
                other.stride(),
                other.storage_offset(),
                other._is_view(),
            )
            assert (one.requires_grad, one.is_leaf) == (other.requires_grad, other.is_leaf)
        assert len(set(map(id, found))) == len(set(map(id, wanted)))
        grads = [torch.autograd.grad(sum(each.sum() for each in results), weight) for results in (found, wanted)]
        assert torch.equal(*(grad for (grad,) in grads))
    results = [result for result in dataflow.outputs(runner.graphs[0].graph) if result is not None]
    memory = [dataflow.storage_of(result.meta["example_value"]) for result in results]
    assert len(set(memory)) == len(memory)


def test_views_of_what_is_written_in_place_are_results() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        first = hidden[:2]
        first += 1
        return first, hidden

    call, runner = guarded(function)
    assert [result.tolist() for result in call(torch.ones(3))] == [[3, 3], [3, 3, 2]]
    assert len(dataflow.outputs(runner.graphs[0].graph)) == 2


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


def test_views_that_are_taken_later_are_left_out_of_the_graph() -> None:
    call, runner = guarded(lambda x: (x * 2).split(2))
    call(torch.ones(4, requires_grad=True))
    assert [node.name for node in runner.graphs[0].graph.nodes if node.op.startswith("call")] == ["mul"]
