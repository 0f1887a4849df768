"""Which operators of a graph must run before which others.

Nodes are grouped into operations, the units that are scheduled. A node that launches nothing does not stand alone:

- A view (an operator that writes nothing and whose results lie in the memory of its argument, or `getitem`) belongs
  to the operation that its argument belongs to. Views of inputs belong to none: they can be made before everything
  else, and no operation has to wait for another one that happens to use the same view. They are the `prologue`.
- Memory without content (`aten.empty` and its like) belongs to the operation that first writes to it.

Where that would be wrong, the node is an operation of its own: a view that joins results of several operations, all
that touches a tensor whose shape or strides are changed in place, and memory that is never written or first read.

Dependencies are between storages, so that all aliases count; which part of a storage a view covers does not. Whoever
takes an argument reads it, even if only its shape matters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow

Kind = Literal["true", "anti", "output", "order"]
"""Why one operation must follow another: it reads what the other wrote; it writes what the other reads; both write
the same; both draw random numbers. Where several hold, the first of these."""

_RANKS: dict[Kind, int] = {"true": 0, "anti": 1, "output": 2, "order": 3}

_aten = torch.ops.aten

_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

# They do not read what they write, their first argument. Of the others that write in place, the schema does not tell.
_OVERWRITING = {
    _aten.bernoulli_.float,
    _aten.copy_.default,
    _aten.exponential_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.normal_.default,
    _aten.random_.default,
    getattr(_aten.random_, "from"),
    _aten.random_.to,
    _aten.uniform_.default,
    _aten.zero_.default,
}


@dataclass(frozen=True)
class Allocation:
    """A storage that an operation allocates: its key (see `dataflow.storage_of`), its size, and the node that does."""

    node: fx.Node
    storage: int
    num_bytes: int


@dataclass(frozen=True)
class Operation:
    """An operator with the nodes that come with it.

    Attributes:
        node: the operator.
        nodes: all nodes of the operation, in the order of the graph.
        reads: keys of the storages that it reads.
        writes: keys of the storages that it writes or allocates, and of those that its results lie in.
        allocates: the storages that are new with it, in the order of the results.
        after: the positions of earlier operations that it directly depends on, ascending, and why.
    """

    node: fx.Node
    nodes: tuple[fx.Node, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    allocates: tuple[Allocation, ...]
    after: Mapping[int, Kind]


@dataclass(frozen=True)
class Operations:
    """The nodes of a graph that run: first `prologue` in its order, then `listed` in any order that dependencies allow.

    Every `call_function` node is in one of the two, once.
    """

    prologue: tuple[fx.Node, ...]
    listed: tuple[Operation, ...]


def operations(graph: fx.Graph) -> Operations:
    """The operations of `graph`, in the order of their operators, in time linear in the size of the graph.

    `graph` is one that `kitsune.graph.verify.refuse_graph` does not refuse. Keys of storages stay valid as long as the
    nodes keep their values.
    """
    samples: dict[int, torch.Tensor] = {}
    keys = {node: _keys(node, samples) for node in graph.nodes}
    groups = _groups(graph, keys)
    prologue = groups.pop(None, [])
    seen = {key for node in graph.nodes if node.op != "call_function" for key in keys[node]}
    history = History()
    listed = []
    for node, nodes in groups.items():
        assert node is not None
        allocates = tuple(_allocations(nodes, keys, samples, seen))
        reads = _unique(key for argument in _read(node, nodes) for key in keys[argument])
        changed = [key for target in dataflow.written(node) for key in keys[target]]
        writes = _unique([*changed, *(key for member in nodes for key in keys[member])])
        after = history.append(reads, writes, dataflow.draws_random_numbers(node))
        listed.append(Operation(node, tuple(nodes), reads, writes, allocates, after))
    return Operations(tuple(prologue), tuple(listed))


class History:
    """Who wrote and who read each storage last, of the operations so far."""

    def __init__(self) -> None:
        self._count = 0
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}  # since the latest write
        self._random: int | None = None

    def append(self, reads: Iterable[int], writes: Iterable[int], random: bool) -> dict[int, Kind]:
        """What the next operation directly depends on. What follows from other dependencies may be left out."""
        found: list[tuple[int, Kind]] = [(self._writer[key], "true") for key in reads if key in self._writer]
        for key in writes:
            found += [(reader, "anti") for reader in self._readers.get(key, ())]
            found += [(self._writer[key], "output")] if key in self._writer else []
        if random and self._random is not None:
            found.append((self._random, "order"))
        self._note(reads, writes, random)
        # Of several kinds the first counts, so it is put in last.
        return dict(sorted(found, key=lambda item: (item[0], -_RANKS[item[1]])))

    def _note(self, reads: Iterable[int], writes: Iterable[int], random: bool) -> None:
        present = self._count
        self._count += 1
        for key in reads:
            self._readers.setdefault(key, []).append(present)
        for key in writes:
            self._writer[key] = present
            self._readers[key] = []
        if random:
            self._random = present


def _groups(graph: fx.Graph, keys: Mapping[fx.Node, tuple[int, ...]]) -> dict[fx.Node | None, list[fx.Node]]:
    """Operator → the nodes of its operation, in the order of the operators; None → the prologue."""
    reshaped = {
        key for node in graph.nodes if _reshapes(node) for one in (node, *node.all_input_nodes) for key in keys[one]
    }
    homes: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            homes[node] = None
            continue
        around = {homes[argument] for argument in node.all_input_nodes}
        attached = len(around) == 1 and _is_view(node, keys, reshaped)
        homes[node] = around.pop() if attached else node
    moved = _moved_allocations(homes, keys, reshaped)
    groups: dict[fx.Node | None, list[fx.Node]] = {
        node: [] for node, home in homes.items() if home is node and node not in moved
    }
    for node, home in homes.items():
        if node.op == "call_function":
            groups.setdefault(home if home is None else moved.get(home, home), []).append(node)
    return groups


def _moved_allocations(
    homes: Mapping[fx.Node, fx.Node | None], keys: Mapping[fx.Node, tuple[int, ...]], reshaped: set[int]
) -> dict[fx.Node, fx.Node]:
    """Allocations without content → the operator that first touches their memory, if it is one that writes to it."""
    untouched: dict[int, fx.Node] = {}
    moved: dict[fx.Node, fx.Node] = {}
    for node, home in homes.items():
        if home is not node:
            continue
        touched = {key for argument in node.all_input_nodes for key in keys[argument]}
        first = [key for key in touched if key in untouched]
        written = {key for target in dataflow.written(node) for key in keys[target]} if first else set()
        moved |= {untouched[key]: node for key in first if key in written}
        for key in first:
            del untouched[key]
        if node.target in _EMPTY and not reshaped & (touched | set(keys[node])):
            untouched[keys[node][0]] = node
    return moved


def _is_view(node: fx.Node, keys: Mapping[fx.Node, tuple[int, ...]], reshaped: set[int]) -> bool:
    if node.target is operator.getitem:
        return True
    results = keys[node]
    if not results or not isinstance(node.target, torch._ops.OpOverload) or dataflow.draws_random_numbers(node):
        return False
    given = {key for argument in node.all_input_nodes for key in keys[argument]}
    return given.issuperset(results) and reshaped.isdisjoint(results) and not any(dataflow.written(node))


def _reshapes(node: fx.Node) -> bool:
    """Whether it changes what a tensor says of itself, so that a view made of it later is another one."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags


def _read(node: fx.Node, nodes: list[fx.Node]) -> list[fx.Node]:
    """The arguments, from outside, of an operation whose operator is `node`, without those that it only overwrites."""
    if len(nodes) == 1 and not _may_overwrite(node):
        return node.all_input_nodes
    inside = set(nodes)
    others = [argument for member in nodes if member is not node for argument in member.all_input_nodes]
    return [argument for argument in (*others, *operands(node)) if argument not in inside]


def _may_overwrite(node: fx.Node) -> bool:
    return node.target in _OVERWRITING or "out" in node.kwargs


def operands(node: fx.Node) -> list[fx.Node]:
    """The arguments of `node` without those that it only overwrites."""
    if not _may_overwrite(node):
        return node.all_input_nodes
    args = node.args[1:] if node.target in _OVERWRITING else node.args
    kwargs = [value for name, value in node.kwargs.items() if name != "out"]
    return [leaf for leaf in pytree.tree_leaves([*args, *kwargs]) if isinstance(leaf, fx.Node)]


def _allocations(
    nodes: list[fx.Node],
    keys: Mapping[fx.Node, tuple[int, ...]],
    samples: Mapping[int, torch.Tensor],
    seen: set[int],
) -> Iterator[Allocation]:
    """The storages that first appear with `nodes`; they are added to `seen`."""
    for node in nodes:
        for key in keys[node]:
            if key not in seen:
                seen.add(key)
                yield Allocation(node, key, samples[key].untyped_storage().nbytes())


def _keys(node: fx.Node, samples: dict[int, torch.Tensor]) -> tuple[int, ...]:
    """The storages of `node`'s values; `samples` gets a tensor of each."""
    value = node.meta.get("val")
    tensors = [value] if isinstance(value, torch.Tensor) else dataflow.tensors(node)
    found = {dataflow.storage_of(tensor): tensor for tensor in tensors}
    samples.update(found)
    return tuple(found)


def _unique(keys: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(keys))
