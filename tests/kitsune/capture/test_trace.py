"""Tracing: what is traced, and that nothing else happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.amp.autocast_mode import _enter_autocast
from torch.nn import functional

from kitsune.capture.trace import gradients, own_gradients, trace
from kitsune.errors import Refusal, RefusedError


def test_tracing_touches_nothing() -> None:
    """Neither the inputs, nor the random state, nor autocast's cache."""
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        noisy = functional.dropout(x, 0.5) + torch.randn_like(x)
        loss = (noisy @ weight).sum()
        (grad,) = torch.autograd.grad(loss, [weight])
        with torch.no_grad():
            weight.sub_(grad)
        x.add_(1)
        return [loss.detach()]

    before = (x.clone(), weight.detach().clone(), torch.get_rng_state(), x._version, weight._version)
    with torch.autocast("cpu", torch.bfloat16):
        module = trace(function, [x, weight])
        assert torch.is_autocast_cache_enabled()
        assert (x @ weight).grad_fn is not None
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert (x._version, weight._version) == before[3:]
    assert weight.grad is None
    assert len(module.graph.find_nodes(op="placeholder")) == 2


def test_the_graph_computes_what_the_function_does() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = x.view(-1)
        z[0] = 5
        return [torch.relu(x) * y, x.sum(), y.t()]

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    graph = trace(function, [x, y])
    other = x.clone()
    torch.testing.assert_close(graph(x, y), function(other, y), rtol=0, atol=0)
    assert torch.equal(x, other)


def test_nodes_remember_the_users_lines() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x.nonzero()]  # the line to be named

    with pytest.raises(RefusedError) as caught:
        trace(function, [torch.ones(3)])
    assert "nonzero" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: [x * x.sum().item()], "takes a number out of a tensor"),
        (lambda x: [x if x.sum() > 0 else -x], "values of a tensor"),
        (lambda x: [x @ torch.ones(7, 7)], "RuntimeError: .* reduction dim"),
        (lambda x: [x.view(5)], "view|shape|size"),
        (lambda x: [x.nope()], "AttributeError"),
    ],
    ids=["item", "branch", "matmul", "view", "attribute"],
)
def test_what_cannot_be_traced_is_refused(function: Callable[[Tensor], Sequence[Tensor]], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        trace(function, [torch.ones(3)])


def test_a_refusal_from_inside_keeps_its_reason() -> None:
    def function(x: Tensor) -> list[Tensor]:
        raise RefusedError(Refusal("my reason"), passing=True)

    with pytest.raises(RefusedError, match="my reason") as caught:
        trace(function, [torch.ones(3)])
    assert caught.value.passing


@pytest.mark.parametrize(
    "around", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["outside", "inside"]
)
def test_regions_are_left_where_tracing_ends_within_them(around: Callable[[], AbstractContextManager[object]]) -> None:
    """Functions that Dynamo has recorded enter and leave them by calls."""

    def state() -> tuple[object, ...]:
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        levels = torch._C._functorch.get_dynamic_layer_stack_depth()
        return depth, enabled, dtype, torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), levels

    def function(x: Tensor) -> list[Tensor]:
        _enter_autocast("cpu", torch.float16, True, True)
        torch._C._set_grad_enabled(False)
        torch._C._functorch._vmap_increment_nesting(3, "error")
        raise ValueError("midway")

    with around():
        before = state()
        with pytest.raises(RefusedError, match="midway"):
            trace(function, [torch.ones(2)])
        assert state() == before


def test_gradients_are_taken_outside_of_autocast() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = x @ torch.ones(3, 2)
        first, second = gradients([output], [x, unused], [torch.ones_like(output)])
    assert second is None
    assert first is not None
    assert first.dtype is torch.float32


# own_gradients


def distinct(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_gradients_get_memory_of_their_own() -> None:
    x = torch.randn(2, 3)
    params = [torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)]
    shared = torch.randn(2, 3)
    grads = [shared, shared.view(2, 3), x, torch.randn(()).expand(2, 3)]
    owned = own_gradients(params, grads, [x, *params])
    assert all(torch.equal(*pair) for pair in zip(owned, grads, strict=True))
    assert distinct([*owned, x])
    assert owned[0].data_ptr() == shared.data_ptr(), "what is nobody else's is not copied"


def test_gradients_are_laid_out_and_typed_like_their_parameters() -> None:
    param = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    grad = torch.randn(2, 3, 4, 4)
    half = torch.randn(5, dtype=torch.bfloat16)
    (first, second) = own_gradients([param, torch.randn(5)], [grad, half], [])
    assert first.stride() == param.stride()
    assert torch.equal(first, grad)
    assert second.dtype is torch.float32
    assert torch.equal(second, half.float())


def test_strides_of_dimensions_of_one_do_not_count() -> None:
    param = torch.randn(3, 1)
    grad = torch.randn(3, 2)[:, :1].clone().as_strided((3, 1), (1, 7))
    (owned,) = own_gradients([param], [grad], [])
    assert owned.data_ptr() == grad.data_ptr()


def test_traced_gradients_do_not_alias() -> None:
    """Two parameters that are added have one gradient in autograd's formulas."""

    def function(first: Tensor, second: Tensor) -> list[Tensor]:
        loss = (first + second).sum()
        grads = [grad for grad in gradients([loss], [first, second], [torch.ones(())]) if grad is not None]
        return own_gradients([first, second], grads, [first, second])

    inputs = [torch.randn(2, 2, requires_grad=True) for _ in range(2)]
    found = trace(function, inputs)(*inputs)
    assert distinct(found)
    assert all(torch.equal(grad, torch.ones(2, 2)) for grad in found)
    assert not any(grad.stride() == (0, 0) for grad in found)
