"""The executor for any device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kitsune.capture.trace import trace
from kitsune.execution.in_order import InOrder


def graph() -> torch.fx.GraphModule:
    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        weight.add_(1)
        return [x @ weight, torch.nn.functional.dropout(x, 0.5)]

    return trace(function, [torch.zeros(3, 3), torch.zeros(3, 3)])


def test_it_computes_writes_and_draws_like_the_function() -> None:
    run = InOrder(graph())
    x, weight = torch.randn(3, 3), torch.randn(3, 3)
    wanted = weight + 1
    torch.manual_seed(5)
    product, dropped = run([x, weight])
    torch.manual_seed(5)
    assert torch.equal(weight, wanted)
    assert torch.equal(product, x @ wanted)
    assert torch.equal(dropped, torch.nn.functional.dropout(x, 0.5))


def test_every_call_returns_tensors_of_its_own() -> None:
    run = InOrder(graph())
    assert not run.keeps_outputs
    assert run.static_outputs() == []
    x = torch.randn(3, 3)
    first = run([x, torch.zeros(3, 3)])
    kept = [tensor.clone() for tensor in first]
    second = run([x, torch.ones(3, 3)])
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))
    assert not torch.equal(first[0], second[0])


def test_neither_autograd_nor_autocast_sees_the_operators() -> None:
    run = InOrder(graph())
    x, weight = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        product, _ = run([x, weight])
        assert torch.is_autocast_enabled("cpu")
    assert product.dtype is torch.float32
    assert not product.requires_grad
    assert torch.is_grad_enabled()


def test_a_compiled_graph_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is warmed up on copies of the parameters that it is recorded for."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _examples: object) -> object:
        compiled.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    run = InOrder(graph(), compile=True)
    x, weight = torch.randn(3, 3), torch.nn.Parameter(torch.zeros(3, 3))
    for tensor in (weight.detach().clone(), weight):
        product, _ = run([x, tensor])
        assert torch.equal(product, x @ tensor)
        assert torch.equal(tensor, torch.ones(3, 3))
    assert len(compiled) == 1


def test_release_drops_the_graph() -> None:
    run = InOrder(graph())
    run.release()
    with pytest.raises(AttributeError):
        run([torch.zeros(3, 3), torch.zeros(3, 3)])


def test_the_name_tells_what_runs() -> None:
    assert InOrder(graph()).name == "in order"
    assert InOrder(graph(), compile=True).name == "inductor"
