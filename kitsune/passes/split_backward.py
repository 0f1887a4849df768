"""Splits operators that compute several gradients at once into one for each, so that none waits for the others.

Which are split, and how, follows from what ATen's kernels do; a split that would compute anything twice is not made.

- `convolution_backward`: cuDNN computes the gradients of input and weight by two calls, and ATen sums up the bias's. On
  the CPU, oneDNN computes those of weight and bias by one call (asked for the bias's alone it takes the time of both),
  so that they stay together.
- `native_layer_norm_backward`: one kernel computes the input's gradient, another those of weight and bias, from the
  saved statistics.
- Left alone: `native_group_norm_backward` and `native_batch_norm_backward`, whose gradients of input, weight and bias
  all come from the same two sums over the whole input; and the backward operators of attention, which recompute the
  scores.

Linear layers have no such operator: their gradients are `mm`, `mm` and `sum`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from kitsune.graph import dataflow

Parts = tuple[tuple[int, ...], ...]
"""Positions of results that are computed together."""


def split_backward(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` with one operator for each independent gradient that is used, and none for the others.

    The results are the same to the bit. New nodes have the values and the source lines of those that they replace.
    """
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _PARTS and _is_taken_apart(node):
            _split(node, _PARTS[node.target](node))
    return fx.GraphModule(module, graph)


def _convolution_parts(node: fx.Node) -> Parts:
    on_cpu = all(tensor.device.type == "cpu" for tensor in dataflow.tensors(node))
    return ((0,), (1, 2)) if on_cpu else ((0,), (1,), (2,))


def _layer_norm_parts(_node: fx.Node) -> Parts:
    return (0,), (1, 2)


_PARTS: dict[Callable[..., object], Callable[[fx.Node], Parts]] = {
    torch.ops.aten.convolution_backward.default: _convolution_parts,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_parts,
}
"""For operators that return three gradients, of which their last argument, `output_mask`, says which are wanted."""


def _is_taken_apart(node: fx.Node) -> bool:
    return all(user.target is operator.getitem for user in node.users)


def _split(node: fx.Node, parts: Parts) -> None:
    mask = _mask(node)
    users: dict[int, list[fx.Node]] = {}
    for user in list(node.users):
        place = user.args[1]
        assert isinstance(place, int)
        if user.users:
            users.setdefault(place, []).append(user)
        else:
            node.graph.erase_node(user)
    wanted = [wanted for part in parts if (wanted := [place for place in part if mask[place] and place in users])]
    if wanted == [[place for place in range(len(mask)) if mask[place]]]:
        return
    for places in wanted:
        new = _with_mask(node, [place in places for place in range(len(mask))])
        for user in (user for place in places for user in users[place]):
            user.update_arg(0, new)
    if not node.users:
        node.graph.erase_node(node)


def _mask(node: fx.Node) -> Sequence[bool]:
    value = node.kwargs.get("output_mask", node.args[-1])
    assert isinstance(value, Sequence)
    return [bool(wanted) for wanted in value]


def _with_mask(node: fx.Node, mask: list[bool]) -> fx.Node:
    """A call like `node`, before it, that computes those of its results that are true in `mask`."""
    args, kwargs = node.args, dict(node.kwargs)
    if "output_mask" in kwargs:
        kwargs["output_mask"] = mask
    else:
        args = (*args[:-1], mask)
    with node.graph.inserting_before(node):
        new = node.graph.create_node("call_function", node.target, args, kwargs)
    values = zip(node.meta["val"], mask, strict=True)
    new.meta = {**node.meta, "val": tuple(value if wanted else None for value, wanted in values)}
    return new
