"""The backward pass of a model from what the loop made of its outputs, alone or after its forward pass: one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.capture.operations import Operation
from kitsune.capture.split_program import SplitProgram
from kitsune.capture.trace import gradients, interpret, trace
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.kernels.pack_bucket import PACK_BUCKET


@dataclass(frozen=True)
class TailProgram:
    """What follows a forward program up to the gradients, alone or after that.

    Attributes:
        module: takes what the forward program returns, or what that takes, then the given tensors of the operations;
            returns results, the loss first if it is one of them, then gradients, packed if that is wanted.
        results: the places of those results.
        gradient_places: positions of the flat inputs of the call that get the gradients.
    """

    module: fx.GraphModule
    results: tuple[int, ...]
    gradient_places: tuple[int, ...]


def trace_tail(
    program: SplitProgram,
    operations: Sequence[Operation],
    root: int,
    wanted: Sequence[int],
    given: Sequence[Sequence[torch.Tensor]],
    flat: Sequence[torch.Tensor] | None = None,
    pack: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None,
) -> TailProgram:
    """Traces the operations, the backward pass of the loss, and that of the call.

    Args:
        program: the call's, whose backward pass has one part.
        operations: what is done with the outputs; the place of an output is its index, the results follow.
        root: the place of the loss.
        wanted: the places of other results that are to be returned; outputs are results of the forward pass.
        given: for each operation, the tensors that are no results.
        flat: those of the call, if its forward pass is to be part of the program.
        pack: makes what is returned of the gradients, all of which there must be.

    Raises:
        RefusedError: they cannot be captured.
    """
    counts = [len(some) for some in given]
    num_outputs = len(program.differentiable)
    returned = [node.meta["val"] for node in dataflow.outputs(program.forward.graph) if node is not None]
    begin = returned if flat is None else flat
    results = [place for place in (root, *wanted) if flat is not None or place >= num_outputs]
    needed = _needed(operations, results, num_outputs)
    used: list[int] = []

    def joint(*inputs: torch.Tensor) -> list[torch.Tensor]:
        known: Sequence[torch.Tensor] = inputs[: len(begin)]
        outer = iter(inputs[len(begin) :])
        if flat is not None:
            with torch.no_grad(), torch.autocast(program.tangents[0].device.type, enabled=False):
                known = interpret(program.forward, known)
        heads = zip(known, program.differentiable, strict=False)
        values = {place: head.detach().requires_grad_(needs) for place, (head, needs) in enumerate(heads)}
        leaves = [values[place] for place, needs in enumerate(program.differentiable) if needs]
        for place, (operation, count) in enumerate(zip(operations, counts, strict=True), num_outputs):
            own = [next(outer) for _ in range(count)]
            if place in needed:
                values[place] = operation.run(values, own)
        loss = values[root]
        found = gradients([loss], leaves, [torch.ones_like(loss)])
        grads = _backward(program, known[num_outputs:], found)
        used[:] = [index for index, grad in enumerate(grads) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        if pack is not None and len(present) < len(grads):
            raise RefusedError(Refusal("the other processes wait for gradients of parameters that have none"))
        return [*(values[place].detach() for place in results), *(present if pack is None else pack(present))]

    module = trace(joint, [*begin, *(tensor for some in given for tensor in some)])
    if pack is not None:
        _pack_early(module)
    if any(map(dataflow.draws_random_numbers, module.graph.nodes)):
        raise RefusedError(Refusal("what the loop does with the model's output draws random numbers"))
    return TailProgram(module, tuple(results), tuple(program.parts[0].gradient_places[index] for index in used))


def _pack_early(module: fx.GraphModule) -> None:
    """Has gradients packed as soon as they are there: other processes may get them while the rest is computed."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.find_nodes(op="call_function", target=PACK_BUCKET):
        for given in node.all_input_nodes:
            if given.target is torch.ops.aten.detach.default:  # the last of all, where they were returned
                node.replace_input_with(given, given.all_input_nodes[0])
                if not given.users:
                    module.graph.erase_node(given)
        max(node.all_input_nodes, key=order.__getitem__).append(node)
    module.recompile()


def _needed(operations: Sequence[Operation], results: Sequence[int], num_outputs: int) -> set[int]:
    """The places of operations without which there would be no `results`."""
    needed = set(results)
    for place in range(num_outputs + len(operations) - 1, num_outputs - 1, -1):
        if place in needed:
            needed |= operations[place - num_outputs].places()
    return needed


def _backward(
    program: SplitProgram, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of the call's inputs; None for those that depend on outputs only that have no gradient themselves."""
    (part,) = program.parts
    pairs = [(tangents[root], program.tangents[root]) for root in part.roots]  # its own order
    missing = frozenset(index for index, (tangent, _) in enumerate(pairs) if tangent is None)
    dense = [layout.fit(tangent) for tangent, layout in pairs if tangent is not None]
    with torch.no_grad(), torch.autocast(program.tangents[0].device.type, enabled=False):
        return part.spread(missing, interpret(part.without(missing), [*saved, *dense]))
