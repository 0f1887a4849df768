"""Templates for what models do over a large vocabulary.

nll_loss(log_softmax(cast?(logits)))          and the gradient of the logits
embedding(tokens) + embedding(positions)
embedding_backward(cast?(grad))               added to another gradient of the same table, cast or not
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from kitsune.fusion.losses import CrossEntropy, find_cross_entropy
from kitsune.fusion.match import Builder, Match
from kitsune.fusion.moves import Path, cast_after, is_view, repeated, without_cast
from kitsune.fusion.nodes import arguments, aten, calls, only_user, result
from kitsune.graph import dataflow
from kitsune.kernels import vocabulary  # noqa: F401 - defines the operators

kitsune = torch.ops.kitsune

_REDUCTIONS = {1: "mean", 2: "sum"}


class _Loss(NamedTuple):
    """A cross-entropy.

    Attributes:
        itself: the operators that compute it.
        scale: what its gradient is computed with, the last one being it; in the order of the graph.
    """

    itself: CrossEntropy
    scale: tuple[fx.Node, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.itself.nodes, *self.scale]


class _Logits(NamedTuple):
    """What the loss is computed of, and its gradient.

    Attributes:
        before: from the logits to what is normalized.
        after: from its gradient to that of the logits.
    """

    before: Path
    after: Path

    @property
    def gradient(self) -> fx.Node:
        return self.after.nodes[-1] if self.after.nodes else self.after.source


def cross_entropy(node: fx.Node) -> Iterator[Match]:
    """Matches of a cross-entropy and its backward: the gradient takes the place of the logits if it may."""
    loss = _loss(node)
    if loss is None:
        return
    logits = _logits(loss)
    is_copied = any(calls(node, aten.clone.default) for node in logits.before.nodes)
    made = () if is_copied else _made_by(logits.before, loss)
    if made or is_copied:
        yield _cross_entropy(loss, logits, made, in_place=True)
    yield _cross_entropy(loss, logits, (), in_place=False)


def embedding(node: fx.Node) -> Iterator[Match]:
    """Matches of a sum of two embeddings."""
    if not calls(node, aten.add.Tensor):
        return
    *tables, alpha = arguments(node)
    if alpha != 1 or len(set(tables)) != 2 or not all(calls(table, aten.embedding.default) for table in tables):
        return
    tables.sort(key=lambda table: table.meta["val"].shape != node.meta["val"].shape)  # the repeated one is added
    (weight, indices), (added_weight, added_indices) = (arguments(table)[:2] for table in tables)

    def build(builder: Builder) -> list[fx.Node]:
        return [builder.call(kitsune.embedding.default, weight, indices, added_weight, added_indices)]

    yield Match.of("embedding + embedding", [*tables, node], [node], build)


def embedding_backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the gradient of an embedding's table, with what it is added to, and alone."""
    if not calls(node, aten.embedding_dense_backward.default):
        return
    grad, indices, num_embeddings, padding_idx, scale_grad_by_freq = arguments(node)
    if scale_grad_by_freq:
        return
    path = without_cast(grad, [node])

    def call(builder: Builder, *added: fx.Node) -> list[fx.Node]:
        made = builder.call(
            kitsune.embedding_backward.default,
            path.moved(builder, path.source), indices, *added,
            num_embeddings=num_embeddings, padding_idx=padding_idx, dtype=node.meta["val"].dtype,
        )  # fmt: skip
        return [made]

    add = only_user(node, aten.add.Tensor)
    other = None if add is None else _added_to(node, add)
    if add is not None and other is not None:

        def build(builder: Builder) -> list[fx.Node]:
            return call(builder, other.moved(builder, other.source))

        nodes = [node, *path.nodes, add, *other.nodes]
        yield Match.of("embedding backward + gradient", nodes, [add], build, [path.source, other.source])
    yield Match.of("embedding backward", [node, *path.nodes], [node], call, [path.source])


def _added_to(node: fx.Node, add: fx.Node) -> Path | None:
    """The path to what `node` is added to, if that is as large and the sum of the same type."""
    *terms, alpha = arguments(add)
    other = next((term for term in terms if term is not node), None)
    if alpha != 1 or not isinstance(other, fx.Node):
        return None
    values = [one.meta["val"] for one in (node, other, add)]
    same = len({(value.shape, value.dtype, value.device) for value in values}) == 1
    return without_cast(other, [add]) if same else None


def _loss(node: fx.Node) -> _Loss | None:
    """The loss of which `node` is the first operator, if the kernel knows it."""
    loss = find_cross_entropy(node)
    if loss is None or arguments(loss.forward)[3] not in _REDUCTIONS:
        return None
    keeps_type = loss.softmax.meta["val"].dtype == loss.softmax_backward.meta["val"].dtype
    return _Loss(loss, _made_since(loss.forward, arguments(loss.backward)[0])) if keeps_type else None


def _made_since(start: fx.Node, scale: fx.Node) -> tuple[fx.Node, ...]:
    """The operators on scalars after `start` that `scale` needs: with them, it is there when the loss is used."""
    found: set[fx.Node] = set()
    waiting = [scale]
    while waiting:
        node = waiting.pop()
        if start < node and node not in found and _is_of_scalars(node):
            found.add(node)
            waiting += node.all_input_nodes
    return tuple(sorted(found))


def _is_of_scalars(node: fx.Node) -> bool:
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in values)
        and not any(dataflow.written(node))
        and not dataflow.draws_random_numbers(node)
    )


def _logits(loss: _Loss) -> _Logits:
    """In the precision that they were cast from, if their gradient is cast to it again."""
    (normalized,) = loss.itself.softmax.all_input_nodes
    before = without_cast(normalized, [loss.itself.softmax])
    after = cast_after(loss.itself.softmax_backward, before.source.meta["val"].dtype) if before.nodes else None
    if after is None:
        return _Logits(Path(normalized, ()), Path(loss.itself.softmax_backward, ()))
    return _Logits(before, after)


def _made_by(path: Path, loss: _Loss) -> tuple[fx.Node, ...]:
    """The operator that makes the logits and the views of them up to `path`, if nobody else uses their memory."""
    nodes = [path.source]
    while is_view(nodes[0]):
        nodes.insert(0, nodes[0].all_input_nodes[0])
    made = nodes[0]
    inside = {*nodes, *path.nodes, *loss.nodes}
    is_repeatable = (
        isinstance(made.target, torch._ops.OpOverload)
        and isinstance(made.meta["val"], torch.Tensor)
        and not made.target.is_view
        and not any(dataflow.written(made))
        and not dataflow.draws_random_numbers(made)
    )
    return tuple(nodes) if is_repeatable and not any(_is_used_outside(node, inside) for node in nodes) else ()


def _cross_entropy(loss: _Loss, logits: _Logits, made: Sequence[fx.Node], *, in_place: bool) -> Match:
    """With the operators that have `made` the logits, which are then not among the inputs and may be overwritten."""
    _, targets, _, reduction, ignore_index = arguments(loss.itself.forward)
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index, "label_smoothing": 0.0}
    count = result(loss.itself.forward, 1)
    nodes = [*loss.nodes, *logits.before.nodes, *logits.after.nodes, *made]
    value = result(loss.itself.forward, 0)
    kept = [node for node in (count, *loss.scale) if node is not None and _is_used_outside(node, nodes)]

    def build(builder: Builder) -> list[fx.Node]:
        source = _copies(builder, made, {}).get(logits.before.source, logits.before.source)
        rows = logits.before.moved(builder, source)
        computed = builder.results(builder.call(kitsune.cross_entropy.default, rows, targets, **options))
        stand_ins = {node: one for node, one in ((value, computed[0]), (count, computed[3])) if node is not None}
        stand_ins |= _copies(builder, loss.scale, stand_ins)
        scale = arguments(loss.itself.backward)[0]
        gradient = builder.call(
            kitsune.cross_entropy_backward_.default if in_place else kitsune.cross_entropy_backward.default,
            stand_ins.get(scale, scale), rows, targets, *computed[1:], **options,
        )  # fmt: skip
        gradient = logits.after.moved(builder, rows if in_place else gradient)
        return [computed[0], gradient, *(stand_ins[node] for node in kept)]

    name = "cross-entropy in place" if in_place else "cross-entropy"
    return Match.of(name, nodes, [value, logits.gradient, *kept], build, [] if made else [logits.before.source])


def _is_used_outside(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    return any(user not in nodes for user in node.users)


def _copies(builder: Builder, nodes: Sequence[fx.Node], stand_ins: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The same operators as `nodes`, with `stand_ins` and each other in place of what those read."""
    made = dict(stand_ins)
    for node in nodes:
        made[node] = repeated(builder, node, made)
    return made
