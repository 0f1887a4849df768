"""Runs graphs, and says what they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow
from kitsune.kernels.regions import Backend, Code
from tests.kitsune.steps import bits


def able(_device: torch.device) -> None:
    return None


def interpreted(module: fx.GraphModule, _inputs: Sequence[Tensor]) -> Code:
    return fx.Interpreter(module).run


OPERATORS = Backend("operators", able, interpreted)
"""Runs the operators of a region one by one."""


def results(module: fx.GraphModule, inputs: Sequence[Tensor]) -> list[object]:
    """The bits of the results, and of `inputs` afterwards. Drawing starts at one seed."""
    torch.manual_seed(5)
    with torch.no_grad():
        outputs = module(*inputs)
    return bits([*outputs, *inputs])


def names(module: fx.GraphModule) -> list[str]:
    """The operators' nodes, in order."""
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def values_are_right(module: fx.GraphModule, inputs: Sequence[Tensor]) -> bool:
    """Whether every node's value has the form of what it really computes; where it is None, anything may come out.

    Asked for a bias's gradient alone, oneDNN returns the weight's as well.
    """

    class Watching(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            result = super().run_node(node)
            if node.op == "call_function":
                found.append(_fits(node.meta.get("val"), result))
            return result

    found: list[bool] = []
    with torch.no_grad():
        Watching(module).run(*inputs)
    return all(found)


def _fits(value: object, result: object) -> bool:
    if isinstance(value, (list, tuple)):
        assert isinstance(result, (list, tuple))
        return all(_fits(one, two) for one, two in zip(value, result, strict=True))
    return value is None or _form(value) == _form(result)


def _form(value: object) -> object:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


class InFloat64(fx.Interpreter):
    """Computes what is in float32 in float64, given inputs in that.

    But for updates by Kitsune's own operators, which take float32 alone, and for random numbers, which depend on the
    precision.
    """

    def run_node(self, node: fx.Node) -> Any:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if target.namespace != "kitsune" and not dataflow.draws_random_numbers(node):
            args, kwargs = pytree.tree_map_only(torch.dtype, _doubled, (args, kwargs))
            return _widened(target(*args, **kwargs))
        narrow_args, narrow_kwargs = pytree.tree_map_only(Tensor, _narrowed, (args, kwargs))
        made = target(*narrow_args, **narrow_kwargs)
        for parameter, one, other in zip(target._schema.arguments, args, narrow_args, strict=False):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                for wide, narrow in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
                    wide.copy_(narrow)
        return _widened(made)


def _doubled(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else dtype


def _widened(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.to(_doubled(one.dtype)), values)


def _narrowed(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor
