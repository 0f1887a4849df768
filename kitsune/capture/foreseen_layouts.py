"""Results of operators lie in memory as tracing foresaw.

Fake tensors are laid out as torch's meta functions say, and some of those say other than what the operator does: `roll`
of an image in channels_last, or the gradient of an interpolation. What was traced with the one fails with the other, or
what goes through memory in its order, as fused updates, takes the wrong elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.graph import dataflow
from kitsune.graph.attention import unmet_demand
from kitsune.graph.dataflow import storage_of
from kitsune.graph.values import mode_of, value
from kitsune.graph.verify import source_line

_aten = torch.ops.aten


def lay_out_as_foreseen(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Has results copied where they lie otherwise than foreseen, as a run with `inputs` tells.

    Nothing is written to inputs, and generators of random numbers stay as they are.

    Raises:
        RefusedError: there is no such copy, an operator fails, attention would get heads in a layout that it does not
            take, or there is too little memory for the run.
    """
    refused, otherwise = _find(module, inputs)
    if refused is not None:  # out of the handlers: what is being handled would keep alive all that was allocated
        raise refused
    for node in otherwise:
        _insert_copy(node)
    if otherwise:
        module.recompile()


def _find(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[RefusedError | None, list[fx.Node]]:
    """The nodes whose results lie otherwise where that matters, or why they cannot be told."""
    device, run = inputs[0].device, _Run(module, inputs)
    kept = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), kept:
            run.run(*(tensor.detach() for tensor in inputs))
    except torch.OutOfMemoryError:
        return RefusedError(Refusal("there is too little device memory to capture the step"), for_memory=True), []
    except (RuntimeError, IndexError) as error:  # of the data, as eager steps may; plain PyTorch says so
        refusal = Refusal(f"an operator of the captured graph failed: {first_line(error)}")
        return RefusedError(refusal, passing=True), []
    return None, run.otherwise


class _Run(fx.Interpreter):
    """Goes on with what was foreseen.

    Only layouts matter, so that what would be written to inputs is left out, as the update of a step is: there need not
    be memory for copies of parameters and of optimizer state.

    Attributes:
        otherwise: see `_find`.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(module)
        self.otherwise: list[fx.Node] = []
        self._inputs = set(map(storage_of, inputs))

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        written = [node for node in dataflow.written(n) if storage_of(self.env[node]) in self._inputs]
        if written and _only_writes(n):
            return self.env[written[0]]
        args, _ = self.fetch_args_kwargs_from_env(n)
        demand = unmet_demand(n.target, args)
        if demand is not None:
            raise RefusedError(Refusal(demand, source_line(n)))
        before = {node: self.env[node] for node in written}
        self.env.update((node, tensor.clone()) for node, tensor in before.items())
        result = super().run_node(n)
        self.env.update(before)
        return self._as_foreseen(n, result)

    def _as_foreseen(self, node: fx.Node, result: Any) -> Any:
        foreseen = node.meta.get("val")
        if not isinstance(result, torch.Tensor) or not isinstance(foreseen, torch.Tensor):
            return result
        if _strides(result) == _strides(foreseen) or not node.users:
            return result
        is_view = storage_of(result) in {storage_of(self.env[argument]) for argument in _tensors_of(node)}
        if is_view or foreseen.numel() != result.numel() or torch._debug_has_internal_overlap(foreseen) == 1:
            place = source_line(node)
            raise RefusedError(Refusal(f"the result of {node.target} is laid out in an unforeseen way", place))
        self.otherwise.append(node)
        return result.new_empty_strided(foreseen.size(), foreseen.stride()).copy_(result)


def _only_writes(node: fx.Node) -> bool:
    """Whether what it returns, if anything, is what it has written to."""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return all(one.alias_info is not None and one.alias_info.is_write for one in returns)


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """Its arguments that are tensors, and no lists of some."""
    return [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that matter."""
    if tensor.numel() == 0:
        return []
    return [stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1]


def _insert_copy(node: fx.Node) -> None:
    foreseen = node.meta["val"]
    sizes = [list(foreseen.size()), list(foreseen.stride())]
    empty = _call_after(node, node, _aten.new_empty_strided.default, (node, *sizes))
    copied = _call_after(empty, node, _aten.copy_.default, (empty, node))
    node.replace_all_uses_with(copied, delete_user_cb=lambda user: user not in (empty, copied))


def _call_after(place: fx.Node, origin: fx.Node, target: torch._ops.OpOverload, args: tuple[Any, ...]) -> fx.Node:
    """A call that belongs to where `origin` does."""
    with place.graph.inserting_after(place):
        node = place.graph.call_function(target, args)
    node.meta = {**origin.meta, "val": value(mode_of(place.graph), target, args, {})}
    return node
