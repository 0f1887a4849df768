"""Looking around in a graph, for templates."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import fx

aten = torch.ops.aten


def calls(node: object, *targets: Callable[..., Any]) -> TypeGuard[fx.Node]:
    """Whether `node` is a call of one of `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def only_user(node: fx.Node, *targets: Callable[..., Any]) -> fx.Node | None:
    """The one node that uses `node`, if it calls one of `targets`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and calls(users[0], *targets) else None


def result(node: fx.Node, place: int) -> fx.Node | None:
    """The node of one of several results; None if it is unused, or taken more than once."""
    found = [user for user in node.users if calls(user, operator.getitem) and user.args[1] == place]
    return found[0] if len(found) == 1 else None


def is_taken_apart(node: fx.Node) -> bool:
    """Whether all users of an operator with several results take one of them."""
    return all(calls(user, operator.getitem) for user in node.users)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema, defaults included."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    parameters = target._schema.arguments
    given = [*node.args, *(node.kwargs.get(one.name, one.default_value) for one in parameters[len(node.args) :])]
    return tuple(given)


def taken_from(node: object, place: int, *targets: Callable[..., Any]) -> fx.Node | None:
    """The call of one of `targets` of which `node` is the result at `place`; None if it is not."""
    if not calls(node, operator.getitem) or node.args[1] != place:
        return None
    made = node.args[0]
    return made if calls(made, *targets) else None
