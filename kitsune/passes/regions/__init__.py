"""Fuses point-wise operators and reductions between library calls: each region of them becomes one operator."""

from __future__ import annotations

import heapq
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.errors import Refusal
from kitsune.graph import dataflow
from kitsune.graph.dependencies import Operation, Operations, operations
from kitsune.kernels.inductor import INDUCTOR
from kitsune.kernels.regions import Backend, region_name, region_operator
from kitsune.passes.regions.extract import Extract, extract
from kitsune.passes.regions.grouping import Item, grouped
from kitsune.passes.regions.operators import gains_alone, is_fusible, is_pointwise, is_view, launches
from kitsune.passes.regions.repeats import repeats

__all__ = ["INDUCTOR", "Fused", "Judge", "RefusedRegion", "Region", "fuse_regions"]

_log = logging.getLogger("kitsune")


@dataclass(frozen=True)
class Region:
    """What was fused.

    Attributes:
        name: of the node that computes it, in the new graph.
        operator: what runs there: `kitsune_regions.<name>.default`, the same for equal regions.
        nodes: the names of the operators' nodes in the old graph that it stands for, in order.
        num_inputs, num_outputs: the tensors that it reads and writes.
    """

    name: str
    operator: str
    nodes: tuple[str, ...]
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True)
class RefusedRegion:
    """What could not be fused, and why.

    Attributes:
        nodes: the names of the operators' nodes, which stay.
        refusal: the reason.
    """

    nodes: tuple[str, ...]
    refusal: Refusal


@dataclass(frozen=True)
class Fused:
    """A graph with its regions as operators, in the order of the regions.

    Attributes:
        module: the graph.
        regions: what was fused.
        refused: what should have been, but had no code, or none that is worth it.
    """

    module: fx.GraphModule
    regions: tuple[Region, ...]
    refused: tuple[RefusedRegion, ...]


Judge = Callable[[fx.GraphModule, torch._ops.OpOverload], Refusal | None]
"""None if an operator shall be used in place of the graph that it computes."""


def fuse_regions(
    module: fx.GraphModule, backend: Backend = INDUCTOR, judge: Judge = lambda _module, _operator: None
) -> Fused:
    """A copy of `module` in which regions of point-wise operators and reductions are one operator each.

    Which operators are fusible see `operators.is_fusible`, and which of them become a region `grouping.grouped`. A
    region has at least two kernels, or one operator that is known to have several. Operators that write in place are
    in none, so that they should be given another form before (`kitsune.passes.in_place`). Views of a region's results
    stay outside. What regions compute again, rather than to read it, see `repeats.repeats`; operators whose results
    nobody reads then are left to `kitsune.passes.drop_dead`.

    Code for all regions is generated and tried out before the pass returns, which takes seconds for each that is
    new; the logger `kitsune` tells of each. Where there is none for a region, its operators stay.

    The other nodes keep their names and values. Where a region has several results, they have the names of the nodes
    that computed them. Sums and transcendental functions may be rounded otherwise than by the operators.

    Args:
        backend: what generates the code.
        judge: asked once for each operator.
    """
    found = operations(module.graph)
    codes: dict[str, torch._ops.OpOverload | Refusal] = {}
    dependent: set[_Group] = set()
    while True:
        regions, repeating = _regions(module.graph, found.listed, dependent)
        made: dict[_Group, torch._ops.OpOverload] = {}
        refused: dict[_Group, RefusedRegion] = {}
        for number, (group, region) in enumerate(regions.items(), 1):
            names = tuple(found.listed[place].node.name for place in group)
            name = region_name(region.module, *region.values(), backend)
            if name not in codes:
                _log.debug("region %d of %d: %s", number, len(regions), ", ".join(names))
                codes[name] = _judged(region, backend, judge)
            code = codes[name]
            if isinstance(code, Refusal):
                refused[group] = RefusedRegion(names, code)
            else:
                made[group] = code
        if repeating.isdisjoint(refused):
            break
        dependent |= repeating & refused.keys()  # their operators stay, and read what others have to write then
    rewriting = _Rewriting(module.graph, found, regions, made)
    return Fused(fx.GraphModule(module, rewriting.graph), rewriting.regions, tuple(refused.values()))


def _judged(region: Extract, backend: Backend, judge: Judge) -> torch._ops.OpOverload | Refusal:
    code = region_operator(region.module, *region.values(), backend)
    refusal = None if isinstance(code, Refusal) else judge(region.module, code)
    return code if refusal is None else refusal


_Group = tuple[int, ...]
"""The positions of operations, ascending."""


def _regions(
    graph: fx.Graph, listed: Sequence[Operation], dependent: Collection[_Group]
) -> tuple[dict[_Group, Extract], set[_Group]]:
    """The regions, and those that compute again what others do; none of those that are `dependent` does."""
    regions = _separate(graph, listed)
    inputs = {group: region.inputs for group, region in regions.items()}
    found = repeats(graph, listed, inputs, dependent, is_pointwise, _base)
    region_of = {node: group for group in regions for place in group for node in listed[place].nodes}

    def makes_itself(user: fx.Node, node: fx.Node) -> bool:
        return _base(node) in found.values.get(region_of.get(user, ()), ())

    for group in regions if found.places else ():
        members = [listed[place] for place in group]
        again = {node for place in found.places.get(group, ()) for node in listed[place].nodes}
        regions[group] = extract(members, is_view, again, makes_itself)
    return {group: region for group, region in regions.items() if region.outputs}, set(found.places)


def _separate(graph: fx.Graph, listed: Sequence[Operation]) -> dict[_Group, Extract]:
    """The regions, each of which reads what another one computes."""
    regions: dict[_Group, Extract] = {}
    for group in grouped(_items(graph, listed)):
        members = [listed[place] for place in group]
        num_launches = sum(launches(member.node) for member in members)
        if num_launches < 2 and not any(gains_alone(member.node) for member in members):
            continue
        extracted = extract(members, is_view)
        if extracted.inputs and extracted.outputs:
            regions[group] = extracted
    return regions


def _items(graph: fx.Graph, listed: Sequence[Operation]) -> list[Item]:
    device = _device(graph)
    reshaped = dataflow.reshaped(graph)
    owners = {node: place for place, operation in enumerate(listed) for node in operation.nodes}
    items: list[Item] = []
    for place, operation in enumerate(listed):
        node = operation.node
        num_elements = max((_num_elements(other) for other in (node, *node.all_input_nodes)), default=0)
        around = {argument for other in operation.nodes for argument in other.all_input_nodes}
        items.append(
            Item(
                fusible=_is_fusible(operation, device, reshaped),
                after=tuple(operation.after),
                producers=tuple(sorted({owners[other] for other in around if other in owners} - {place})),
                num_elements=num_elements,
                reads=tuple(base for base in map(_base, node.all_input_nodes) if _num_elements(base) == num_elements),
            )
        )
    return items


def _num_elements(node: fx.Node) -> int:
    return max((tensor.numel() for tensor in dataflow.tensors(node)), default=0)


def _is_fusible(operation: Operation, device: torch.device, reshaped: set[int]) -> bool:
    node = operation.node
    results = {node, *(user for user in node.users if user.target is operator.getitem)}
    return (
        is_fusible(node, device)
        and reshaped.isdisjoint((*operation.reads, *operation.writes))
        and all(other in results or is_view(other) for other in operation.nodes)
    )


def _device(graph: fx.Graph) -> torch.device:
    """Where the graph runs; beside it there may be numbers on the CPU."""
    devices = (tensor.device for node in dataflow.placeholders(graph) for tensor in dataflow.tensors(node))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _base(node: fx.Node) -> fx.Node:
    while is_view(node):
        base = node.args[0]
        assert isinstance(base, fx.Node)
        node = base
    return node


class _Rewriting:
    """A new graph in which each region is a call of its operator, in an order that dependencies allow.

    Attributes:
        graph: the new one.
        regions: what its calls stand for, in their order.
    """

    def __init__(
        self,
        graph: fx.Graph,
        found: Operations,
        extracts: Mapping[_Group, Extract],
        operators: Mapping[_Group, torch._ops.OpOverload],
    ) -> None:
        self._copies: dict[fx.Node, fx.Node] = {}
        self.graph = fx.Graph()
        first = set(found.prologue)
        for node in graph.nodes:
            if node in first or node.op not in ("call_function", "output"):
                self._copy(node)
        regions = []
        for group in _ordered(found.listed, operators):
            members = [found.listed[place] for place in group]
            if group in operators:
                regions.append(self._fuse(members, extracts[group], operators[group]))
            else:
                for node in members[0].nodes:
                    self._copy(node)
        self.regions = tuple(regions)
        (result,) = graph.output_node().args
        self.graph.output(fx.map_arg(result, self._copies.__getitem__))

    def _copy(self, node: fx.Node) -> None:
        self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)

    def _fuse(self, members: Sequence[Operation], region: Extract, target: torch._ops.OpOverload) -> Region:
        names = tuple(member.node.name for member in members)
        args = tuple(self._copies[node] for node in region.inputs)
        call = self.graph.create_node("call_function", target, args, name=f"region_{names[0]}")
        values = tuple(node.meta["val"] for node in region.outputs)
        call.meta = _meta(members[0].node, values[0] if len(values) == 1 else values)
        for place, node in enumerate(region.outputs):
            self._copies[node] = call if len(values) == 1 else self._item(call, place, node)
        for node in region.views:
            self._copy(node)
        return Region(call.name, str(target), names, len(args), len(values))

    def _item(self, call: fx.Node, place: int, node: fx.Node) -> fx.Node:
        item = self.graph.create_node("call_function", operator.getitem, (call, place), name=node.name)
        item.meta = _meta(node, node.meta["val"])
        return item


def _meta(node: fx.Node, value: object) -> dict[str, object]:
    """What is known of a call: its value, and of what the passes noted at `node` only where it comes from."""
    return {"val": value, **{name: node.meta[name] for name in ("stack_trace",) if name in node.meta}}


def _ordered(listed: Sequence[Operation], fused: Collection[_Group]) -> Iterator[_Group]:
    """The regions, and each other operation alone, in an order in which they can run: each as early as it can.

    Of those that can run, the one comes first whose first operation did.
    """
    group_of: dict[int, _Group] = {place: (place,) for place in range(len(listed))}
    group_of |= {place: group for group in fused for place in group}
    after = {group: set[_Group]() for group in group_of.values()}
    before = {group: set[_Group]() for group in group_of.values()}
    for place, operation in enumerate(listed):
        for earlier in operation.after:
            if group_of[earlier] != group_of[place]:
                before[group_of[place]].add(group_of[earlier])
                after[group_of[earlier]].add(group_of[place])
    missing = {group: len(earlier) for group, earlier in before.items()}
    ready = [group for group, count in missing.items() if not count]
    heapq.heapify(ready)
    while ready:
        group = heapq.heappop(ready)
        yield group
        for later in after[group]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, later)
