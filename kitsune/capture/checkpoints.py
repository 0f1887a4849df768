"""Activation checkpoints (`torch.utils.checkpoint`): they keep little, and their backward pass computes the rest.

Dynamo makes an operator of each checkpoint, of which `torch.compile` makes what it likes, as it is free to. Here what
lies in one is part of the graph (`inlined`), marked, so that it can be computed once more when gradients go back
through it (`kitsune.capture.recomputing`).
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.capture.late_reads import hand_on
from kitsune.errors import Refusal, RefusedError
from kitsune.graph.verify import source_line

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_MARK = "kitsune_checkpoint"

_WITHOUT_EFFECT = frozenset({"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"})
"""What may be said of a checkpoint: nothing here changes what is computed, or it is looked at below."""


class Checkpoint(NamedTuple):
    """Which checkpoint an operator lies in, the outermost one.

    Attributes:
        place: among those of the call.
        draws_again: whether its random numbers are others when it is computed once more.
    """

    place: int
    draws_again: bool


def checkpoint_of(node: fx.Node) -> Checkpoint | None:
    """The one that `node`, of a traced graph, lies in."""
    found: Checkpoint | None = node.meta.get("custom", {}).get(_MARK)
    return found


def inline_checkpoints(module: fx.GraphModule) -> None:
    """Replaces the checkpoints of a graph that Dynamo made by what lies in them, marked as such.

    Raises:
        RefusedError: gradients would be others than plain PyTorch's, or it is not known what is to be kept.
    """
    for place, node in enumerate(_checkpoints(module)):
        _inline(module, node, Checkpoint(place, _draws_again(module, node)))
    module.recompile()


def _checkpoints(module: fx.GraphModule) -> list[fx.Node]:
    """Those of its graph.

    Raises:
        RefusedError: for one of them, see `inline_checkpoints`.
    """
    found = list(module.graph.find_nodes(op="call_function", target=_CHECKPOINT))
    for node in found:
        place = source_line(node)
        if "_checkpoint_context_fn" in _body(module, node).meta or not node.kwargs.keys() <= _WITHOUT_EFFECT:
            raise RefusedError(Refusal("a checkpoint chooses what it keeps (context_fn)", place))
        if node.kwargs.get("use_reentrant") is not False:
            # It gives gradients only if an argument needs one that is a tensor itself. Here, what it takes from a
            # closure, and what lies in tuples, are arguments like others.
            raise RefusedError(
                Refusal("a reentrant checkpoint may give no gradients", place, "pass use_reentrant=False")
            )
    return found


def _draws_again(module: fx.GraphModule, node: fx.Node) -> bool:
    body = _body(module, node)
    return not node.kwargs.get("preserve_rng_state", True) or any(
        _draws_again(body, inner) for inner in _checkpoints(body)
    )


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    body: fx.GraphModule = getattr(module, _attribute(node).target)  # type: ignore[arg-type]
    return body


def _attribute(node: fx.Node) -> fx.Node:
    (attribute, *_) = node.args
    assert isinstance(attribute, fx.Node)
    return attribute


def _inline(module: fx.GraphModule, node: fx.Node, mark: Checkpoint) -> None:
    body, attribute = _body(module, node), _attribute(node)
    for inner in _checkpoints(body):
        _inline(body, inner, mark)
    for inner in body.graph.find_nodes(op="get_attr"):  # of other operators that have bodies
        name = f"{attribute.target}_{inner.target}"
        setattr(module, name, getattr(body, str(inner.target)))
        inner.target = name
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=True))
    with module.graph.inserting_before(node):
        results: Any = module.graph.graph_copy(body.graph, copies)
    for copy in copies.values():
        if isinstance(copy, fx.Node) and copy not in node.all_input_nodes:
            copy.meta["custom"] = {**copy.meta.get("custom", {}), _MARK: mark}
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise RefusedError(Refusal("a checkpoint's results are not taken apart", source_line(node)))
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    hand_on(node, module.graph.output_node())
    module.graph.erase_node(node)
    if not attribute.users:
        module.graph.erase_node(attribute)
