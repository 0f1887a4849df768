"""What Python asks of tensors, and is answered alike in every replay, in a call that Dynamo traces.

That is what is in tensors that are made of sizes and numbers alone (`mask.any().item()`), and whether a number drawn
from [0, 1) is below one that is not above 0, as where models would leave layers out
(`torch.rand([]) < self.layerdrop`). The number is drawn in replays as ever; what it is compared with is guarded by
Dynamo.

Where Dynamo jumps, and what it calls for a method of a tensor, is private.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable

from kitsune.capture.constant_tensors import made_again

_JUMPS = frozenset(
    {"POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"}
    | {f"POP_JUMP_{way}_IF_{truth}" for way in ("FORWARD", "BACKWARD") for truth in ("FALSE", "TRUE")}
)
"""Those that take what they look at from the stack. Others may leave a tensor there, which is no answer."""

_OUTCOMES: Mapping[object, bool] = {operator.lt: False, operator.ge: True}
"""What comparing any number from [0, 1) with 0, or with less, comes to."""

_SWAPPED: Mapping[object, bool] = {operator.gt: False, operator.le: True}
"""The same where the number comes last."""


_TAKING_SIZES = frozenset({"view", "reshape", "expand", "as_strided", "new_zeros", "new_ones", "new_empty", "new_full"})
"""Methods of tensors whose sizes may be tensors of one number."""


@contextmanager
def given() -> Iterator[None]:
    """Within, Dynamo goes on where there is one answer."""
    with (
        mock.patch.object(InstructionTranslatorBase, "step", _answering_jumps()),
        mock.patch.object(TensorVariable, "call_method", _answering_questions()),
    ):
        yield


def _answering_jumps() -> Callable[..., bool]:
    """What Dynamo calls for each instruction."""
    follow: Callable[..., bool] = InstructionTranslatorBase.step

    def step(frame: Any) -> bool:
        place = frame.instruction_pointer
        if place is not None and frame.stack and frame.instructions[place].opname in _JUMPS:
            truth = _truth_of(frame.stack[-1])
            if truth is not None:
                frame.stack[-1] = ConstantVariable.create(truth)
        return follow(frame)

    return step


def _answering_questions() -> Callable[..., Any]:
    """What Dynamo calls for a method of a tensor."""
    call: Callable[..., Any] = TensorVariable.call_method

    def call_method(tensor: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        if name == "item" and not args and not kwargs:
            number = _number_in(tensor)
            if number is not None:
                return ConstantVariable.create(number)
        if name in _TAKING_SIZES:
            args, kwargs = [_size_of(one) for one in args], {name: _size_of(one) for name, one in kwargs.items()}
        return call(tensor, tx, name, args, kwargs)

    return call_method


def _number_in(tensor: Any) -> bool | int | float | None:
    """What is in a tensor of one element in every replay; None if that is not known."""
    made = made_again(tensor.as_proxy().node)
    return None if made is None or made.numel() != 1 or made.is_complex() else made.item()


def _size_of(variable: Any) -> Any:
    """A number in place of a tensor that torch would take it out of, in tuples and lists as well; else as it is."""
    tensor = _looked_at(variable)
    if isinstance(tensor, BaseListVariable):
        sizes = [_size_of(one) for one in tensor.items]
        return variable if sizes == tensor.items else TupleVariable(sizes)
    if type(tensor) is not TensorVariable or tensor.dtype not in (torch.int32, torch.int64):
        return variable
    number = _number_in(tensor)
    return variable if number is None else ConstantVariable.create(number)


def _truth_of(variable: Any) -> bool | None:
    """Whether a tensor of one element counts as true in every replay; None if that is not known, or it is no tensor."""
    tensor = _looked_at(variable)
    if type(tensor) is not TensorVariable:
        return None
    node: fx.Node = tensor.as_proxy().node
    outcome = _outcome(node)
    if outcome is not None:
        return outcome
    made = made_again(node)
    return bool(made) if made is not None and made.numel() == 1 else None


def _looked_at(variable: Any) -> Any:
    """A variable that Dynamo has looked at; None for one that it has not: that was there before the call."""
    if not isinstance(variable, LazyVariableTracker):
        return variable
    return variable.realize() if variable.is_realized() else None


def _outcome(comparison: fx.Node) -> bool | None:
    """What comparing a number that is drawn with a constant always comes to; None if that is not known."""
    if comparison.op != "call_function" or len(comparison.args) != 2 or comparison.kwargs or comparison.users:
        return None
    one, other = comparison.args
    for drawn, bound, outcomes in ((one, other, _OUTCOMES), (other, one, _SWAPPED)):
        if comparison.target in outcomes and is_only_compared(drawn) and type(bound) in (int, float) and bound <= 0:  # type: ignore[operator]
            return outcomes[comparison.target]
    return None


def is_only_compared(node: object) -> bool:
    """Whether it is one number from [0, 1), and nothing was done to it but to compare it."""
    if not isinstance(node, fx.Node) or node.target is not torch.rand or "out" in node.kwargs:
        return False
    example = node.meta.get("example_value")
    compares = all(user.target in _OUTCOMES or user.target in _SWAPPED for user in node.users)
    return compares and isinstance(example, Tensor) and example.numel() == 1
