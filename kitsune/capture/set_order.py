"""Sets that a call makes or changes have an order in Python, which Dynamo does not know: where it matters, it refuses.

Dynamo takes the members in the order in which they were put there, and Python in that of their hashes. Its variables
are private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._dynamo import polyfills, variables
from torch._dynamo.variables import BuiltinVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable
from torch.nn.utils import stateless

from kitsune.capture.refusing import refuse

SetVariable: Any = vars(variables)["SetVariable"]  # in which module they are depends on the version of torch
FrozensetVariable: Any = vars(variables)["FrozensetVariable"]

_UNORDERED = (set, frozenset, sorted, min, max, len, bool)
"""What these make of a set does not depend on its order."""

_POLYFILLS = polyfills.__file__.removesuffix("__init__.py")
"""Where Dynamo has Python code for functions that are written in C."""

_STATELESS = stateless.__file__


class _Reading:
    """Counts the calls around of functions to which the order is the same."""

    def __init__(self) -> None:
        self.num_unordered = 0


@contextmanager
def known_or_refused() -> Iterator[None]:
    """Within, Dynamo refuses what depends on the order of a set, where it does not have the members in that order."""
    reading = _Reading()
    patches = [
        mock.patch.object(SetVariable, "unpack_var_sequence", _refuse_order(SetVariable.unpack_var_sequence, reading)),
        mock.patch.object(SetVariable, "call_method", _refuse_pop()),
        mock.patch.object(SetVariable, "reconstruct", _refuse_new(SetVariable.reconstruct)),
        mock.patch.object(FrozensetVariable, "reconstruct", _refuse_new(FrozensetVariable.reconstruct)),
        mock.patch.object(CommonListMethodsVariable, "call_method", _refuse_extension(reading)),
        mock.patch.object(BuiltinVariable, "call_function", _count(reading)),
    ]
    if hasattr(SetVariable, "tp_iter_impl"):  # from torch 2.12 on
        patches.append(mock.patch.object(SetVariable, "tp_iter_impl", _refuse_order(SetVariable.tp_iter_impl, reading)))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _refuse_order(iterate: Callable[..., Any], reading: _Reading) -> Callable[..., Any]:
    """What Dynamo calls to go through the members of a set."""

    def in_order(members: Any, tx: Any) -> Any:
        if not reading.num_unordered and not _is_unordered(tx.f_code):
            _refuse(members, tx)
        return iterate(members, tx)

    return in_order


def _refuse_extension(reading: _Reading) -> Callable[..., Any]:
    """What Dynamo calls for methods of lists, which goes through the members of sets in its own way."""
    call: Callable[..., Any] = CommonListMethodsVariable.call_method

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "extend" and args and isinstance(args[0], SetVariable) and not reading.num_unordered:
            _refuse(args[0].realize(), tx)
        return call(variable, tx, name, args, kwargs)

    return call_method


def _refuse_pop() -> Callable[..., Any]:
    """What Dynamo calls for methods of sets."""
    call: Callable[..., Any] = SetVariable.call_method

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "pop" and len(variable.items) > 1:
            refuse("pop() of a set is called, which takes the member that comes first in its order")
        return call(variable, tx, name, args, kwargs)

    return call_method


def _refuse_new(write: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls to have its code make a set."""

    def reconstruct(members: Any, *args: Any) -> Any:
        if _has_order_of_hashes(members) and len(members.items) > 1 and _order(members) is None:
            refuse("a set that the call makes is kept, whose order depends on how it was made")
        return write(members, *args)

    return reconstruct


def _count(reading: _Reading) -> Callable[..., Any]:
    """What Dynamo calls for functions of Python's own."""
    call: Callable[..., Any] = BuiltinVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_unordered = variable.fn in _UNORDERED
        reading.num_unordered += is_unordered
        try:
            return call(variable, tx, args, kwargs)
        finally:
            reading.num_unordered -= is_unordered

    return call_function


def _is_unordered(code: Any) -> bool:
    """Whether this is what Dynamo has in place of a function to which the order is the same."""
    name = code.co_name
    return code.co_filename.startswith(_POLYFILLS) and (name.startswith("set_") or name in ("any", "all"))


def _refuse(members: Any, tx: Any) -> None:
    """Raises `Unsupported` unless Dynamo has the members in Python's order.

    A set that was there before, and is as it was, has the order that it had: its members are guarded one by one. What
    torch does with sets of names for `functional_call` is the same in any order.
    """
    if tx.f_code.co_filename == _STATELESS:
        return
    if len(members.items) < 2 or not _has_order_of_hashes(members):
        return
    if members.source is not None and not tx.output.side_effects.is_modified(members):
        return
    if _order(members) != [key.vt.as_python_constant() for key in members.items if key.vt.is_python_constant()]:
        refuse("the order of a set is asked for that the call makes or changes")


def _has_order_of_hashes(members: Any) -> bool:
    return members.python_type() in (set, frozenset)


def _order(members: Any) -> list[Any] | None:
    """The order that Python gives these members, however they came there; None where that cannot be told."""
    stand_ins = [key.vt for key in members.items]
    if not all(one.is_python_constant() for one in stand_ins):
        return None
    values = [one.as_python_constant() for one in stand_ins]
    backwards = values[::-1]
    orders = [list(set(values)), list(set(backwards)), list(set(values) | set())]
    return orders[0] if orders.count(orders[0]) == len(orders) else None
