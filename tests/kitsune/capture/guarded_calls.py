"""Calls of a module as Dynamo has them, without any of the graphs that are made of them, beside plain PyTorch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from kitsune.capture.frontend import GuardedFunction
from kitsune.errors import RefusedError

_MEMBERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (OrderedDict, OrderedDict.items),
    (dict, dict.items),
    (list, list.__iter__),
    (tuple, tuple.__iter__),
    (deque, deque.__iter__),
    (set, set.__iter__),
)


class _Interpreting:
    """Runs the graph of a call."""

    def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
        return graph(*flat)


class GuardedCalls:
    """Calls of `module`, each by what Dynamo has made of an earlier one where its guards allow that.

    Attributes:
        replays: calls that were no plain ones.
        reasons: why the others were.
    """

    def __init__(self, module: nn.Module) -> None:
        self.replays = 0
        self.reasons: list[str] = []
        self._module, self._runner = module, _Interpreting()
        self._guarded: GuardedFunction | None = None

    def __call__(self, *args: Any) -> Tensor:
        module = self._module

        def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            return module(*args, **kwargs)

        try:
            self._guarded = self._guarded or GuardedFunction(call, self._runner.run)
            result = self._guarded(args, {})
        except RefusedError as error:
            self._guarded = None
            self.reasons.append(error.refusal.reason)
            return module(*args)
        self.replays += 1
        return result


def picture(value: Any, known: dict[int, int] | None = None) -> Any:
    """What is equal for objects that are built alike: types, order, values, and which are the same object."""
    known = {} if known is None else known
    if value is None or isinstance(value, (bool, int, float, str, type)):
        return type(value), value
    if id(value) in known:
        return "the same as", known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, Tensor):
        return type(value), value.detach().tolist(), value.requires_grad
    shown: list[Any] = [type(value)]
    for kind, members in _MEMBERS:
        if isinstance(value, kind):
            shown.append([picture(one, known) for one in members(value)])
            break
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    hidden = ("forward", "effects") if isinstance(value, nn.Module) else ()
    shown.append([(name, picture(one, known)) for name, one in attributes.items() if name not in hidden])
    return shown


def weight(value: Any) -> Any:
    """A number that depends on all that is in a container, and on its order."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor):
        return value.sum()
    if isinstance(value, str):
        return ord(value[0])
    members: Any = value
    if isinstance(value, dict):
        members = [part for pair in value.items() for part in pair]
    elif isinstance(value, set):
        members = sorted(value)
    total = 0.0
    for place, one in enumerate(members):
        total = total + (place + 1) * weight(one)
    return total


def batch(index: int) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(index))
