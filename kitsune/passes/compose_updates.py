"""Writes an optimizer's fused update as point-wise operators, so that a compiler can generate code for it too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kitsune.graph.values import mode_of, value
from kitsune.kernels import adam  # noqa: F401 - defines the operator

_aten = torch.ops.aten


def compose_updates(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` in which fused updates of Adam, AdamW and SGD are point-wise operators and copies.

    What is computed is the same but for the order of roundings: powers of the betas are float64, as in torch's default
    implementation, and so is what is computed of them before it is rounded once.
    """
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if is_update(node):
            with graph.inserting_before(node):
                _COMPOSED[node.target](_Calls(graph), _named(node))
            graph.erase_node(node)
    return fx.GraphModule(module, graph)


class _Calls:
    """Adds calls to a graph, with their values."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._mode = graph, mode_of(graph)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = value(self._mode, target, args, kwargs)
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = made
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype == dtype else self(_aten._to_copy.default, node, dtype=dtype)

    def scaled(self, node: fx.Node, factor: fx.Node | float) -> fx.Node:
        target = _aten.mul.Tensor if isinstance(factor, fx.Node) else _aten.mul.Scalar
        return self(target, node, factor)

    def plus(self, node: fx.Node, other: fx.Node | float) -> fx.Node:
        return self(_aten.add.Tensor if isinstance(other, fx.Node) else _aten.add.Scalar, node, other)

    def store(self, found_inf: fx.Node | None, pairs: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        """Writes each second one to the first, unless gradients have overflowed."""
        for old, new in pairs:
            kept = new
            if found_inf is not None:
                kept = self(_aten.where.self, self(_aten.eq.Scalar, found_inf, 1), old, new)
            self(_aten.copy_.default, old, kept)


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name; defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    listed = node.target._schema.arguments
    given = dict(zip((one.name for one in listed), node.args, strict=False)) | dict(node.kwargs)
    return {one.name: given.get(one.name, one.default_value) for one in listed}


def _adam(calls: _Calls, named: Mapping[str, Any], *, lists: Sequence[str], decoupled: bool) -> None:
    params, grads, averages, squares, most, steps = (named[name] for name in lists)
    if not params:
        return
    decays = named["weight_decay"] != 0
    # Of all parameters at once: a kernel for each would compute powers for each of its elements.
    count = calls.cast(calls(_aten.stack.default, list(steps)), torch.float64)
    corrections = [
        calls(_aten.rsub.Scalar, calls(_aten.pow.Scalar, named[beta], count), 1) for beta in ("beta1", "beta2")
    ]
    lr = calls.cast(named["lr"], torch.float64)
    sizes = calls(_aten.div.Tensor, lr, corrections[0])
    roots = calls(_aten.sqrt.default, corrections[1])
    shrink = calls(_aten.rsub.Scalar, calls.scaled(lr, named["weight_decay"]), 1) if decays and decoupled else None
    for place, (param, grad, average, square) in enumerate(zip(params, grads, averages, squares, strict=True)):
        dtype = param.meta["val"].dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        p, g, m, v = (calls.cast(one, wide) for one in (param, grad, average, square))
        size, root = (calls.cast(calls(_aten.select.int, one, 0, place), wide) for one in (sizes, roots))
        if named["maximize"]:
            g = calls(_aten.neg.default, g)
        if shrink is not None:
            p = calls.scaled(p, calls.cast(shrink, wide))
        elif decays:
            g = calls.plus(g, calls.scaled(p, named["weight_decay"]))
        m = calls.plus(calls.scaled(m, named["beta1"]), calls.scaled(g, 1 - named["beta1"]))
        v = calls.plus(calls.scaled(v, named["beta2"]), calls.scaled(calls.scaled(g, 1 - named["beta2"]), g))
        new = [(average, calls.cast(m, dtype)), (square, calls.cast(v, dtype))]
        if most:
            v = calls(_aten.maximum.default, calls.cast(most[place], wide), v)
            new.append((most[place], calls.cast(v, dtype)))
        denominator = calls.plus(calls(_aten.div.Tensor, calls(_aten.sqrt.default, v), root), named["eps"])
        change = calls.scaled(calls(_aten.div.Tensor, m, denominator), size)
        new.append((param, calls.cast(calls(_aten.sub.Tensor, p, change), dtype)))
        calls.store(named["found_inf"], new)


def _own_adam(calls: _Calls, named: Mapping[str, Any]) -> None:
    lists = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")
    _adam(calls, named, lists=lists, decoupled=named["decoupled"])


def _torch_adam(calls: _Calls, named: Mapping[str, Any]) -> None:
    _adam(calls, named, lists=_OF_TORCH, decoupled=False)


def _torch_adamw(calls: _Calls, named: Mapping[str, Any]) -> None:
    _adam(calls, named, lists=_OF_TORCH, decoupled=True)


def _sgd(calls: _Calls, named: Mapping[str, Any]) -> None:
    has_momentum, decays = named["momentum"] != 0, named["weight_decay"] != 0
    for place, (param, grad) in enumerate(zip(named["self"], named["grads"], strict=True)):
        dtype = param.meta["val"].dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        p, g = calls.cast(param, wide), calls.cast(grad, wide)
        new: list[tuple[fx.Node, fx.Node]] = []
        if named["maximize"]:
            g = calls(_aten.neg.default, g)
        if decays:
            g = calls.plus(g, calls.scaled(p, named["weight_decay"]))
        if has_momentum:
            buffer = named["momentum_buffer_list"][place]
            b = calls.plus(
                calls.scaled(calls.cast(buffer, wide), named["momentum"]), calls.scaled(g, 1 - named["dampening"])
            )
            new.append((buffer, calls.cast(b, dtype)))
            g = calls.plus(g, calls.scaled(b, named["momentum"])) if named["nesterov"] else b
        change = calls.scaled(g, calls.cast(named["lr"], wide))
        new.append((param, calls.cast(calls(_aten.sub.Tensor, p, change), dtype)))
        calls.store(named["found_inf"], new)


_OF_TORCH = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")

_COMPOSED: Mapping[object, Callable[[_Calls, Mapping[str, Any]], None]] = {
    torch.ops.kitsune.adam_.default: _own_adam,
    _aten._fused_adam_.tensor_lr: _torch_adam,
    _aten._fused_adamw_.tensor_lr: _torch_adamw,
    _aten._fused_sgd_.tensor_lr: _sgd,
}


def is_update(node: fx.Node) -> bool:
    """Whether `node` is an update that can be composed: not one that unscales gradients, which captures do before."""
    return node.target in _COMPOSED and node.kwargs.get("grad_scale") is None
