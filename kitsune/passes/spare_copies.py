"""Computes a step without copies that only put a tensor's elements in another order.

Models change the order of dimensions (`transpose`, then `contiguous`) for products and attention that would take the
elements as they lie, or rows in any order: an attention that puts the sequence first, in a model that puts the batch
first, turns all rows before its first product, and back after its last. Here such a copy is left out, and where its
elements lie then is followed through all that is computed of them. Where an operator asks for the order that they had,
the copy is made there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, value

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default}

_SUMS = {aten.sum.dim_IntList}

# They read operands in any strides, if the elements of a head lie together, and follow them in their results. Some need
# rows that begin at multiples of 16 bytes.
_ATTENTIONS = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}

# They read any strides, and their results are contiguous.
_ANY_STRIDES = {aten.select_backward.default, aten.slice_backward.default}

_ALIGNED = 8  # elements, of 16 bits or more

_ORIGIN = ("stack_trace", "nn_module_stack")


class _NotPossibleError(Exception):
    """The step relies on how its values are laid out."""


class _Dim(NamedTuple):
    """Elements at equal distances in memory; `before` is what their distance was."""

    size: int
    before: int
    stride: int


class _Part(NamedTuple):
    """A dimension of a view, or what is left of it within one of memory."""

    size: int
    stride: int


_Parts = tuple[_Part, ...]
"""Of one dimension of a view, the outermost first: one, if its elements are at equal distances; none of one element."""


class _Order(NamedTuple):
    """An order for the parts of a dimension in which each factor that has it has them at equal distances.

    Attributes:
        sizes: of the parts, the outermost of before first.
        order: the places of the parts, the outermost of now first.
        first: the dimension in the first factor, then.
        second: in the second.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    first: _Part
    second: _Part

    def dims(self, before: int, stride: int) -> list[_Dim]:
        """Those of a result, given what its strides were and are."""
        found = {}
        for place in reversed(self.order):
            found[place] = stride
            stride *= self.sizes[place]
        return [
            _Dim(size, before * math.prod(self.sizes[place + 1 :]), found[place])
            for place, size in enumerate(self.sizes)
        ]


class _Elements(NamedTuple):
    """An order for the elements of a result.

    Attributes:
        sizes: for each dimension those of its parts, the outermost of before first.
        places: of all parts, the outermost of now first.
    """

    sizes: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]


class _Factors(NamedTuple):
    rows: _Order
    inner: _Order
    cols: _Order


@dataclass(frozen=True)
class _Memory:
    """Where the elements of a storage lie now.

    Attributes:
        node: has them.
        dims: their order before, the outermost first; dense.
        offset: of the first element.
    """

    node: fx.Node
    dims: tuple[_Dim, ...]
    offset: int


@dataclass(frozen=True)
class _Seen:
    """A view of a storage, as it lies now."""

    parts: tuple[_Parts, ...]
    offset: int


def spare_copies(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation with fewer bytes copied into another order.

    Inputs and results keep their shapes and strides, and the same inputs are written. Products may have rows in another
    order, so that sums over rows are rounded differently. Comes best before operators are fused.

    Returns:
        `module` itself if no bytes would be spared, or if it looks at memory in ways that depend on the layout.
    """
    if not any(_is_order_alone(node) for node in module.graph.nodes):
        return module
    try:
        graph = _Conversion(module.graph).graph
    except _NotPossibleError:
        return module
    return fx.GraphModule(module, graph) if _copied_bytes(graph) < _copied_bytes(module.graph) else module


class _Conversion:
    """Rebuilds a graph node by node; the new one is `graph`."""

    def __init__(self, before: fx.Graph) -> None:
        self.graph = fx.Graph()
        self._mode = mode_of(before)
        self._made: dict[fx.Node, fx.Node] = {}
        self._memory: dict[int, _Memory] = {}
        self._views: dict[object, fx.Node] = {}
        self._turned: set[tuple[int, int]] = set()
        self._origin: dict[str, Any] = {}
        shared = [before.output_node(), *dataflow.placeholders(before)]
        touched = [one for node in before.nodes for one in dataflow.written(node)]
        results = [one for node in shared for one in (node.all_input_nodes or [node])]
        self._kept = {key for one in (*touched, *results) for key in dataflow.storages(one)}
        self._written = {key for one in touched for key in dataflow.storages(one)} | dataflow.reshaped(before)
        for node in before.nodes:
            self._origin = {name: node.meta[name] for name in _ORIGIN if name in node.meta}
            self._add(node)
        self._drop_unused()

    def _add(self, node: fx.Node) -> None:
        if node.op == "output":
            results = {one: self._as_before(one) for one in node.all_input_nodes}
            self._made[node] = self.graph.node_copy(node, results.__getitem__)
        elif node.op != "call_function":
            self._made[node] = self.graph.node_copy(node)
        elif _is_view(node):
            self._see(node)
        elif not (self._may_go(node) and self._leave_out(node)):
            self._compute(node)

    def _compute(self, node: fx.Node) -> None:
        moved = any(self._is_moved(one) for one in node.all_input_nodes)
        if moved and node.target in _PRODUCTS and self._multiply(node):
            return
        if moved and node.target in _SUMS and self._sum(node):
            return
        if moved and _is_pointwise(node) and self._apply(node):
            return
        read: Callable[[fx.Node], fx.Node] = self._plainly
        if any(dataflow.written(node)) or (dataflow.draws_random_numbers(node) and node.target not in _ATTENTIONS):
            read = self._as_before
        elif node.target in _ATTENTIONS:
            read = self._in_rows
        elif node.target in _ANY_STRIDES:
            read = self._as_it_lies
        self._call(node, {one: read(one) for one in node.all_input_nodes})

    def _again(self, node: fx.Node, operands: dict[fx.Node, fx.Node]) -> fx.Node:
        made = self._made[node] = self.graph.node_copy(node, operands.__getitem__)
        found = value(self._mode, made.target, made.args, dict(made.kwargs))  # type: ignore[arg-type]
        if found is not None or made.target is operator.getitem:
            made.meta["val"] = found
        return made

    def _call(self, node: fx.Node, operands: dict[fx.Node, fx.Node]) -> None:
        """Computes `node`, whose value may lie otherwise now."""
        made = self._again(node, operands)
        leaves = zip(dataflow.tensors(node), dataflow.tensors(made), strict=True)
        if not all(_same_layout(before, after) or self._may_move(before) for before, after in leaves):
            operands = {one: self._as_before(one) for one in node.all_input_nodes}
            self.graph.erase_node(made)
            made = self._again(node, operands)
        before, after = node.meta.get("val"), made.meta.get("val")
        if isinstance(before, torch.Tensor) and not _same_layout(before, after):  # type: ignore[arg-type]
            strides = zip(before.size(), before.stride(), after.stride(), strict=True)  # type: ignore[union-attr]
            self._remember(before, made, [_Dim(*one) for one in strides])

    def _may_move(self, before: torch.Tensor) -> bool:
        """Whether a result is all that lies in its memory, without gaps, and nothing is written there."""
        found = sorted((one for one in zip(before.stride(), before.size(), strict=True) if one[1] > 1), reverse=True)
        inner = [math.prod(size for _, size in found[place + 1 :]) for place in range(len(found))]
        is_dense = not before.storage_offset() and [stride for stride, _ in found] == inner
        return is_dense and dataflow.storage_of(before) not in self._written

    def _remember(self, before: torch.Tensor, made: fx.Node, dims: Iterable[_Dim]) -> None:
        """`made` has the elements of a result that may move."""
        ordered = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.before)
        self._memory[dataflow.storage_of(before)] = _Memory(made, tuple(ordered), made.meta["val"].storage_offset())

    # What is read

    def _is_moved(self, node: fx.Node) -> bool:
        return any(key in self._memory for key in dataflow.storages(node))

    def _seen(self, tensor: torch.Tensor) -> _Seen | None:
        """How a value of before lies now; None if it cannot be said for each dimension by itself."""
        memory = self._memory.get(dataflow.storage_of(tensor))
        if memory is None:
            parts = [(_Part(*one),) if one[0] > 1 else () for one in zip(tensor.size(), tensor.stride(), strict=True)]
            return _Seen(tuple(parts), int(tensor.storage_offset()))
        return _translated(tensor, memory)

    def _source(self, node: fx.Node) -> fx.Node:
        """What has the elements of a value of before."""
        memory = self._memory.get(dataflow.storage_of(node.meta["val"]))
        return self._made[node] if memory is None else memory.node

    def _strided(self, node: fx.Node, sizes: Sequence[int], strides: Sequence[int], offset: int) -> fx.Node:
        """The memory in which a value of before lies, seen so."""
        source = self._source(node)
        known = source.meta["val"]
        if (tuple(known.size()), known.storage_offset()) == (tuple(sizes), offset) and _strides_fit(known, strides):
            return source
        key = source, tuple(sizes), tuple(strides), offset
        if key not in self._views:
            self._views[key] = self._viewed(_root(source), list(sizes), list(strides), offset)
        return self._views[key]

    def _viewed(self, root: fx.Node, sizes: list[int], strides: list[int], offset: int) -> fx.Node:
        """What has memory, seen so: by calls that other passes know well, if there are such."""
        tensor = root.meta["val"]
        order = sorted(range(len(sizes)), key=lambda place: (-strides[place], place))
        ordered = [sizes[place] for place in order]
        inner = [math.prod(ordered[place + 1 :]) for place in range(len(ordered))]
        dense = all(size == 1 or strides[place] == one for place, size, one in zip(order, ordered, inner, strict=True))
        whole = tensor.is_contiguous() and (tensor.numel(), tensor.storage_offset()) == (math.prod(sizes), offset)
        if not (dense and whole):
            return self._new(aten.as_strided.default, (root, sizes, strides, offset))
        view = root if list(tensor.size()) == ordered else self._new(aten.view.default, (root, ordered))
        places = [order.index(place) for place in range(len(order))]
        return view if places == sorted(places) else self._new(aten.permute.default, (view, places))

    def _plain(self, node: fx.Node) -> fx.Node | None:
        """A value of before in its shape, as it lies now; None if there are no strides for that."""
        if not self._is_moved(node):
            return self._made[node]
        tensor = node.meta["val"]
        seen = self._seen(tensor)
        if seen is None or any(len(parts) > 1 for parts in seen.parts):
            return None
        known = self._made.get(node)
        strides = [parts[0].stride if parts else 1 for parts in seen.parts]
        if known is not None and self._lies(known, node, strides, seen.offset):
            return known
        return self._strided(node, tensor.size(), strides, seen.offset)

    def _lies(self, known: fx.Node, node: fx.Node, strides: Sequence[int], offset: int) -> bool:
        """Whether `known` is such a view of the memory in which `node` lies now."""
        tensor, source = known.meta["val"], self._source(node).meta["val"]
        same = dataflow.storage_of(tensor) == dataflow.storage_of(source)
        return same and tensor.storage_offset() == offset and _strides_fit(tensor, strides)

    def _plainly(self, node: fx.Node) -> fx.Node:
        """In the layout that it had, or contiguous."""
        return self._such(node, lambda tensor: _same_layout(tensor, node.meta["val"]) or tensor.is_contiguous())

    def _as_before(self, node: fx.Node) -> fx.Node:
        """In the strides that it had."""
        if not self._is_moved(node):
            return self._made[node]
        before = node.meta["val"]
        plain = self._such(node, lambda tensor: _same_layout(tensor, before))
        if plain.meta["val"].stride() == before.stride():
            return plain
        return self._new(aten.as_strided.default, (plain, list(before.size()), list(before.stride())))

    def _as_it_lies(self, node: fx.Node) -> fx.Node:
        """In any strides."""
        return self._such(node, lambda _: True)

    def _in_rows(self, node: fx.Node) -> fx.Node:
        """In the layout that it had, or in rows that are aligned, whatever their order."""
        return self._such(node, lambda tensor: _same_layout(tensor, node.meta["val"]) or _has_aligned_rows(tensor))

    def _such(self, node: fx.Node, fits: Callable[[torch.Tensor], bool]) -> fx.Node:
        if not self._is_moved(node):
            return self._made[node]
        plain = self._plain(node)
        if plain is not None and fits(plain.meta["val"]):
            return plain
        self._settle(node)
        plain = self._plain(node)
        if plain is None:
            raise _NotPossibleError
        return plain

    def _settle(self, node: fx.Node, turned: tuple[int, int] | None = None) -> None:
        """Copies all that lies in the same memory, into the order it had, or with its two outermost parts turned."""
        key = dataflow.storage_of(node.meta["val"])
        memory = self._memory[key]
        dims = list(memory.dims)
        if turned is not None:
            dims = _split_outermost(dims, turned)
            dims[:2] = dims[1], dims[0]
        view = self._viewed(_root(memory.node), [dim.size for dim in dims], [dim.stride for dim in dims], memory.offset)
        copy = self._new(aten.clone.default, (view,), {"memory_format": torch.contiguous_format})
        strides = copy.meta["val"].stride()
        order = [dim._replace(stride=stride) for dim, stride in zip(dims, strides, strict=True)]
        self._memory[key] = _Memory(copy, tuple(sorted(order, key=lambda dim: -dim.before)), 0)

    # What is done with it

    def _see(self, node: fx.Node) -> None:
        """A view, or a part of several results."""
        (source, *_) = node.all_input_nodes
        if not isinstance(source.meta.get("val"), torch.Tensor) or not self._is_moved(source):
            self._call(node, {one: self._made[one] for one in node.all_input_nodes})
            return
        if node.meta["val"].dtype != source.meta["val"].dtype:
            raise _NotPossibleError
        plain, seen = self._plain(source), self._seen(node.meta["val"])
        if plain is None or seen is None or any(len(parts) > 1 for parts in seen.parts):
            return  # to be seen as a part of what reads it
        strides = [parts[0].stride if parts else 1 for parts in seen.parts]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: plain)
        try:
            found = value(self._mode, node.target, args, kwargs)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):  # there are no strides for this view
            return
        if found.storage_offset() == seen.offset and _strides_fit(found, strides):
            made = self.graph.node_copy(node, lambda _: plain)
            made.meta["val"] = found
            self._made[node] = made

    def _may_go(self, node: fx.Node) -> bool:
        """Whether `node` copies all of a memory, to which nothing is written, into one of which nothing is returned."""
        if not _is_order_alone(node):
            return False
        made, (source,) = dataflow.storages(node), node.all_input_nodes
        return not made & self._kept and not dataflow.storages(source) & self._written and not _is_part(source, node)

    def _leave_out(self, node: fx.Node) -> bool:
        (source,) = node.all_input_nodes
        seen, copy = self._seen(source.meta["val"]), node.meta["val"]
        if seen is None:
            return False
        dims: list[_Dim] = []
        for parts, before in zip(seen.parts, copy.stride(), strict=True):
            for place, part in enumerate(parts):
                inner = math.prod(one.size for one in parts[place + 1 :])
                dims.append(_Dim(part.size, before * inner, part.stride))
        order = tuple(sorted(dims, key=lambda dim: -dim.before))
        self._memory[dataflow.storage_of(copy)] = _Memory(self._source(source), order, seen.offset)
        return True

    def _multiply(self, node: fx.Node) -> bool:
        """A product of two matrices, whose rows and columns may be in another order."""
        *added, first, second = [one for one in node.args if isinstance(one, fx.Node)]
        if added and (self._is_moved(added[0]) or added[0].meta["val"].dim() != 1):
            return False
        result = node.meta["val"]
        if first is second or not (self._may_move(result) and result.is_contiguous() and result.numel()):
            return False
        found = self._factors(first, second)
        if found is None:
            for one in (first, second):
                if self._is_moved(one) and not self._is_matrix(one):
                    self._settle_rows(one)
            found = self._factors(first, second)
        if found is None:
            return False
        rows, inner, cols = found.rows, found.inner, found.cols
        if len(cols.sizes) > 1 and added:
            return False
        left = self._matrix(first, rows.first, inner.first)
        right = self._matrix(second, inner.second, cols.first)
        made = self._again(node, {**{one: self._made[one] for one in added}, first: left, second: right})
        before, result = node.meta["val"], made.meta["val"]
        if len(rows.sizes) > 1 or len(cols.sizes) > 1:
            dims = [*rows.dims(before.stride(0), result.stride(0)), *cols.dims(before.stride(1), result.stride(1))]
            self._remember(before, made, dims)
        if len(rows.sizes) == 2 and rows.order == (1, 0):
            self._turned.add((rows.sizes[0], rows.sizes[1]))
        return True

    def _is_matrix(self, node: fx.Node) -> bool:
        """Whether one of the two strides is 1, as rows or as columns in any order."""
        seen = self._seen(node.meta["val"])
        if seen is None:
            return False
        rows, cols = map(_order_of, seen.parts)
        return rows is not None and cols is not None and _is_read(rows.first, cols.first)

    def _settle_rows(self, node: fx.Node) -> None:
        """Copies a matrix, with rows turned as those of others are."""
        memory = self._memory[dataflow.storage_of(node.meta["val"])]
        for turned in self._turned:
            if memory.dims and _split_outermost(memory.dims, turned):
                self._settle(node, turned)
                return
        self._settle(node)

    def _factors(self, first: fx.Node, second: fx.Node) -> _Factors | None:
        one, other = self._seen(first.meta["val"]), self._seen(second.meta["val"])
        if one is None or other is None:
            return None
        inner = _common_order(one.parts[1], other.parts[0])
        rows, cols = _order_of(one.parts[0]), _order_of(other.parts[1])
        if inner is None or rows is None or cols is None:
            return None
        are_read = _is_read(rows.first, inner.first) and _is_read(inner.second, cols.first)
        return _Factors(rows, inner, cols) if are_read else None

    def _matrix(self, node: fx.Node, rows: _Part, cols: _Part) -> fx.Node:
        seen = self._seen(node.meta["val"])
        assert seen is not None
        known = self._made.get(node)
        sizes, strides = (rows.size, cols.size), (rows.stride, cols.stride)
        if known is not None and known.meta["val"].size() == sizes and self._lies(known, node, strides, seen.offset):
            return known
        return self._strided(node, sizes, strides, seen.offset)

    def _sum(self, node: fx.Node) -> bool:
        """A sum over rows in any order."""
        (source, *_), (_, dims, *_) = node.all_input_nodes, node.args
        before = source.meta["val"]
        if not dims or not before.numel():
            return False
        if (seen := self._seen(before)) is None or not _keeps(seen, dims):  # type: ignore[arg-type]
            self._settle_rows(source)
        if (plain := self._plain(source)) is not None:
            self._call(node, {source: plain})
            return True
        if (seen := self._seen(before)) is None or not _keeps(seen, dims):  # type: ignore[arg-type]
            return False
        expanded, places = self._expanded(source, seen)
        summed = sorted(place for dim in dims for place in places[dim])  # type: ignore[union-attr, index]
        made = self._new(node.target, (expanded, summed, False), dict(node.kwargs))
        result = self._made[node] = self._new(aten.view.default, (made, list(node.meta["val"].size())))
        if not _same_layout(result.meta["val"], node.meta["val"]):
            raise _NotPossibleError
        return True

    def _expanded(self, node: fx.Node, seen: _Seen) -> tuple[fx.Node, list[range]]:
        """A value with a dimension for each part, and which of them each of its own has become."""
        sizes: list[int] = []
        strides: list[int] = []
        places: list[range] = []
        for parts in seen.parts:
            places.append(range(len(sizes), len(sizes) + max(len(parts), 1)))
            sizes += [part.size for part in parts] or [1]
            strides += [part.stride for part in parts] or [1]
        return self._strided(node, sizes, strides, seen.offset), places

    def _apply(self, node: fx.Node) -> bool:
        """A point-wise operator, whose operands are read in the order in which the largest of them lies now."""
        order = self._pointwise_order(node)
        if order is None:
            return False
        if all(len(sizes) == 1 for sizes in order.sizes) and list(order.places) == sorted(order.places):
            operands = {one: self._plain(one) for one in node.all_input_nodes}
            if None in operands.values():
                return False
            self._call(node, operands)  # type: ignore[arg-type]
            return True
        before = node.meta["val"]
        if not self._may_move(before):
            return False
        made = self._again(node, {one: self._ordered(one, order) for one in node.all_input_nodes})
        result = made.meta["val"].stride()
        strides = {place: result[found] for found, place in enumerate(order.places)}
        dims, place = [], 0
        for sizes, stride in zip(order.sizes, before.stride(), strict=True):
            for inner, size in enumerate(sizes):
                dims.append(_Dim(size, stride * math.prod(sizes[inner + 1 :]), strides[place]))
                place += 1
        self._remember(before, made, dims)
        return True

    def _pointwise_order(self, node: fx.Node) -> _Elements | None:
        before = node.meta["val"]
        seen = {one: self._seen(one.meta["val"]) for one in node.all_input_nodes}
        if not isinstance(before, torch.Tensor) or not before.numel() or None in seen.values():
            return None
        sizes: list[tuple[int, ...]] = []
        for dim, size in enumerate(before.size(), -before.dim()):
            all_parts = [one.parts[dim] for one in seen.values() if one is not None and len(one.parts) >= -dim]
            splits = {tuple(part.size for part in parts) for parts in all_parts} - {(), (size,)}
            if len(splits) > 1:
                return None
            sizes.append(splits.pop() if splits else (size,))
        whole = [one for one in node.all_input_nodes if one.meta["val"].size() == before.size()]
        moved = [one for one in whole if self._is_moved(one)] or whole
        places = range(sum(map(len, sizes)))
        if not moved:
            return _Elements(tuple(sizes), tuple(places))
        flat = self._split(moved[0], sizes)
        return _Elements(tuple(sizes), tuple(sorted(places, key=lambda place: -flat[place].stride)))

    def _split(self, node: fx.Node, sizes: Sequence[tuple[int, ...]]) -> list[_Part]:
        """All parts of all dimensions of a value, which has the last of those whose parts have `sizes`."""
        seen = self._seen(node.meta["val"])
        assert seen is not None
        of_own = sizes[len(sizes) - len(seen.parts) :]
        return [part for parts, split in zip(seen.parts, of_own, strict=True) for part in _split(parts, split)]

    def _ordered(self, node: fx.Node, order: _Elements) -> fx.Node:
        """A value with a dimension for each part, in that order."""
        seen = self._seen(node.meta["val"])
        assert seen is not None
        flat = self._split(node, order.sizes)
        rank, total = len(flat), len(order.places)
        if (
            not self._is_moved(node)
            and rank == len(seen.parts)
            and order.places[total - rank :] == (*range(total - rank, total),)
        ):
            return self._made[node]  # it has the innermost dimensions alone
        flat = [_Part(1, 1)] * (total - rank) + flat
        parts = [flat[place] for place in order.places]
        return self._strided(node, [part.size for part in parts], [part.stride for part in parts], seen.offset)

    def _new(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta = {**self._origin, "val": value(self._mode, target, args, kwargs or {})}
        return node

    def _drop_unused(self) -> None:
        """Views that were not read in the end."""
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and _is_view(node) and not node.users:
                self.graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    """Whether `node` only names memory; `_unsafe_view` does not say so."""
    is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return is_view or node.target in (operator.getitem, aten._unsafe_view.default)


def _root(node: fx.Node) -> fx.Node:
    """What made the memory that `node` sees."""
    while _is_view(node) and isinstance(node.all_input_nodes[0].meta.get("val"), torch.Tensor):
        (node,) = node.all_input_nodes
    return node


def _is_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or dataflow.draws_random_numbers(node):
        return False
    is_pointwise = node.target is aten._to_copy.default or torch.Tag.pointwise in node.target.tags
    return is_pointwise and not any(dataflow.written(node))


def _is_order_alone(node: fx.Node) -> bool:
    """Whether `node` copies a value only to have it contiguous. Views of complex numbers may be of conjugates."""
    if node.target is not aten.clone.default:
        return False
    copy = node.meta["val"]
    return copy.dim() > 1 and copy.numel() > 0 and copy.is_contiguous() and not (copy.is_complex() or copy.is_neg())


def _is_part(source: fx.Node, copy: fx.Node) -> bool:
    """Whether the memory of `source` has more than is copied, and would have to be kept for that."""
    return bool(source.meta["val"].untyped_storage().nbytes() > copy.meta["val"].nbytes)


def _has_aligned_rows(tensor: torch.Tensor) -> bool:
    *of_rows, last = zip(tensor.size(), tensor.stride(), strict=True)
    places = [stride for size, stride in of_rows if size > 1]
    return 1 in last and all(place % _ALIGNED == 0 for place in (*places, tensor.storage_offset()))


def _copied_bytes(graph: fx.Graph) -> int:
    return sum(node.meta["val"].nbytes for node in graph.nodes if node.target is aten.clone.default)


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of the same sizes have the same strides, where those matter."""
    return _strides_fit(first, second.stride())


def _strides_fit(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, where they matter."""
    return all(
        size == 1 or one == other for size, one, other in zip(tensor.size(), tensor.stride(), strides, strict=True)
    )


def _translated(tensor: torch.Tensor, memory: _Memory) -> _Seen | None:
    """Where the elements of a view lie now; None if steps along one dimension go over the end of another."""
    offset, rest = memory.offset, int(tensor.storage_offset())
    last = []
    for dim in memory.dims:
        place, rest = divmod(rest, dim.before)
        offset += place * dim.stride
        last.append(place)
    parts = [_located(*one, memory.dims, last) for one in zip(tensor.size(), tensor.stride(), strict=True)]
    if any(place >= dim.size for place, dim in zip(last, memory.dims, strict=True)):
        return None
    return None if None in parts else _Seen(tuple(parts), offset)  # type: ignore[arg-type]


def _located(size: int, stride: int, dims: Sequence[_Dim], last: list[int]) -> _Parts | None:
    """The parts of a dimension of a view; adds to `last` how far it goes along each dimension of memory."""
    parts: list[_Part] = []
    while size > 1 and stride:
        place = next(place for place, dim in enumerate(dims) if dim.before <= stride)
        dim = dims[place]
        step, rest = divmod(stride, dim.before)
        steps = min(size, dim.size // step)
        if rest or steps < 2 or (steps < size and (dim.size % step or size % steps)):
            return None
        last[place] += (steps - 1) * step
        parts.insert(0, _Part(steps, step * dim.stride))
        size, stride = size // steps, stride * steps
    return _merged(parts if size == 1 else [_Part(size, 0)])


def _merged(parts: Iterable[_Part]) -> _Parts:
    """With parts that follow each other at equal distances as one."""
    found: list[_Part] = []
    for part in parts:
        if found and found[-1].stride == part.size * part.stride:
            found[-1] = _Part(found[-1].size * part.size, part.stride)
        else:
            found.append(part)
    return tuple(found)


def _order_of(parts: _Parts) -> _Order | None:
    """The order of a dimension that only one factor has."""
    return _common_order(parts, parts)


def _common_order(first: _Parts, second: _Parts) -> _Order | None:
    if len(first) < len(second):
        first = _split(first, [part.size for part in second])
    elif len(second) < len(first):
        second = _split(second, [part.size for part in first])
    sizes = tuple(part.size for part in first)
    if sizes != tuple(part.size for part in second):
        return None
    order = tuple(sorted(range(len(sizes)), key=lambda place: -first[place].stride))
    both = [_merged(parts[place] for place in order) for parts in (first, second)]
    if any(len(one) > 1 for one in both):
        return None
    return _Order(sizes, order, *(one[0] if one else _Part(1, 1) for one in both))


def _split(parts: _Parts, sizes: Sequence[int]) -> _Parts:
    """A dimension in parts of these sizes, or of one element each where it is repeated; as it is if that is not so."""
    if not parts:
        return tuple(_Part(1, 1) for _ in sizes)
    if len(parts) > 1 or math.prod(sizes) != parts[0].size:
        return parts
    (whole,) = parts
    return tuple(_Part(size, whole.stride * math.prod(sizes[place + 1 :])) for place, size in enumerate(sizes))


def _is_read(rows: _Part, cols: _Part) -> bool:
    """Whether a product reads a matrix of these rows and columns as it lies."""
    return any(
        inner.stride == 1 and (outer.size == 1 or outer.stride >= inner.size)
        for inner, outer in ((rows, cols), (cols, rows))
    )


def _split_outermost(dims: Sequence[_Dim], sizes: tuple[int, int]) -> list[_Dim]:
    """With the outermost dimension in two of these sizes, or as they are if they are; empty if they do not fit."""
    first, *others = dims
    if others and (first.size, others[0].size) == sizes:
        return list(dims)
    if first.size != sizes[0] * sizes[1]:
        return []
    return [_Dim(sizes[0], first.before * sizes[1], first.stride * sizes[1]), first._replace(size=sizes[1]), *others]


def _keeps(seen: _Seen, summed: Sequence[int]) -> bool:
    """Whether the dimensions that are not summed are in one part each."""
    gone = {dim % len(seen.parts) for dim in summed}
    return all(len(parts) < 2 for dim, parts in enumerate(seen.parts) if dim not in gone)
