"""A module's call as two programs: forward, and backward from the gradients of the outputs.

The call is traced together with its backward pass as one graph; what depends on the outputs'
gradients is the backward program, everything else the forward program, which also returns the
values that the backward program reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kitsune.capture.layout import TensorLayout
from kitsune.capture.signature import refuse_arguments
from kitsune.capture.trace import gradients, interpret, own_gradients, same_layout, trace
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, value

_TANGENTS = "kitsune_tangents"

_as_strided = torch.ops.aten.as_strided.default


@dataclass(frozen=True)
class SplitProgram:
    """The two programs of a call.

    Attributes:
        joint: both as one graph: takes the flat tensors of the call, then a gradient for each differentiable output;
            returns the outputs, then the gradients of the inputs at `gradient_places`.
        forward: takes the flat tensors of the call; returns its outputs, then the saved values.
        backward: takes the saved values, then a gradient for each differentiable output; returns
            the gradients of the inputs at `gradient_places`.
        differentiable: for each output, whether it has a gradient.
        tangents: layouts of the gradients of the differentiable outputs.
        gradient_places: positions of the flat inputs that get a gradient.
        depends: for each of those gradients, the indices of the tangents it depends on.
        saved_inputs: positions of the flat inputs that saved values are, or are views of: as in eager, no edit may come
            between the call and its backward pass.
        readers: for each saved value, then for each of the `saved_inputs`, the indices of the tangents whose backward
            passes read it.
        groups: for each differentiable output, a number that it has in common with those whose backward pass needs
            the same nodes of autograd's graph to have kept something; others may have theirs at other times.
        autocast: what autocast computes in during the backward pass; None outside of it.
        is_rewritten: whether operators have been replaced since it was traced.
        repeatable: whether running the call again has no effect: it draws no random numbers and
            writes to none of its inputs.
    """

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    differentiable: tuple[bool, ...]
    tangents: tuple[TensorLayout, ...]
    gradient_places: tuple[int, ...]
    depends: tuple[frozenset[int], ...]
    saved_inputs: tuple[int, ...]
    readers: tuple[frozenset[int], ...]
    groups: tuple[int, ...]
    autocast: torch.dtype | None
    repeatable: bool
    is_rewritten: bool = False


def trace_split(
    graph: fx.GraphModule, flat: Sequence[torch.Tensor], autocast: torch.dtype | None = None
) -> SplitProgram:
    """Traces `graph(*flat)`, the call of a module, and its backward pass.

    Args:
        autocast: as in `SplitProgram`.

    Raises:
        RefusedError: the call cannot be captured.
    """
    refusal = refuse_arguments(flat)
    if refusal is not None:
        raise RefusedError(refusal)
    examples = [_example(output) for output in dataflow.outputs(graph.graph)]
    differentiable = tuple(example.requires_grad for example in examples)
    if not any(differentiable):
        raise RefusedError(Refusal("no output of the model requires a gradient"))
    _refuse_nested_outputs(graph.graph, differentiable)
    layouts = tuple(TensorLayout.of(example) for example, needs in zip(examples, differentiable, strict=True) if needs)
    wanted = [position for position, tensor in enumerate(flat) if tensor.requires_grad]
    reached: list[int] = []
    groups: list[int] = []

    def joint(*inputs: torch.Tensor) -> list[torch.Tensor]:
        values, tangents = inputs[: len(flat)], inputs[len(flat) :]
        outputs = interpret(graph, values)
        _refuse_aliases(outputs, values)
        roots = [output for output, needs in zip(outputs, differentiable, strict=True) if needs]
        groups[:] = _groups(roots)
        grads = gradients(roots, [values[place] for place in wanted], tangents, autocast)
        reached[:] = [place for place, grad in zip(wanted, grads, strict=True) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        owned = own_gradients([values[place] for place in reached], present, inputs)
        return [*(output.detach() for output in outputs), *owned]

    module = trace(joint, [*flat, *(layout.empty() for layout in layouts)])
    parts = _partition(module, len(flat), len(examples))
    repeatable = not dataflow.written_inputs(module.graph)
    repeatable &= not any(map(dataflow.draws_random_numbers, module.graph.nodes))
    return SplitProgram(
        joint=module,
        forward=parts.forward,
        backward=parts.backward,
        differentiable=differentiable,
        tangents=layouts,
        gradient_places=tuple(reached),
        depends=parts.depends,
        saved_inputs=parts.saved_inputs,
        readers=parts.readers,
        groups=tuple(groups),
        autocast=autocast,
        repeatable=repeatable,
    )


def split_anew(program: SplitProgram, joint: fx.GraphModule) -> SplitProgram:
    """`program`, of which all outputs have one group, from a graph that computes what `program.joint` does.

    It is changed so that nothing shows: results get the strides that they had, and what the backward pass reads of
    inputs that it did not read is copied in the forward pass, for they may be edited before.

    Raises:
        RefusedError: it cannot be split; or part of what the forward pass has to do would be left to the backward pass.
    """
    num_inputs = len(dataflow.placeholders(joint.graph)) - len(program.tangents)
    num_outputs = len(dataflow.outputs(joint.graph)) - len(program.gradient_places)
    _keep_strides(joint.graph, program.joint.graph)
    _copy_further_inputs(joint.graph, num_inputs, program.saved_inputs)
    parts = _partition(joint, num_inputs, num_outputs)
    if dataflow.written_inputs(parts.forward.graph).keys() != dataflow.written_inputs(program.forward.graph).keys():
        raise RefusedError(Refusal("a buffer would be written by the backward pass"))
    return replace(program, joint=joint, forward=parts.forward, backward=parts.backward, is_rewritten=True)


def _keep_strides(graph: fx.Graph, before: fx.Graph) -> None:
    """Where those of a result differ in dimensions of one element, as a view; else it is refused."""
    output = graph.output_node()
    seen: dict[fx.Node, fx.Node] = {}
    for result, old in zip(dataflow.outputs(graph), dataflow.outputs(before), strict=True):
        if result is None or old is None or result.meta["val"].stride() == old.meta["val"].stride():
            continue
        wanted = old.meta["val"]
        if not same_layout(result.meta["val"], wanted):
            raise RefusedError(Refusal("a result would be laid out otherwise"))
        seen[result] = _call_before(output, _as_strided, (result, list(wanted.size()), list(wanted.stride())))
    output.args = fx.map_arg(output.args, lambda node: seen.get(node, node))


def _copy_further_inputs(graph: fx.Graph, num_inputs: int, saved_inputs: Sequence[int]) -> None:
    places = dataflow.placeholders(graph)
    further = {
        storage
        for place, node in enumerate(places[:num_inputs])
        if place not in saved_inputs
        for storage in dataflow.storages(node)
    }
    depends = _dependence(graph, places[num_inputs:])
    order = {node: place for place, node in enumerate(graph.nodes)}
    late = [node for node in graph.nodes if node in depends and node.op == "call_function"]
    read = dict.fromkeys(argument for node in late for argument in node.all_input_nodes if argument not in depends)
    for one in read:
        if not dataflow.storages(one).isdisjoint(further):
            # At the end of the forward pass; a view may have been taken only then. No input is written any later.
            place = late[0] if order[one] < order[late[0]] else one.next
            copy = _call_before(place, torch.ops.aten.clone.default, (one,))
            one.replace_all_uses_with(copy, delete_user_cb=lambda user: user in depends)


def _call_before(place: fx.Node, target: torch._ops.OpOverload, args: tuple[Any, ...]) -> fx.Node:
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args)
    node.meta["val"] = value(mode_of(place.graph), target, args, {})
    return node


@dataclass(frozen=True)
class _Parts:
    forward: fx.GraphModule
    backward: fx.GraphModule
    depends: tuple[frozenset[int], ...]
    saved_inputs: tuple[int, ...]
    readers: tuple[frozenset[int], ...]


def _partition(joint: fx.GraphModule, num_inputs: int, num_outputs: int) -> _Parts:
    places = dataflow.placeholders(joint.graph)
    inputs, tangents = places[:num_inputs], places[num_inputs:]
    results = dataflow.outputs(joint.graph)
    outputs, grads = results[:num_outputs], results[num_outputs:]
    depends = _dependence(joint.graph, tangents)
    if any(output in depends for output in outputs):
        raise RefusedError(Refusal("the backward pass writes to an output of the model"))
    _refuse_order(joint.graph, depends)
    late = [node for node in joint.graph.nodes if node in depends and node.op == "call_function"]
    early = [node for node in joint.graph.nodes if node not in depends and node.op in ("call_function", "get_attr")]
    read = {argument for node in late for argument in node.all_input_nodes}
    read |= {grad for grad in grads if isinstance(grad, fx.Node)}
    saved = [node for node in (*inputs, *early) if node in read]
    for node in joint.graph.nodes:
        node.meta[_TANGENTS] = depends.get(node, frozenset())
    forward = _extract(joint, inputs, early, [*outputs, *saved])
    backward = _extract(joint, [*saved, *tangents], late, grads)
    saved_storages = {storage for node in saved for storage in dataflow.storages(node)}
    saved_inputs = tuple(index for index, node in enumerate(inputs) if dataflow.storages(node) & saved_storages)
    grads_depend = tuple(depends.get(grad, frozenset()) if isinstance(grad, fx.Node) else frozenset() for grad in grads)
    readers: dict[fx.Node, frozenset[int]] = {}
    for node in (*late, *(grad for grad in grads if isinstance(grad, fx.Node))):
        for argument in (*node.all_input_nodes, node):
            readers[argument] = readers.get(argument, frozenset()) | depends.get(node, frozenset())
    of_saved = [readers.get(node, frozenset()) for node in saved]
    of_inputs = []
    for memory in (dataflow.storages(inputs[index]) for index in saved_inputs):
        seen = [of for node, of in zip(saved, of_saved, strict=True) if dataflow.storages(node) & memory]
        of_inputs.append(frozenset[int]().union(*seen))
    return _Parts(forward, backward, grads_depend, saved_inputs, (*of_saved, *of_inputs))


def without_tangents(backward: fx.GraphModule, missing: frozenset[int]) -> fx.GraphModule:
    """The backward program for outputs of which some have no gradient.

    What depends on those alone becomes zero. Running it on gradients of zero would not do: where
    the outputs' own derivatives are infinite it gives NaN.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in backward.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and node.meta[_TANGENTS] <= missing and isinstance(value, torch.Tensor):
            size = tuple(value.size())
            copies[node] = graph.call_function(
                torch.ops.aten.zeros.default, (size,), {"dtype": value.dtype, "device": value.device}
            )
        elif node.op != "output":
            copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    results = dataflow.outputs(backward.graph)
    graph.output([None if result is None else copies[result] for result in results])
    graph.eliminate_dead_code()
    return fx.GraphModule(backward, graph)


def _dependence(graph: fx.Graph, tangents: Sequence[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    """For every node that depends on tangents, through data or through memory that such a node writes: on which."""
    depends = {tangent: frozenset([index]) for index, tangent in enumerate(tangents)}
    written: dict[int, frozenset[int]] = {}
    known = -1
    while known < sum(map(len, depends.values())):
        known = sum(map(len, depends.values()))
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            union = depends.get(node, frozenset()).union(
                *(depends.get(argument, frozenset()) for argument in node.all_input_nodes),
                *(written.get(storage, frozenset()) for storage in dataflow.storages(node)),
            )
            if not union:
                continue
            depends[node] = union
            for target in dataflow.written(node):
                for storage in dataflow.storages(target):
                    written[storage] = written.get(storage, frozenset()) | union
    return depends


def _refuse_order(graph: fx.Graph, depends: dict[fx.Node, frozenset[int]]) -> None:
    """The split runs every early node before every late one; that must not reorder writes or random numbers."""
    early_storages: set[int] = set()
    late_seen = False
    for node in graph.nodes:
        late = node in depends and node.op == "call_function"
        late_seen |= late
        targets = {storage for target in dataflow.written(node) for storage in dataflow.storages(target)}
        if late and targets & early_storages:
            raise RefusedError(Refusal(f"the backward pass writes to a value of the forward pass ({node.target})"))
        if late_seen and not late and (dataflow.draws_random_numbers(node) or targets & early_storages):
            raise RefusedError(Refusal(f"{node.target} runs between parts of the backward pass"))
        if not late and not late_seen:
            early_storages |= dataflow.storages(node)


def _extract(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node], results: Sequence[dataflow.Result]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    graph.output([copies[result] if isinstance(result, fx.Node) else result for result in results])
    return fx.GraphModule(joint, graph)


def _example(output: dataflow.Result) -> torch.Tensor:
    value = output.meta.get("example_value") if isinstance(output, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise RefusedError(Refusal("the model's output contains values that are not tensors"))
    return value


def _groups(roots: Sequence[torch.Tensor]) -> list[int]:
    """See `SplitProgram.groups`. Nodes that have kept nothing may be reached by every backward pass."""
    groups: list[int] = []
    seen: list[set[Any]] = []
    for index, root in enumerate(roots):
        nodes, waiting = set[Any](), [root.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [following for following, _ in node.next_functions]
        keeping = {node for node in nodes if _keeps_values(node)}
        joined = {groups[other] for other in range(index) if not keeping.isdisjoint(seen[other])}
        groups = [index if group in joined else group for group in groups] + [index]
        seen.append(keeping)
    return groups


def _keeps_values(node: Any) -> bool:
    """Whether a node of autograd's graph lets go of tensors after its backward pass."""
    return hasattr(node, "saved_tensors") or any(name.startswith("_raw_saved_") for name in dir(node))


def _refuse_nested_outputs(graph: fx.Graph, differentiable: Sequence[bool]) -> None:
    """The outputs of a replay are siblings in autograd's graph, so none may be computed from another one."""
    results = [node for node in dataflow.outputs(graph) if isinstance(node, fx.Node)]
    roots = {node for node, needs in zip(results, differentiable, strict=True) if needs}
    below: set[fx.Node] = set()
    for node in graph.nodes:
        if any(argument in roots or argument in below for argument in node.all_input_nodes):
            below.add(node)
    if roots & below:
        raise RefusedError(Refusal("an output of the model, or a tensor it stores, is computed from another one"))


def _refuse_aliases(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    taken = {dataflow.storage_of(tensor) for tensor in inputs}
    for output in outputs:
        storage = dataflow.storage_of(output)
        if storage in taken:
            raise RefusedError(Refusal("an output of the model shares memory with an input or another output"))
        taken.add(storage)
