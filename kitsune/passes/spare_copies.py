"""Computes a step without copies that only put a tensor's elements in another order.

Models change the order of dimensions (`transpose`, then `contiguous`) for products and attention that would take the
elements as they are, or rows in any order: an attention that puts the sequence first, in a model that puts the batch
first, turns all rows before its first product, and back after its last. Here such a copy is left out. What is computed
of it is computed of the value that was copied, and where an operator asks for the other order, a copy is made there.

Each value is told as a view of another one, by the factors that the sizes of both consist of. Nothing is assumed of
strides: they only decide which of several orders is tried, and that there is such a view is asked for each time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow
from kitsune.graph.attention import ATTENTIONS, original
from kitsune.graph.factors import Dims, Factor, Form, common_parts, of_itself, size_of, sizes_of
from kitsune.graph.values import mode_of, value

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default}

# Some attentions need rows that begin at multiples of 16 bytes.
_ALIGNED = 8  # elements, of 16 bits or more

# They read any strides, and their results are contiguous.
_ANY_STRIDES = {aten.select_backward.default, aten.slice_backward.default}

# What they return has the elements of their first argument in the same order.
_RESHAPING = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}

_PERMUTING = {aten.permute.default, aten.transpose.int, aten.t.default}

# Other views that may be taken of a value in any strides.
_NARROWING = {aten.select.int, aten.slice.Tensor, aten.expand.default}

_ORIGIN = ("stack_trace", "nn_module_stack")


class _NotPossibleError(Exception):
    """The step relies on how its values are laid out."""


_Orders = tuple[Dims, Dims]
"""Of a result: the dimensions as they are now, and those of before, of the same factors."""


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
        self._made: dict[fx.Node, fx.Node] = {}  # as before, in shape and strides
        self._forms: dict[fx.Node, Form] = {}  # of all others
        self._new_nodes: dict[object, fx.Node] = {}
        self._copies: dict[fx.Node, Form] = {}  # by base: of all of it
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # in which products had rows of these sizes
        self._origin: dict[str, Any] = {}
        inputs = dataflow.placeholders(before)
        written = [one for node in before.nodes for one in dataflow.written(node)]
        self._inputs = {key for one in inputs for key in dataflow.storages(one)}
        self._fixed = dataflow.reshaped(before) | {
            key for one in (*written, *before.output_node().all_input_nodes) for key in dataflow.storages(one)
        }
        for node in before.nodes:
            self._origin = {name: node.meta[name] for name in _ORIGIN if name in node.meta}
            self._add(node)
        self._drop_unused_views()

    def _add(self, node: fx.Node) -> None:
        if node.op != "call_function":
            self._made[node] = self.graph.node_copy(node, self._made.__getitem__)
        elif node.target is operator.getitem:
            self._call(node, self._made)
        elif _is_view(node):
            self._see(node)
        elif self._may_go(node):
            self._forms[node] = self._form(node.all_input_nodes[0])
        else:
            self._compute(node)

    def _compute(self, node: fx.Node) -> None:
        if any(one in self._forms for one in node.all_input_nodes):
            if node.target in _PRODUCTS and self._multiply(node):
                return
            if node.target is aten.sum.dim_IntList and self._sum(node):
                return
            if _is_pointwise(node) and self._apply(node):
                return
        self._call(node, {one: self._read(node, one) for one in node.all_input_nodes})

    def _read(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """An operand for an operator that takes elements in the order that they had."""
        if operand in self._made:
            return self._made[operand]
        is_attention = original(node.target) in ATTENTIONS
        if not (is_attention or _is_aten(node)) or any(dataflow.written(node)):
            return self._exactly(operand)
        if dataflow.draws_random_numbers(node) and not is_attention:
            return self._exactly(operand)
        before = operand.meta["val"]
        for plain in self._plain(operand):
            found = plain.meta["val"]
            if _same_layout(found, before) or node.target in _ANY_STRIDES:
                return plain
            if _has_aligned_rows(found) if is_attention else found.is_contiguous():
                return plain
        return self._exactly(operand)

    def _call(self, node: fx.Node, operands: Mapping[fx.Node, fx.Node], form: _Orders | None = None) -> bool:
        """Computes `node`; with `form`, of values whose elements are in another order. Whether that may be."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
        found = value(self._mode, node.target, args, kwargs)  # type: ignore[arg-type]
        before, after = dataflow.tensors(node), _leaves(found)
        if [(one.size(), one.dtype) for one in before] != [(one.size(), one.dtype) for one in after]:
            raise _NotPossibleError
        is_moved = form is not None or not all(map(_same_layout, before, after))
        is_kept = form is None and [one.stride() for one in before] == [one.stride() for one in after]
        if self._is_fixed(node) and not is_kept:
            if form is not None:
                return False
            exact = {one: self._exactly(one) for one in operands}
            if exact == operands:
                raise _NotPossibleError
            return self._call(node, exact)
        made = self.graph.node_copy(node, operands.__getitem__)
        if found is not None or node.target is operator.getitem:
            made.meta["val"] = found
        if is_moved and isinstance(found, torch.Tensor):
            self._forms[node] = of_itself(made) if form is None else Form(made, *form)
        else:
            self._made[node] = made
        return True

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether what `node` returns is written to, reshaped in place or returned by the step."""
        return bool(dataflow.storages(node) & self._fixed)

    def _may_go(self, node: fx.Node) -> bool:
        """Whether `node` copies all of a value that nobody writes to, into one that nobody writes to or returns."""
        if not _is_order_alone(node) or self._is_fixed(node):
            return False
        (source,) = node.all_input_nodes
        copied, copy = source.meta["val"], node.meta["val"]
        if copied.untyped_storage().nbytes() > copy.nbytes:  # all of it would be kept as long as the copy
            return False
        return not dataflow.storages(source) & (self._fixed | self._inputs)

    # Views

    def _see(self, node: fx.Node) -> None:
        (source, *others) = node.all_input_nodes
        if source not in self._forms:
            self._call(node, self._made)
            return
        form = self._forms[source]
        if others or node.meta["val"].dtype != source.meta["val"].dtype:
            raise _NotPossibleError
        if node.target in _PERMUTING:
            self._forms[node] = form.permuted(_order(node, len(form.dims)))
        elif node.target in _RESHAPING:
            regrouped = form.regrouped(node.meta["val"].size())
            if regrouped is None:
                copy = self._exactly(source)
                self._call(node, {source: copy})
            else:
                self._forms[node] = regrouped
        else:
            plain = next(self._plain(source), None) if node.target in _NARROWING else None
            self._call(node, {source: self._exactly(source) if plain is None else plain})

    def _form(self, node: fx.Node) -> Form:
        """A value as it is told now; of those that are as before, permutations are seen through."""
        if node in self._forms:
            return self._forms[node]
        if node.target in _PERMUTING:
            form = self._form(node.all_input_nodes[0])
            return form.permuted(_order(node, len(form.dims)))
        return of_itself(self._made[node])

    def _told(self, form: Form) -> Iterator[Form]:
        """Of its base, and of the copy of that, if there is one."""
        yield form
        copy = self._copies.get(form.base)
        if copy is not None:
            sizes = [[factor.size for factor in factors] for factors in copy.dims]
            common = common_parts([sizes_of(form.split), sizes])
            if common is not None:
                fine, copied = form.refined(common, of_base=True), copy.refined(common)
                same = dict(zip(itertools.chain(*copied.dims), itertools.chain(*fine.split), strict=True))
                split = tuple(tuple(same[factor] for factor in factors) for factors in copied.split)
                yield Form(copied.base, split, fine.dims)

    def _told_by_a_copy(self, form: Form) -> Iterator[Form]:
        """Of a new copy, in an order that others were read in; it is made when this is asked for."""
        yield self._copied(form, self._usual_order(form))

    def _plain(self, node: fx.Node) -> Iterator[fx.Node]:
        """A value in the shape and the order of before, in any strides, without a copy."""
        for form in self._told(self._form(node)):
            found = self._arranged(form, form.dims)
            if found is not None:
                yield found

    def _exactly(self, node: fx.Node) -> fx.Node:
        """A value in the shape, order and strides of before."""
        if node in self._made:
            return self._made[node]
        before = node.meta["val"]
        for plain in self._plain(node):
            if _same_layout(plain.meta["val"], before):
                return plain
        form = self._forms[node]
        places = sorted(range(before.dim()), key=lambda place: -before.stride(place))
        copy = self._copied(form, [factor for place in places for factor in form.dims[place]])
        found = self._arranged(copy, form.dims)
        if found is None or not _same_layout(found.meta["val"], before):
            raise _NotPossibleError
        return found

    def _arranged(self, form: Form, dims: Dims) -> fx.Node | None:
        """The same elements with these dimensions, as a view; None if strides do not allow it."""
        strides, sizes = form.strides(), [size_of(factors) for factors in dims]
        filled = [place for place, factors in enumerate(dims) if factors]
        empty = [place for place, factors in enumerate(dims) if not factors]
        lying = sorted(filled, key=lambda place: -strides[dims[place][0]])
        before = [*itertools.chain(*form.split)]
        flat = [factor for place in lying for factor in dims[place]]
        node: fx.Node | None = form.base
        if flat != before:
            node = self._viewed(node, [factor.size for factor in before])
            node = self._permuted(node, [before.index(factor) for factor in flat])
        if lying == filled:
            return self._viewed(node, sizes)
        order = [*lying, *empty]
        node = self._viewed(node, [sizes[place] for place in order])
        return self._permuted(node, [order.index(place) for place in range(len(dims))])

    def _viewed(self, node: fx.Node | None, sizes: list[int]) -> fx.Node | None:
        if node is None or list(node.meta["val"].size()) == sizes:
            return node
        return self._new(aten.view.default, (node, sizes)) if _may_view(node.meta["val"], sizes) else None

    def _permuted(self, node: fx.Node | None, order: list[int]) -> fx.Node | None:
        if node is None or order == sorted(order):
            return node
        return self._new(*((aten.t.default, (node,)) if len(order) == 2 else (aten.permute.default, (node, order))))

    def _copied(self, form: Form, order: Sequence[Factor]) -> Form:
        """Of a copy in which the factors lie in this order."""
        split = tuple((factor,) for factor in order)
        view = self._arranged(form, split)
        if view is None:
            raise _NotPossibleError
        copy = self._new(aten.clone.default, (view,), memory_format=torch.contiguous_format)
        self._copies[form.base] = Form(copy, split, form.split)
        return Form(copy, split, form.dims)

    # What is done with values in another order

    def _multiply(self, node: fx.Node) -> bool:
        """A product of two matrices, whose rows and columns may be in another order."""
        *added, first, second = [one for one in node.args if isinstance(one, fx.Node)]
        if first is second or any(one in self._forms or one.meta["val"].dim() != 1 for one in added):
            return False
        for one, other in self._factors(first, second):
            found = self._matched(first, one, second, other)
            if found is None:
                continue
            left, right, now, before = found
            if added and now[1] != before[1]:
                continue
            if now[0] != before[0]:
                sizes = tuple(factor.size for factor in before[0])
                self._orders[sizes] = tuple(before[0].index(factor) for factor in now[0])
            operands = {**{bias: self._made[bias] for bias in added}, first: left, second: right}
            return self._call(node, operands, None if now == before else (now, before))
        return False

    def _factors(self, first: fx.Node, second: fx.Node) -> Iterator[tuple[Form, Form]]:
        """Both as they are told, then with a copy of one of them in an order that others were read in."""
        yield from itertools.product(self._told(self._form(first)), self._told(self._form(second)))
        for copied, kept in ((first, second), (second, first)):
            if copied in self._forms:
                for copy in self._told_by_a_copy(self._form(copied)):
                    for other in self._told(self._form(kept)):
                        yield (copy, other) if copied is first else (other, copy)

    def _matched(
        self, first: fx.Node, one: Form, second: fx.Node, other: Form
    ) -> tuple[fx.Node, fx.Node, Dims, Dims] | None:
        """Both factors as a product reads them, and its dimensions, now and before; None if there are no such views."""
        inner = common_parts([[sizes_of(one.dims)[1]], [sizes_of(other.dims)[0]]])
        if inner is None:
            return None
        one = one.refined([sizes_of(one.dims)[0], *inner])
        other = other.renamed().refined([*inner, sizes_of(other.dims)[1]])
        rows, columns = one.as_it_lies()[0], other.as_it_lies()[1]
        for order in (
            [one.dims[1].index(factor) for factor in one.as_it_lies()[1]],
            [other.dims[0].index(factor) for factor in other.as_it_lies()[0]],
        ):
            left = self._matrix(first, one, (rows, tuple(one.dims[1][place] for place in order)))
            right = self._matrix(second, other, (tuple(other.dims[0][place] for place in order), columns))
            if left is not None and right is not None:
                return left, right, (rows, columns), (one.dims[0], other.dims[1])
        return None

    def _matrix(self, node: fx.Node, form: Form, dims: Dims) -> fx.Node | None:
        if node in self._made and dims == form.dims:
            return self._made[node]
        found = self._arranged(form, dims)
        return found if found is not None and _is_read(found.meta["val"]) else None

    def _usual_order(self, form: Form) -> list[Factor]:
        """The factors as before, but rows in the order in which products had as many."""
        flat = [*itertools.chain(*form.dims)]
        for sizes, order in self._orders.items():
            for start in range(len(flat) - len(sizes) + 1):
                part = flat[start : start + len(sizes)]
                if tuple(factor.size for factor in part) == sizes:
                    rest = flat[:start] + flat[start + len(sizes) :]
                    return [*(part[place] for place in order), *rest]
        return flat

    def _sum(self, node: fx.Node) -> bool:
        """A sum over elements in any order."""
        (source,), args = node.all_input_nodes, cast("Any", node.args)
        rank = source.meta["val"].dim()
        if len(args) < 2 or not args[1] or not rank:
            return False
        gone = {place % rank for place in args[1]}
        keeps = args[2] if len(args) > 2 else node.kwargs.get("keepdim", False)
        form = self._forms[source]
        for told in itertools.chain(self._told(form), self._told_by_a_copy(form)):
            lying = told.as_it_lies()
            operand = self._arranged(told, lying)
            if operand is not None:
                now, before = (
                    tuple(() if place in gone else dims[place] for place in range(rank) if keeps or place not in gone)
                    for dims in (lying, told.dims)
                )
                return self._call(node, {source: operand}, None if now == before else (now, before))
        return False

    def _apply(self, node: fx.Node) -> bool:
        """A point-wise operator, whose operands are read in the order in which one of them lies."""
        result = node.meta["val"]
        whole = [one for one in node.all_input_nodes if one.meta["val"].size() == result.size()]
        moved = [one for one in whole if one in self._forms]
        if not isinstance(result, torch.Tensor) or not moved:
            return False
        forms = {one: self._form(one) for one in whole}
        sizes = common_parts([sizes_of(form.dims) for form in forms.values()])
        if sizes is None:
            return False
        forms = {one: form.refined(sizes) for one, form in forms.items()}
        first = forms[moved[0]]
        lying = first.as_it_lies()
        order = [[dim.index(factor) for factor in now] for dim, now in zip(first.dims, lying, strict=True)]
        operands: dict[fx.Node, fx.Node | None] = {}
        for one in node.all_input_nodes:
            if one in forms:
                dims = forms[one].dims
                same = tuple(tuple(dim[place] for place in places) for dim, places in zip(dims, order, strict=True))
                is_plain = one in self._made and same == dims
                operands[one] = self._made[one] if is_plain else self._arranged(forms[one], same)
            else:
                operands[one] = self._made.get(one) if _fits(one.meta["val"], order) else None
        if None in operands.values():
            return False
        return self._call(node, operands, None if lying == first.dims else (lying, first.dims))  # type: ignore[arg-type]

    def _new(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """A view or a copy, once."""
        key = target, str(args), str(kwargs)
        if key not in self._new_nodes:
            node = self._new_nodes[key] = self.graph.call_function(target, args, kwargs)
            node.meta = {**self._origin, "val": value(self._mode, target, args, kwargs)}
        return self._new_nodes[key]

    def _drop_unused_views(self) -> None:
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users and (_is_view(node) or _is_order_alone(node)):
                self.graph.erase_node(node)


def _order(node: fx.Node, rank: int) -> list[int]:
    """The dimensions, of so many, in the order in which `node` puts them."""
    order, args = [*range(rank)], cast("Any", node.args)
    if node.target is aten.permute.default:
        return [place % rank for place in args[1]]
    if node.target is aten.transpose.int:
        one, other = (place % rank for place in args[1:])
        order[one], order[other] = other, one
        return order
    return order[::-1]


def _fits(tensor: torch.Tensor, order: Sequence[Sequence[int]]) -> bool:
    """Whether a smaller operand is repeated along each dimension whose elements are in another order."""
    sizes = [1] * (len(order) - tensor.dim()) + [*tensor.size()]
    return all(size == 1 or list(places) == sorted(places) for size, places in zip(sizes, order, strict=True))


def _leaves(found: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _is_view(node: fx.Node) -> bool:
    """Whether `node` only names memory; `_unsafe_view` does not say so."""
    is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return is_view or node.target is aten._unsafe_view.default


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


def _may_view(tensor: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether strides allow this view. Fake tensors allow more: in torch 2.13 (2, 1, 2), strides (1, 2, 2), as (4,)."""
    try:
        torch.empty_strided(tensor.size(), tensor.stride(), device="meta").view(sizes)
    except RuntimeError:
        return False
    return True


def _is_read(matrix: torch.Tensor) -> bool:
    """Whether a product reads this matrix as it lies."""
    (rows, columns), (over_rows, over_columns) = matrix.size(), matrix.stride()
    by_rows = (columns == 1 or over_columns == 1) and (rows == 1 or over_rows >= columns)
    by_columns = (rows == 1 or over_rows == 1) and (columns == 1 or over_columns >= rows)
    return by_rows or by_columns


def _has_aligned_rows(tensor: torch.Tensor) -> bool:
    *of_rows, last = zip(tensor.size(), tensor.stride(), strict=True)
    strides = [stride for size, stride in of_rows if size > 1]
    return (
        1 in last and 0 not in strides and all(place % _ALIGNED == 0 for place in (*strides, tensor.storage_offset()))
    )


def _copied_bytes(graph: fx.Graph) -> int:
    return sum(node.meta["val"].nbytes for node in graph.nodes if node.target is aten.clone.default)


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same sizes and strides, where those matter."""
    lies = zip(first.size(), first.stride(), second.stride(), strict=True)
    return first.size() == second.size() and all(size == 1 or one == other for size, one, other in lies)
