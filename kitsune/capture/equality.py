"""Guards for constants that Python calls equal though they are not the same: `(1, 0.0)` and `(1.0, -0.0)`.

Dynamo compares constants by `==`, and asks for the type of the outermost object alone. Of dictionaries that are
unpacked (`list(names)`, `",".join(names)`) it leaves out the order of the keys, and in `list` all but their number.
Keys that are zeros or tuples, and instances of subclasses of `float`, it compares elsewhere, and so still does. Its
guard builder is private, as are the guard managers that it fills, its variables, and the list of dictionaries whose
order is guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable


@contextmanager
def strict() -> Iterator[None]:
    """Within, Dynamo's guards tell constants from others that are only equal, and dictionaries in another order."""
    guard_equality: Callable[..., None] = GuardBuilder.EQUALS_MATCH
    guard_keys: Callable[..., None] = ConstDictVariable.install_dict_keys_match_guard
    call_of_list: Callable[..., Any] = CommonListMethodsVariable.call_method

    @functools.wraps(guard_equality)  # Dynamo goes by its name
    def guard_sameness(builder: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
        guard_equality(builder, guard, *args, **kwargs)
        value = builder.get(guard)
        if has_lookalikes(value):
            parts = [f"{builder.arg_ref(guard)} is written {value!r}"]
            builder.get_guard_manager(guard).add_lambda_guard(is_written_as(value), parts, guard.user_stack)

    def guard_order(variable: ConstDictVariable) -> None:
        guard_keys(variable)
        if variable.source:
            InstructionTranslator.current_tx().output.guard_on_key_order.add(variable.source)

    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "extend" and args and isinstance(args[0], ConstDictVariable):  # as `list` does, which guards no keys
            args[0].install_dict_keys_match_guard()
        return call_of_list(variable, tx, name, args, kwargs)

    sameness = mock.patch.object(GuardBuilder, "EQUALS_MATCH", guard_sameness)
    order = mock.patch.object(ConstDictVariable, "install_dict_keys_match_guard", guard_order)
    lists = mock.patch.object(CommonListMethodsVariable, "call_method", call_method)
    with sameness, order, lists:
        yield


_CHANGING = (set, list, KeysView)


def has_lookalikes(value: Any) -> bool:
    """Whether there may be other values that are equal to it, and of its type."""
    if isinstance(value, float):
        return value == 0
    if isinstance(value, (tuple, frozenset)):
        return any(isinstance(one, (int, float, complex)) or has_lookalikes(one) for one in value)
    return isinstance(value, (complex, slice, *_CHANGING))


def is_written_as(constant: Any) -> Callable[[Any], bool]:
    """Tells whether a value that is equal to `constant`, and of its type, is written as that by `repr`."""
    written = repr(constant)
    if isinstance(constant, _CHANGING):  # the value may be the same object, and have changed
        return lambda value: repr(value) == written
    return lambda value: value is constant or repr(value) == written
