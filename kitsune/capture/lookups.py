"""Guards for what Python looks up in vain: attributes and keys that were missing, and come later.

Where `__getattr__`, an `except`, `hasattr` or a default has the answer, Dynamo does not guard that an attribute of an
object, a Python module, a function or a tensor goes on missing, nor what keys the `__dict__` of an object has. That
classes get none, `called` sees. Nor does Dynamo guard, before torch 2.13, the constants that are read of a class
itself. Its variables and its guard builder are private.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._dynamo import exc, variables
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    dicts,
)
from torch._dynamo.variables.dicts import ConstDictVariable

from kitsune.capture.refusing import refuse

_PARTS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of modules in which `Module.__getattr__` looks."""

_HIDES_OWN_VALUES = sys.version_info[:3] == (3, 13, 0)
"""Whether guards of what is in the `__dict__` of an object do not see what is assigned to it, or deleted, later."""

_PLAIN = (
    variables.PythonModuleVariable,
    variables.UserFunctionVariable,
    variables.UserMethodVariable,
    variables.SkipFunctionVariable,
    variables.TensorVariable,
)
"""What has no classes of the model's, so that to ask for an attribute runs none of its code."""


@contextmanager
def guarded() -> Iterator[None]:
    """Within, Dynamo guards these."""
    patches = [
        (UserDefinedObjectVariable, "var_getattr", _guard_attribute()),
        (ConstDictVariable, "getitem_const_raise_exception_if_absent", _guard_key()),
        *_guards_of_plain(),
        *_guards_of_own_dictionaries(),
        *_guards_of_classes(),
    ]
    with ExitStack() as stack:
        for kind, name, patch in patches:
            stack.enter_context(mock.patch.object(kind, name, patch))
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
        elif variable.source and _is_empty_slot(variable.value, name):
            _install_hasattr(variable.source, name)
        return look_up(variable, tx, name)

    return var_getattr


def _guard_key() -> Callable[..., Any]:
    look_up: Callable[..., Any] = ConstDictVariable.getitem_const_raise_exception_if_absent

    def getitem(variable: Any, tx: Any, key: Any) -> Any:
        if key not in variable:
            variable.install_dict_contains_guard(tx, [key])
        return look_up(variable, tx, key)

    return getitem


def _guards_of_plain() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    for kind in _PLAIN:
        if "var_getattr" in vars(kind):
            yield kind, "var_getattr", _guard_plain_attribute(kind.var_getattr)
        if "call_obj_hasattr" in vars(kind):
            yield kind, "call_obj_hasattr", _guard_plain_question(kind.call_obj_hasattr)


def _guard_plain_attribute(look_up: Callable[..., Any]) -> Callable[..., Any]:
    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        try:
            return look_up(variable, tx, name)
        except exc.ObservedAttributeError:
            if variable.source:
                _install_hasattr(variable.source, name)
            raise

    return var_getattr


def _guard_plain_question(ask: Callable[..., Any]) -> Callable[..., Any]:
    def call_obj_hasattr(variable: Any, tx: Any, name: str) -> Any:
        answer = ask(variable, tx, name)
        if variable.source and not answer.as_python_constant():
            _install_hasattr(variable.source, name)
        return answer

    return call_obj_hasattr


def _guards_of_own_dictionaries() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Those of `__dict__`, of which Dynamo takes it that what is not changed by the call itself stays."""
    if not hasattr(dicts, "DunderDictVariable"):  # before torch 2.13
        yield variables.GetAttrVariable, "call_method", _guard_question_of_dictionary()
        return
    kind = dicts.DunderDictVariable
    yield kind, "install_dict_keys_match_guard", ConstDictVariable.install_dict_keys_match_guard
    yield kind, "install_dict_contains_guard", _guard_own_key
    yield kind, "call_method", _guard_copy(kind.call_method)
    if _HIDES_OWN_VALUES:
        for name in ("getitem_const", "getitem_const_raise_exception_if_absent"):
            yield kind, name, _refusing_own_values(getattr(kind, name))


def _guards_of_classes() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Those of constants that are read of a class itself, as `Settings.scale`: no guard before torch 2.13."""
    if hasattr(dicts, "DunderDictVariable"):
        return
    look_up: Callable[..., Any] = UserDefinedClassVariable.var_getattr

    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        found = inspect.getattr_static(variable.value, name, ...)
        if variable.source and isinstance(found, enum.Enum):
            _install(AttrSource(variable.source, name), GuardBuilder.ID_MATCH)
        elif variable.source and found is not ... and ConstantVariable.is_literal(found):
            _install(AttrSource(variable.source, name), GuardBuilder.CONSTANT_MATCH)
        return look_up(variable, tx, name)

    yield UserDefinedClassVariable, "var_getattr", var_getattr


def _refuse_own_value() -> NoReturn:
    refuse("an item of the __dict__ of an object is read, whose changes Python 3.13.0 hides: use 3.13.1 or later")


def _refusing_own_values(look_up: Callable[..., Any]) -> Callable[..., Any]:
    def getitem(variable: Any, tx: Any, key: Any) -> Any:
        if variable.source and not (key.is_python_constant() and key.as_python_constant() in _PARTS):
            _refuse_own_value()
        return look_up(variable, tx, key)

    return getitem


def _guard_own_key(variable: Any, tx: Any, args: Sequence[Any]) -> None:
    subject, name = variable.items.item, args[0].as_python_constant()
    if variable.source and not tx.output.side_effects.has_pending_mutation_of_attr(subject, name):
        _install_contains(variable.source, name, name in variable.items.get_example_value_dict(subject))


def _guard_copy(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        if name == "copy":
            variable.install_dict_keys_match_guard()
        return call(variable, tx, name, args, kwargs)

    return call_method


def _guard_question_of_dictionary() -> Callable[..., Any]:
    call: Callable[..., Any] = variables.GetAttrVariable.call_method

    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        subject, source = variable.obj, variable.obj.source
        is_asked = variable.name == "__dict__" and name in ("__contains__", "__getitem__", "get")
        if is_asked and _HIDES_OWN_VALUES and name != "__contains__":
            _refuse_own_value()
        if is_asked and source and args and args[0].is_python_constant() and hasattr(subject, "value"):
            key = args[0].as_python_constant()
            if not tx.output.side_effects.has_pending_mutation_of_attr(subject, key):
                _install_contains(AttrSource(source, "__dict__"), key, key in vars(subject.value))
        return call(variable, tx, name, args, kwargs)

    return call_method


def guard_absence(variable: Any, name: str) -> bool:
    """Guards that an object has no attribute of a name; False, and nothing is guarded, if it has one or may have."""
    if not _is_missing(variable.value, name):
        return False
    _install(variable.source, GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
    return True


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


def _is_empty_slot(value: object, name: str) -> bool:
    """Whether an attribute has a place of its own in an object (`__slots__`), and no value."""
    slot = inspect.getattr_static(type(value), name, None)
    if not isinstance(slot, types.MemberDescriptorType):
        return False
    try:
        slot.__get__(value)
    except AttributeError:
        return True
    return False


def _install_contains(source: Any, key: object, is_there: bool) -> None:
    """Guards that a dictionary has a key, or does not have it."""
    if "invert" in inspect.signature(GuardBuilder.DICT_CONTAINS).parameters:  # before torch 2.13
        _install(source, GuardBuilder.DICT_CONTAINS, key=key, invert=not is_there)
    else:
        _install(source, GuardBuilder.DICT_CONTAINS if is_there else GuardBuilder.DICT_NOT_CONTAINS, key=key)


def _install_hasattr(source: Any, name: str) -> None:
    """Guards whether there is an attribute."""
    if "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        _install(source, GuardBuilder.HASATTR, attr=name)
    else:  # before torch 2.13
        _install(AttrSource(source, name), GuardBuilder.HASATTR)


def _install(source: Any, guard: Callable[..., Any], **parameters: Any) -> None:
    install_guard(source.make_guard(functools.partial(guard, **parameters)))
