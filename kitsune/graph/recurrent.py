"""Layers of oneDNN's recurrent networks, which look whether gradients are wanted around their call.

PyTorch's operator keeps what its backward pass reads only where autograd is on, whatever `train` says. Replays run
without autograd, so the operator here switches it on, for tensors that it does not follow. How large that is, oneDNN
decides, and PyTorch does not foresee: here it is found out by a run.

Its backward pass gives gradients in float32 whatever the dtype is in some versions. Autograd casts them, unseen by
tracing, and so does the operator here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kitsune.graph.values import mode_of

_ORIGINAL = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_KEPT = 3
"""Which of the results the backward pass alone reads."""

_sizes: dict[object, int] = {}
"""How many bytes that has, for arguments of a kind."""


def keep_for_backward(module: fx.GraphModule) -> None:
    """Has layers whose backward pass is in the graph, or in another one, keep what it reads."""
    found = module.graph.find_nodes(op="call_function", target=_ORIGINAL)
    for node in found:
        node.target = torch.ops.kitsune.mkldnn_rnn_layer.default
        args = fx.map_arg(node.args, lambda one: one.meta["val"])
        _sizes[_kind(args)] = _run(*map(_zeros, args))[_KEPT].numel()
        node.meta["val"] = _foreseen(node, args)
        for user in node.users:
            user.meta["val"] = node.meta["val"][user.args[1]]
    backward = module.graph.find_nodes(op="call_function", target=_BACKWARD)
    for node in backward:
        node.target = torch.ops.kitsune.mkldnn_rnn_layer_backward.default
    if found or backward:
        module.recompile()


def _foreseen(node: fx.Node, args: Sequence[Any]) -> tuple[Tensor, ...]:
    kept = node.meta["val"][_KEPT]
    with mode_of(node.graph):
        return (*node.meta["val"][:_KEPT], kept.new_empty(_sizes[_kind(args)]))


def _run(*args: Any) -> tuple[Tensor, ...]:
    values = [one.detach() if isinstance(one, Tensor) else one for one in args]
    with torch.enable_grad():
        results: tuple[Tensor, ...] = _ORIGINAL(*values)
    return results


def _fake(*args: Any) -> tuple[Tensor, ...]:
    output, hidden, cell, kept = _ORIGINAL(*args)
    return output, hidden, cell, kept.new_empty(_sizes.get(_kind(args), 0))


def _zeros(one: Any) -> Any:
    """A tensor like a fake one."""
    if not isinstance(one, Tensor):
        return one
    return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="cpu").zero_()


def _kind(args: Sequence[Any]) -> object:
    return tuple((one.size(), one.stride(), one.dtype) if isinstance(one, Tensor) else repr(one) for one in args)


def _run_backward(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of the first arguments, in their order and their dtypes."""
    gradients: tuple[Tensor, ...] = _BACKWARD(*args)
    return tuple(gradient.to(one.dtype) for gradient, one in zip(gradients, args, strict=False))


def _define(original: torch._ops.OpOverload, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    schema = str(original._schema)
    name = f"kitsune::{original._schema.name.removeprefix('aten::')}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)


_define(_ORIGINAL, _run, _fake)
_define(_BACKWARD, _run_backward, _BACKWARD)
