"""Computes a training step in the memory format channels_last, which convolutions on tensor cores want.

The user's own tensors stay as they are: images and weights are copied for the first convolution that reads them, a
weight's gradient is copied back for the optimizer, and so is what leaves the convolutional part of a model. What is
between follows the layout of its operands.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, value

aten = torch.ops.aten

_CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""How many images and filters they take first; the filters are the last of them."""

# Beside those that are tagged as point-wise: they have kernels for this layout, and results in that of their operands
# or, if they only take sizes from them, in none.
_FOLLOWING = {
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
    aten.cudnn_batch_norm.default,
    aten.cudnn_batch_norm_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bilinear2d.vec,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.elu_backward.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.masked_fill.Tensor,
    aten.mish_.default,
    aten.mish_backward.default,
    aten.silu_.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten._amp_foreach_non_finite_check_and_unscale_.default,
}

_ORIGIN = ("stack_trace", "nn_module_stack")

_LAST = (0, 2, 3, 1)
_CONTIGUOUS = (0, 1, 2, 3)

Operands = Mapping[fx.Node, fx.Node]
"""What stands for each argument of a node in the new graph."""

Form = torch.memory_format | tuple[int, ...]
"""Of a copy the format, of a view the strides."""


class _NotPossibleError(Exception):
    """The step relies on how its values are laid out."""


def channels_last(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation with all two-dimensional convolutions in channels_last.

    Inputs and results keep their shapes and strides, and the same inputs are written. Results differ in rounding, as
    other kernels compute them. Comes best before operators are fused.

    Returns:
        `module` itself if all its convolutions are in that format already, it has none, or it writes to or
        looks at memory in ways that depend on the layout.
    """
    convolutions = [node for node in module.graph.nodes if node.target is aten.convolution.default and _is_flat(node)]
    if all(_is_last(node.meta["val"]) for node in convolutions):
        return module
    try:
        return fx.GraphModule(module, _Conversion(module.graph).graph)
    except _NotPossibleError:
        return module


class _Conversion:
    """Rebuilds a graph node by node; the new one is `graph`."""

    def __init__(self, before: fx.Graph) -> None:
        self.graph = fx.Graph()
        self._mode = mode_of(before)
        self._made: dict[fx.Node, fx.Node] = {}
        self._written_before = {storage for node in before.nodes for storage in _written(node)}
        self._written: set[int] = set()
        self._copies: dict[tuple[fx.Node, Form], fx.Node] = {}
        self._origin: dict[str, Any] = {}
        for node in before.nodes:
            self._origin = {name: node.meta[name] for name in _ORIGIN if name in node.meta}
            self._add(node)
        self._drop_unused_casts()

    def _add(self, node: fx.Node) -> None:
        if node.op == "output":
            results = {one: self._exactly(one) for one in node.all_input_nodes}
            self._made[node] = self.graph.node_copy(node, results.__getitem__)
        elif node.op != "call_function":
            self._made[node] = self.graph.node_copy(node)
        else:
            operands, found = self._choose(node)
            self._call(node, operands, found)

    def _choose(self, node: fx.Node) -> tuple[Operands, Any]:
        """The operands for `node`, and what it makes of them."""
        if node.target in _CONVOLUTIONS and _is_flat(node):
            return self._with_value(node, self._for_convolution(node))
        if _is_view(node):
            return self._seen(node)
        if _follows(node):
            operands, found = self._with_value(node, self._alike(node))
            if _is_plain_or_last(found, node):
                return operands, found
        read = self._as_before if any(dataflow.written(node)) and not _follows(node) else self._plainly
        return self._with_value(node, {one: read(one) for one in node.all_input_nodes})

    def _call(self, node: fx.Node, operands: Operands, found: Any) -> None:
        shared = (_written(node) | dataflow.storages(node)) & self._written_before
        copied = [one for one, other in operands.items() if other is not self._made[one]]
        if any(shared & dataflow.storages(one) for one in copied):
            raise _NotPossibleError
        made = self._made[node] = self.graph.node_copy(node, operands.__getitem__)
        if found is not None or node.target is operator.getitem:
            made.meta["val"] = found
        self._forget(_written(made))

    def _forget(self, written: set[int]) -> None:
        """Copies of what is written now are out of date."""
        self._written |= written
        if written:
            self._copies = {key: new for key, new in self._copies.items() if not dataflow.storages(key[0]) & written}

    def _with_value(self, node: fx.Node, operands: Operands) -> tuple[Operands, Any]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        return operands, value(self._mode, node.target, args, kwargs)  # type: ignore[arg-type]

    def _as_is(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        return {one: self._made[one] for one in node.all_input_nodes}

    def _for_convolution(self, node: fx.Node) -> Operands:
        """Images and filters in the format. Images of one channel are in any: then the filters decide."""
        given = node.args[: _CONVOLUTIONS[node.target]]  # type: ignore[index]
        *grads, image, filters = [one for one in given if isinstance(one, fx.Node)]
        operands = self._as_is(node) | {one: self._last(one) for one in (*grads, image, filters)}
        if image.meta["val"].size(1) == 1:
            _, channels, height, width = filters.meta["val"].size()
            strides = channels * height * width, 1, channels * width, channels
            operands[filters] = self._strided(operands[filters], strides)
        return operands

    def _seen(self, node: fx.Node) -> tuple[Operands, Any]:
        """For a view: of the value as it is, or of a copy that can be seen so."""
        if node.target is aten.as_strided.default:
            return self._with_value(node, self._unchanged(node))
        try:
            return self._with_value(node, self._as_is(node))
        except (RuntimeError, ValueError):  # there are no strides for this view
            return self._with_value(node, {one: self._plainly(one) for one in node.all_input_nodes})

    def _unchanged(self, node: fx.Node) -> Operands:
        """The operands as they were in memory."""
        operands = self._as_is(node)
        for one, other in operands.items():
            before, after = one.meta["val"], other.meta["val"]
            if (before.stride(), before.storage_offset()) != (after.stride(), after.storage_offset()):
                raise _NotPossibleError
        return operands

    def _alike(self, node: fx.Node) -> Operands:
        """All images in the format, if one is; but what is written stays."""
        operands = self._as_is(node)
        if not any(_is_last_only(one) for other in operands.values() for one in dataflow.tensors(other)):
            return operands
        images = [one for one in operands if isinstance(one.meta["val"], torch.Tensor) and one.meta["val"].dim() == 4]
        kept = set(dataflow.written(node))
        return operands | {one: self._last(one) for one in images if one not in kept}

    def _last(self, node: fx.Node) -> fx.Node:
        made = self._made[node]
        return made if _is_last(made.meta["val"]) else self._copied(made, torch.channels_last)

    def _plainly(self, node: fx.Node) -> fx.Node:
        """In the layout that it had, or contiguous."""
        made, before = self._made[node], node.meta["val"]
        if not isinstance(before, torch.Tensor) or _is_plain(made.meta["val"], before):
            return made
        return self._copied(made, _format(before) or torch.contiguous_format)

    def _as_before(self, node: fx.Node) -> fx.Node:
        """In the layout that it had."""
        made, before = self._made[node], node.meta["val"]
        if not isinstance(before, torch.Tensor) or _same_layout(made.meta["val"], before):
            return made
        memory_format = _format(before)
        if memory_format is None:
            raise _NotPossibleError
        return self._copied(made, memory_format)

    def _exactly(self, node: fx.Node) -> fx.Node:
        """In the strides that it had, also where they do not matter."""
        made, before = self._as_before(node), node.meta["val"]
        return self._strided(made, before.stride()) if isinstance(before, torch.Tensor) else made

    def _strided(self, made: fx.Node, strides: tuple[int, ...]) -> fx.Node:
        """The same memory in strides that differ where a dimension has one element."""
        seen = made.meta["val"]
        if seen.stride() == strides:
            return made
        key = made, strides
        if key not in self._copies:
            self._copies[key] = self._new(aten.as_strided.default, (made, list(seen.size()), list(strides)), {})
        return self._copies[key]

    def _copied(self, made: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        """A copy in the format, one for all that read it."""
        key = made, memory_format
        if key not in self._copies:
            is_cast = made.target is aten._to_copy.default and "memory_format" not in made.kwargs
            if is_cast and not dataflow.storages(made) & self._written:
                self._copies[key] = self._cast(made, memory_format)
            else:
                self._copies[key] = self._new(aten.clone.default, (made,), {"memory_format": memory_format})
        return self._copies[key]

    def _cast(self, cast: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        """Another such cast, beside it, that writes the format; a copy is made before it where that is of fewer bytes.

        Then the cast may still become part of what reads it.
        """
        (source,) = cast.all_input_nodes
        form = {"memory_format": memory_format}
        with self.graph.inserting_before(cast.next):
            if source.meta["val"].itemsize >= cast.meta["val"].itemsize:
                return self._new(cast.target, cast.args, {**cast.kwargs, **form})
            copy = self._new(aten.clone.default, (source,), form)
            return self._new(cast.target, (copy, *cast.args[1:]), dict(cast.kwargs))

    def _new(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {**self._origin, "val": value(self._mode, target, args, kwargs)}
        return node

    def _drop_unused_casts(self) -> None:
        """Those of which only copies in another format are read, and copies that were not chosen in the end."""
        for node in reversed(self.graph.nodes):
            if node.target in (aten._to_copy.default, aten.clone.default, aten.as_strided.default) and not node.users:
                self.graph.erase_node(node)


def _is_flat(node: fx.Node) -> bool:
    """Whether a convolution has two dimensions."""
    (image, *_) = node.all_input_nodes
    return bool(image.meta["val"].dim() == 4)


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)


def _follows(node: fx.Node) -> bool:
    """Whether `node` may be given any layout. Random numbers are drawn in the order of memory."""
    if dataflow.draws_random_numbers(node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target in _FOLLOWING or torch.Tag.pointwise in node.target.tags


def _written(node: fx.Node) -> set[int]:
    return {storage for target in dataflow.written(node) for storage in dataflow.storages(target)}


def _is_plain_or_last(found: Any, node: fx.Node) -> bool:
    leaves = zip(pytree.tree_leaves(found), pytree.tree_leaves(node.meta.get("val")), strict=True)
    return all(_is_plain(one, before) or _is_last(one) for one, before in leaves if isinstance(one, torch.Tensor))


def _is_plain(one: torch.Tensor, before: torch.Tensor) -> bool:
    return _same_layout(one, before) or one.is_contiguous()


def _is_last(value: torch.Tensor) -> bool:
    """Whether an image can be taken for one in channels_last; a part of one can, and any with one channel."""
    return value.dim() == 4 and _is_ordered(value, _LAST)


def _is_last_only(value: torch.Tensor) -> bool:
    return _is_last(value) and not _is_ordered(value, _CONTIGUOUS)


def _is_ordered(value: torch.Tensor, dimensions: tuple[int, ...]) -> bool:
    """Whether strides decrease along `dimensions`, where they matter: not of one element, nor of one repeated."""
    sized = [(value.size(place), value.stride(place)) for place in dimensions]
    strides = [stride for size, stride in sized if size > 1 and stride > 0]
    return strides == sorted(strides, reverse=True)


def _format(value: torch.Tensor) -> torch.memory_format | None:
    if value.is_contiguous():
        return torch.contiguous_format
    is_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else None


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of the same sizes have the same strides, where those matter."""
    strides = zip(first.size(), first.stride(), second.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)
