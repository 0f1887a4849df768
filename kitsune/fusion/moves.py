"""Casts with views and copies around them, which commute with operators that read and write any precision."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder
from kitsune.fusion.nodes import aten, calls, only_user
from kitsune.graph import dataflow

HALVES = (torch.bfloat16, torch.float16)

_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
)

# Their first argument is the only tensor; each element of the result is one of it, or 0.
_MOVES = (*_VIEWS, aten.clone.default, aten.slice_backward.default, aten.select_backward.default)


class Path(NamedTuple):
    """How a value is made of another.

    Attributes:
        source: the other.
        nodes: casts and moves, one after the other, the last one being the value; none if `source` is it.
    """

    source: fx.Node
    nodes: tuple[fx.Node, ...]

    def moved(self, builder: Builder, source: fx.Node) -> fx.Node:
        """What the moves make of `source`."""
        for node in self.nodes:
            if not is_cast(node):
                source = repeated(builder, node, {node.all_input_nodes[0]: source})
        return source


def is_view(node: object) -> bool:
    """Whether `node` is another view of the memory of its argument."""
    return calls(node, *_VIEWS)


def is_cast(node: object) -> bool:
    """Whether `node` makes bfloat16 or float16 of float32, or float32 of them, on one device."""
    if not calls(node, aten._to_copy.default):
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    casts = before.dtype in HALVES and after.dtype == torch.float32
    return bool((casts or _narrows(node)) and before.device == after.device)


def widened(value: fx.Node) -> fx.Node:
    """What `value` is cast from to float32; `value` itself if it is no such cast, or if that is overwritten."""
    if not is_cast(value) or _narrows(value):
        return value
    source = value.all_input_nodes[0]
    return value if is_written([source]) else source


def without_cast(value: fx.Node, users: Collection[fx.Node]) -> Path:
    """The path to `value` from what is cast to float32 on its way, if all on the way is for `users` only."""
    nodes: list[fx.Node] = []
    node = value
    while (is_cast(node) or calls(node, *_MOVES)) and node.users.keys() <= {*users, *nodes}:
        nodes.insert(0, node)
        if is_cast(node):
            source = node.all_input_nodes[0]
            return Path(value, ()) if _narrows(node) else Path(source, tuple(nodes))
        node = node.all_input_nodes[0]
    return Path(value, ())


def cast_after(value: fx.Node, dtype: torch.dtype) -> Path | None:
    """The path from `value` to its cast to `dtype`, if nothing else is done with it."""
    nodes: list[fx.Node] = []
    user = only_user(value, *_MOVES, aten._to_copy.default)
    while user is not None:
        nodes.append(user)
        if not calls(user, *_MOVES):
            return Path(value, tuple(nodes)) if is_cast(user) and user.meta["val"].dtype == dtype else None
        user = only_user(user, *_MOVES, aten._to_copy.default)
    return None


def casts_after(value: fx.Node) -> list[Path]:
    """The paths from float32 `value` to its casts, if it is used for nothing else and all are of one type.

    There are none where one of several is overwritten: they may become one value.
    """
    paths = list(_paths(value, ()))
    casts = [path.nodes[-1] for path in paths if path.nodes]
    if len(casts) < len(paths) or not all(is_cast(cast) and _narrows(cast) for cast in casts):
        return []
    one_type = len({cast.meta["val"].dtype for cast in casts}) == 1
    return paths if one_type and (len(casts) == 1 or not is_written(casts)) else []


def casts_beside(value: fx.Node) -> list[fx.Node]:
    """The casts of float32 `value` to a lower precision, if it is used otherwise too and none of them is overwritten.

    There are none if they are of several types; casts that lay it out otherwise are other uses.
    """
    strides = value.meta["val"].stride()
    casts = [user for user in value.users if is_cast(user) and _narrows(user) and user.meta["val"].stride() == strides]
    one_type = len({cast.meta["val"].dtype for cast in casts}) == 1
    return casts if one_type and len(casts) < len(value.users) and not is_written(casts) else []


def repeated(builder: Builder, node: fx.Node, stand_ins: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A call of the operator of `node`, with `stand_ins` in place of what it reads."""
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda one: stand_ins.get(one, one))
    return builder.call(node.target, *args, **kwargs)


def is_written(values: Sequence[fx.Node]) -> bool:
    """Whether any operator overwrites the memory of any of `values`, of which there is one at least."""
    memory = {storage for value in values for storage in dataflow.storages(value)}
    nodes = values[0].graph.nodes
    return any(memory & dataflow.storages(target) for node in nodes for target in dataflow.written(node))


def all_of(paths: Sequence[Path]) -> list[fx.Node]:
    """The nodes of `paths`, each once."""
    return list(dict.fromkeys(node for path in paths for node in path.nodes))


def _paths(value: fx.Node, before: tuple[fx.Node, ...]) -> Iterator[Path]:
    """To all uses: one that is neither a move nor a cast ends the path before it."""
    source = before[0].all_input_nodes[0] if before else value
    for user in value.users:
        if calls(user, *_MOVES) and user.users:
            yield from _paths(user, (*before, user))
        elif calls(user, aten._to_copy.default):
            yield Path(source, (*before, user))
        else:
            yield Path(source, before)


def _narrows(node: fx.Node) -> bool:
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(before.dtype == torch.float32 and after.dtype in HALVES)
