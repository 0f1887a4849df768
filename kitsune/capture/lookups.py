"""Guards for what Python looks up in vain, and for which objects are the same.

Where an attribute or a key is missing, so that `__getattr__` or an `except` has the answer, Dynamo does not guard that
it goes on missing; nor, where a class inherits an attribute, that it gets none of its own; nor, where objects are
compared by `is`, or by an `==` that means the same, which ones they are. Its variables and its guard builder are
private.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GetItemSource, TypeDictSource, TypeMROSource
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, LazyVariableTracker, UserDefinedObjectVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable

_PARTS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of modules in which `Module.__getattr__` looks."""

_COMPARISONS = (operator.is_, operator.is_not, operator.eq, operator.ne)

_IMMUTABLE = 1 << 8  # `Py_TPFLAGS_IMMUTABLETYPE`: nobody can give such a class an attribute


@contextmanager
def guarded() -> Iterator[None]:
    """Within, Dynamo guards these."""
    attribute = mock.patch.object(UserDefinedObjectVariable, "var_getattr", _guard_attribute())
    inherited = mock.patch.object(UserDefinedObjectVariable, "get_source_by_walking_mro", _guard_class())
    key = mock.patch.object(ConstDictVariable, "getitem_const_raise_exception_if_absent", _guard_key())
    identity = mock.patch.object(BuiltinVariable, "call_function", _guard_identity())
    with attribute, inherited, key, identity:
        yield


def _guard_attribute() -> Callable[..., Any]:
    look_up: Callable[..., Any] = UserDefinedObjectVariable.var_getattr

    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        if variable.source and _is_missing(variable.value, name):
            _install(variable.source, GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
            for part in _PARTS if isinstance(variable.value, torch.nn.Module) else ():
                found = look_up(variable, tx, part)
                if isinstance(found, LazyVariableTracker):
                    found = found.realize()
                if isinstance(found, ConstDictVariable):
                    found.install_dict_contains_guard(tx, [ConstantVariable.create(name)])
            for place in range(len(type(variable.value).__mro__)):
                _guard_missing_in_class(variable, place, name)
        return look_up(variable, tx, name)

    return var_getattr


def _guard_class() -> Callable[..., Any]:
    walk: Callable[..., Any] = UserDefinedObjectVariable.get_source_by_walking_mro

    def get_source_by_walking_mro(variable: Any, *args: Any) -> Any:
        name = args[-1]  # before torch 2.13 the only one
        if name not in vars(type(variable.value)):
            _guard_missing_in_class(variable, 0, name)  # Dynamo does so for the classes between
        return walk(variable, *args)

    return get_source_by_walking_mro


def _guard_key() -> Callable[..., Any]:
    look_up: Callable[..., Any] = ConstDictVariable.getitem_const_raise_exception_if_absent

    def getitem(variable: Any, tx: Any, key: Any) -> Any:
        if key not in variable:
            variable.install_dict_contains_guard(tx, [key])
        return look_up(variable, tx, key)

    return getitem


def _guard_identity() -> Callable[..., Any]:
    call: Callable[..., Any] = BuiltinVariable.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if variable.fn in _COMPARISONS and len(args) == 2:
            pair = [one.realize() if isinstance(one, LazyVariableTracker) else one for one in args]
            if all(_is_compared_by_identity(one, variable.fn) for one in pair):
                for one in pair:
                    _install(one.source, GuardBuilder.ID_MATCH)
        return call(variable, tx, args, kwargs)

    return call_function


def _is_compared_by_identity(variable: Any, function: Any) -> bool:
    """Whether it tells objects from one another, of which Dynamo guards the type alone."""
    if variable.source is None:
        return False
    if function in (operator.is_, operator.is_not):
        return isinstance(variable, (UserDefinedObjectVariable, ConstDictVariable, BaseListVariable))
    return isinstance(variable, UserDefinedObjectVariable) and type(variable.value).__eq__ is object.__eq__


def _is_missing(value: object, name: str) -> bool:
    """Whether neither an object nor its classes have an attribute, as far as can be seen without running any code."""
    if name in ("__dict__", "__class__") or any(name in vars(kind) for kind in type(value).__mro__):
        return False
    try:
        places = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return False
    if name in places:
        return False
    return not (isinstance(value, torch.nn.Module) and any(name in places.get(part, ()) for part in _PARTS))


def _guard_missing_in_class(variable: Any, place: int, name: str) -> None:
    """Guards that the class at a place of the method resolution order gets no attribute of that name."""
    kind = type(variable.value).__mro__[place]
    if variable.cls_source is None or kind is torch.nn.Module or kind.__flags__ & _IMMUTABLE:
        return
    source = TypeDictSource(GetItemSource(TypeMROSource(variable.cls_source), place))
    if hasattr(GuardBuilder, "DICT_NOT_CONTAINS"):
        _install(source, GuardBuilder.DICT_NOT_CONTAINS, key=name)
    else:  # before torch 2.13
        _install(source, GuardBuilder.DICT_CONTAINS, key=name, invert=True)


def _install(source: Any, guard: Callable[..., Any], **parameters: Any) -> None:
    install_guard(source.make_guard(functools.partial(guard, **parameters) if parameters else guard))
