"""Guards for constants that Python calls equal though they are not the same: `(1, 0.0)` and `(1.0, -0.0)`.

Dynamo compares constants by `==`, and asks for the type of the outermost object alone. Of dictionaries that are
unpacked (`list(names)`, `",".join(names)`) it leaves out the order of the keys, in `list` all but their number, and of
those that are used as a whole (`str(names)`) the keys. Its guard builder is private, as are the guard managers that
it fills, its variables, and the list of dictionaries whose order is guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._dynamo import variables
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from kitsune.capture.called import IS_BEFORE_2_13


@contextmanager
def strict() -> Iterator[None]:
    """Within, Dynamo's guards tell constants from others that are only equal, and dictionaries in another order."""
    guard_keys: Callable[..., None] = ConstDictVariable.install_dict_keys_match_guard
    call_of_list: Callable[..., Any] = CommonListMethodsVariable.call_method

    def guard_order(variable: ConstDictVariable) -> None:
        guard_keys(variable)
        if variable.source:
            InstructionTranslator.current_tx().output.guard_on_key_order.add(variable.source)

    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "extend" and args and isinstance(args[0], ConstDictVariable):  # as `list` does, which guards no keys
            args[0].install_dict_keys_match_guard()
        return call_of_list(variable, tx, name, args, kwargs)

    patches = [
        *_guards_of_sameness(),
        *_literals_that_stay(),
        (ConstDictVariable, "install_dict_keys_match_guard", guard_order),
        (CommonListMethodsVariable, "call_method", call_method),
        *_guards_of_wholes(),
    ]
    with ExitStack() as stack:
        for kind, name, patch in patches:
            stack.enter_context(mock.patch.object(kind, name, patch))
        yield


def _guards_of_sameness() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Those that compare by `==`: constants, instances of subclasses of theirs, and keys."""
    for name in ("EQUALS_MATCH", "CONSTANT_SUBCLASS_MATCH"):
        if hasattr(GuardBuilder, name):  # subclasses have their own since torch 2.13
            yield GuardBuilder, name, _guard_sameness(getattr(GuardBuilder, name))
    yield GuardBuilder, "DICT_KEYS_MATCH", _guard_same_keys()


def _literals_that_stay() -> Iterator[tuple[type, str, Any]]:
    """Without lists, and sets where these are a part of something: Dynamo would compare them with themselves.

    Of sets alone it guards what they hold.
    """
    ask: Callable[..., bool] = ConstantVariable.is_literal
    parts: list[None] = []

    def is_literal(value: object, *args: Any) -> bool:
        return type(value) is not list and not (parts and type(value) is set) and ask(value, *args)

    def with_parts(look: Callable[..., Any], *args: Any) -> Any:
        parts.append(None)
        try:
            return look(*args)
        finally:
            parts.pop()

    wrap: Callable[..., Any] = VariableBuilder._wrap

    def wrap_parts(builder: Any, value: object) -> Any:
        return with_parts(wrap, builder, value) if isinstance(value, tuple) else wrap(builder, value)

    yield ConstantVariable, "is_literal", staticmethod(is_literal)
    yield VariableBuilder, "_wrap", wrap_parts
    if IS_BEFORE_2_13:  # where what is read of a class is a constant
        read: Callable[..., Any] = UserDefinedClassVariable.var_getattr
        yield UserDefinedClassVariable, "var_getattr", lambda *args: with_parts(read, *args)


def _guard_sameness(guard_equality: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(guard_equality)  # Dynamo goes by its name
    def guard_sameness(builder: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
        guard_equality(builder, guard, *args, **kwargs)
        value = builder.get(guard)
        if has_lookalikes(value):
            parts = [f"{builder.arg_ref(guard)} is written {value!r}"]
            builder.get_guard_manager(guard).add_lambda_guard(is_written_as(value), parts, guard.user_stack)

    return guard_sameness


def _guard_same_keys() -> Callable[..., None]:
    guard_equality: Callable[..., None] = GuardBuilder.DICT_KEYS_MATCH

    @functools.wraps(guard_equality)
    def guard_same_keys(builder: GuardBuilder, guard: Any) -> None:
        guard_equality(builder, guard)
        keys = list(dict.keys(builder.get(guard)))
        if any(map(has_lookalikes, keys)):  # managers of dictionaries take no guard of the whole
            code = f"repr(list(dict.keys({builder.arg_ref(guard)}))) == {repr(keys)!r}"
            builder.object_aliasing_guard_codes.append((code, get_verbose_code_parts(code, guard)[0]))

    return guard_same_keys


def _guards_of_wholes() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Those of the keys of a dictionary that something gets as a whole, as in `str(names)` or `names | others`."""
    for kind in _DICTIONARIES:
        for name in ("as_python_constant", "as_proxy", "repr_impl", "nb_or_impl"):
            if name in vars(kind):
                yield kind, name, _guard_whole(getattr(kind, name))


def _guard_whole(use: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(use)
    def guarded_use(variable: Any, *args: Any, **kwargs: Any) -> Any:
        for whole in (variable, *args):
            dictionary = getattr(whole, "_base_vt", whole)
            if isinstance(dictionary, ConstDictVariable):
                dictionary.install_dict_keys_match_guard()
        return use(variable, *args, **kwargs)

    return guarded_use


_DICTIONARIES = tuple(
    vars(variables)[name]
    for name in ("ConstDictVariable", "UserDefinedDictVariable", "DefaultDictVariable", "OrderedDictVariable")
    if name in vars(variables)  # the last one since torch 2.13
)

_CHANGING = (set, list, KeysView)


def has_lookalikes(value: Any) -> bool:
    """Whether there may be other values that are equal to it, and of its type."""
    if isinstance(value, float):
        return value == 0.0
    if isinstance(value, (tuple, frozenset)):
        return any(isinstance(one, (int, float, complex)) or has_lookalikes(one) for one in value)
    return isinstance(value, (complex, slice, *_CHANGING))


def is_written_as(constant: Any) -> Callable[[Any], bool]:
    """Tells whether a value that is equal to `constant`, and of its type, is written as that by `repr`."""
    written = repr(constant)
    if isinstance(constant, _CHANGING):  # the value may be the same object, and have changed
        return lambda value: repr(value) == written
    return lambda value: value is constant or repr(value) == written
