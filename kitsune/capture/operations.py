"""What a loop does with the outputs of a model, as a list of calls of torch's functions that can be run again."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kitsune.capture.ambient import autocast_dtype
from kitsune.capture.following import FollowedTensor, Follower, plainly

_CONSTANTS = frozenset(
    (type(None), bool, int, complex, str, type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

_VALUE, _GIVEN, _CONSTANT = "value", "given", "constant"


@dataclass(frozen=True)
class Operation:
    """A call of a function of torch. Two are equal if they do the same with tensors of the same layouts.

    Attributes:
        function: the function, method or getter.
        arguments: descriptions of the arguments, those that were given by name last.
        names: of those.
        autocast: what autocast computed in; None where it was off.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    names: tuple[str, ...]
    autocast: torch.dtype | None

    def places(self) -> set[int]:
        """The places of the followed tensors among the arguments."""
        found: set[int] = set()
        for one in self.arguments:
            _collect(one, found)
        return found

    def given_again(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        follower: Follower,
        kind: str,
    ) -> list[Tensor] | None:
        """Of a call, if it is this operation again, the tensors that `follower` does not follow; None if it is another.

        That is what `described` would tell, in a fraction of the time: most arguments are the objects that they were.
        """
        arguments = (*args, *kwargs.values())
        if function != self.function or tuple(kwargs) != self.names or len(arguments) != len(self.arguments):
            return None
        are_constant, constants, others = self._parts
        are_same = False not in map(operator.is_, itertools.compress(arguments, are_constant), constants)
        given: list[Tensor] = []
        for place in others if are_same else range(len(arguments)):
            if not _is_again(arguments[place], self.arguments[place], follower, given):
                return None
        return given if autocast_dtype(kind) == self.autocast else None

    @cached_property
    def _parts(self) -> tuple[list[bool], list[Any], list[int]]:
        """Which arguments are constants, these constants, and the places of the other arguments."""
        are_constant = [known[0] is _CONSTANT for known in self.arguments]
        constants = [known[2] for known in itertools.compress(self.arguments, are_constant)]
        return are_constant, constants, [place for place, is_constant in enumerate(are_constant) if not is_constant]

    def run(self, values: Mapping[int, Tensor], given: Sequence[Tensor]) -> Any:
        """Calls the function again.

        Args:
            values: those that stand for followed tensors, by place.
            given: for the tensors that were not followed, in the order of the arguments.
        """
        rest = iter(given)
        filled = [_filled(one, values, rest) for one in self.arguments]
        count = len(filled) - len(self.names)
        kwargs = dict(zip(self.names, filled[count:], strict=True))
        kind, dtype = next(iter(values.values())).device.type, self.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            return self.function(*filled[:count], **kwargs)


def described(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    follower: Follower,
    kind: str,
) -> tuple[Operation, list[Tensor]] | None:
    """The present call of `function`, and its tensors that `follower` does not follow.

    None if it cannot be run again: it is not torch's own, has other arguments than tensors, numbers and names, or an
    outer tensor has a gradient of its own.

    Args:
        kind: the type of the device whose autocast counts.
    """
    if getattr(function, "__module__", None) not in (None, "torch") and not function.__module__.startswith("torch."):
        return None  # of another library: it may do more than to compute
    given: list[Tensor] = []
    try:
        arguments = tuple([_described(one, follower, given) for one in (*args, *kwargs.values())])
    except LookupError:
        return None
    return Operation(function, arguments, tuple(kwargs), autocast_dtype(kind)), given


def _described(argument: Any, follower: Follower, given: list[Tensor]) -> tuple[Any, ...]:
    kind = type(argument)
    if kind in _CONSTANTS:
        return _CONSTANT, kind, argument
    if kind is float:
        return _CONSTANT, kind, argument, math.copysign(1.0, argument)
    if isinstance(argument, FollowedTensor) and argument.place is not None:
        if argument.follower is not follower:
            raise LookupError("a tensor of another call")
        return _VALUE, argument.place
    if isinstance(argument, Tensor):
        if (
            argument.requires_grad
            or type(argument) not in (Tensor, FollowedTensor)
            or argument.layout is not torch.strided
        ):
            raise LookupError("a tensor that needs more than its numbers")
        with plainly():
            given.append(argument.as_subclass(Tensor))
        return _layout_of(argument)
    if kind is list or kind is tuple:
        return kind, *[_described(one, follower, given) for one in argument]
    if kind is slice:
        return kind, *[_described(one, follower, given) for one in (argument.start, argument.stop, argument.step)]
    raise LookupError(f"a {kind.__name__}")


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return _GIVEN, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_again(argument: Any, known: tuple[Any, ...], follower: Follower, given: list[Tensor]) -> bool:
    """Whether `known` describes an argument, which belongs to `given` if it is a tensor that is not followed."""
    if known[0] is _VALUE:
        is_followed = isinstance(argument, FollowedTensor) and argument.follower is follower
        return is_followed and argument.place == known[1]
    if type(argument) is Tensor and not argument.requires_grad and argument.layout is torch.strided:
        given.append(argument)
        return known == _layout_of(argument)
    try:
        return known == _described(argument, follower, given)
    except LookupError:
        return False


def _collect(description: tuple[Any, ...], found: set[int]) -> None:
    kind, *parts = description
    if kind is _VALUE:
        found.add(parts[0])
    elif kind in (list, tuple, slice):
        for part in parts:
            _collect(part, found)


def _filled(description: tuple[Any, ...], values: Mapping[int, Tensor], given: Iterator[Tensor]) -> Any:
    kind, *parts = description
    if kind is _VALUE:
        return values[parts[0]]
    if kind is _GIVEN:
        return next(given)
    if kind is _CONSTANT:
        return parts[1]
    items = [_filled(part, values, given) for part in parts]
    return slice(*items) if kind is slice else kind(items)
