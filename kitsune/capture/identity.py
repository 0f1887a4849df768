"""Which objects are one: what `is` says, and `==`, `in` and dictionaries where a class has no equality of its own.

Dynamo tells objects from one another as it knows them: functions by their code, `functools.partial` and tuples by what
they hold, strings and numbers by their value. That an answer stays it seldom guards, since of most objects it guards
the type alone. Here the objects themselves are compared, and guarded. Dynamo's variables, its guard builder, its
handlers of comparisons and what it makes of keys are private.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch._dynamo import guards, symbolic_convert, variables
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import is_constant_source, is_from_closure_source, is_from_skip_guard_source
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    LazyVariableTracker,
    builtin,
    dicts,
    functions,
    lists,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.user_defined import FrozenDataClassVariable, UserDefinedObjectVariable

from kitsune.capture.aliases import guard_of_alias
from kitsune.capture.called import is_array, own_method
from kitsune.capture.refusing import refuse

_IS = {operator.is_: True, operator.is_not: False}
_EQUALS = {operator.eq: True, operator.ne: False, "__eq__": True, "__ne__": False}

_SINGLE = (
    *(type(None), bool, type(...), type(NotImplemented)),
    *(type, types.ModuleType, enum.Enum, torch.dtype, torch.layout, torch.memory_format),
)
"""Classes of whose objects Dynamo guards which one it is, or a value that only one has."""

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
"""Made whenever they are read, and equal where they are of one object and one function."""

_CONSTANT = tuple(
    vars(functions)[name]
    for name in ("UserFunctionVariable", "FunctoolsPartialVariable", "BoundBuiltinMethodVariable")
    if name in vars(functions)
)
"""What Dynamo takes for a constant without having guarded which one it is."""

UNKNOWN = object()
"""Stands for an object that there was not before the call."""


@contextmanager
def guarded() -> Iterator[None]:
    """Within, Dynamo tells objects from one another as Python does, and guards it."""
    handlers = symbolic_convert.compare_op_handlers
    signs = {"is": operator.is_, "is not": operator.is_not, "==": operator.eq, "!=": operator.ne}
    answering = {sign: _answering(function, handlers[sign]) for sign, function in signs.items()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(handlers, answering))
        for place, name, patch in _patches():
            stack.enter_context(mock.patch.object(place, name, patch))
        yield


def _patches() -> Iterator[tuple[Any, str, Any]]:
    yield BuiltinVariable, "call_function", _answering_calls()
    yield VariableBuilder, "_wrap", _guarding_classes()
    if hasattr(variables, "object_protocol"):  # since torch 2.13
        protocol = variables.object_protocol
        compare = _answering_identity(protocol.vt_identity_compare)
        yield protocol, "vt_identity_compare", compare
        yield builtin, "vt_identity_compare", compare
        yield protocol, "generic_richcompare", _answering_comparison(protocol.generic_richcompare)
    contains = _answering_membership(dynamo_utils.iter_contains)
    yield dynamo_utils, "iter_contains", contains
    yield lists, "iter_contains", contains
    of_dictionary: Any = dicts.ConstDictVariable  # has them before torch 2.13
    key = dicts.HashableTracker if hasattr(dicts, "HashableTracker") else of_dictionary._HashableTracker
    yield key, "__init__", _pinning(key.__init__)
    yield key, "__hash__", _hashing(key.__hash__)
    yield key, "__eq__", _telling_apart(key.__eq__)
    for module in filter(None, (dicts, getattr(variables, "sets", None), getattr(variables, "hashable", None))):
        yield module, "is_hashable", _refusing_what_has_no_hash(module.is_hashable)
    for kind in _CONSTANT:
        yield kind, "as_python_constant", _pinning_constant(kind.as_python_constant)


def _guarding_classes() -> Callable[..., Any]:
    """What Dynamo calls for an object: which class it is, found by way of a closure, is guarded."""
    wrap: Callable[..., Any] = VariableBuilder._wrap

    def guarding_classes(builder: Any, value: Any) -> Any:
        if isinstance(value, type) and is_from_closure_source(builder.source):
            install_guard(builder.source.make_guard(GuardBuilder.ID_MATCH))
        return wrap(builder, value)

    return guarding_classes


def _answering(function: Callable[..., Any], handle: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a sign."""

    def answering(tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        answer = _answer(tx, function, *args)
        return handle(tx, args, kwargs) if answer is None else answer

    return answering


def _answering_calls() -> Callable[..., Any]:
    call: Callable[..., Any] = BuiltinVariable.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        is_comparison = variable.fn in _IS or variable.fn in _EQUALS
        answer = _answer(tx, variable.fn, *args) if is_comparison and len(args) == 2 else None
        return call(variable, tx, args, kwargs) if answer is None else answer

    return call_function


def _answering_identity(compare: Callable[..., Any]) -> Callable[..., Any]:
    def vt_identity_compare(left: Any, right: Any) -> Any:
        answer = _answer(InstructionTranslator.current_tx(), operator.eq, left, right)
        return compare(left, right) if answer is None else answer

    return vt_identity_compare


def _answering_comparison(compare: Callable[..., Any]) -> Callable[..., Any]:
    def generic_richcompare(tx: Any, left: Any, right: Any, name: str) -> Any:
        answer = _answer(tx, name, left, right)
        return compare(tx, left, right, name) if answer is None else answer

    return generic_richcompare


def _answering_membership(contains: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls for `in` a sequence."""

    def iter_contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        untold: list[Any] = []
        for one in items:
            if not isinstance(_unwrapped(search), UserDefinedObjectVariable) and _has_own_equality(one):
                refuse("an object with an __eq__() of its own is compared with a constant, as by in")
            is_found = _is_the_one(tx, one, search)
            same = is_found or _are_one(tx, one, search, strict=False)
            if same:
                if is_found and untold:  # which are asked before
                    contains(untold, search, tx, *args, **kwargs)
                return ConstantVariable.create(True)
            if same is None:
                untold.append(one)
        return contains(untold, search, tx, *args, **kwargs)

    return iter_contains


def _has_own_equality(variable: Any) -> bool:
    inside = _unwrapped(variable)
    return isinstance(inside, UserDefinedObjectVariable) and own_method(type(inside.value), "__eq__")


def _is_the_one(tx: Any, left: Any, right: Any) -> bool:
    """Whether two variables are one object of a class with an equality of its own, which containers do not ask then."""
    if _unwrapped(left) is _unwrapped(right):
        return isinstance(_unwrapped(left), UserDefinedObjectVariable)
    first, second = object_of(tx, left), object_of(tx, right)
    if first is UNKNOWN or first is not second or not own_method(type(first), "__eq__"):
        return False
    _guard_one(left.source, right.source)
    return True


def _answer(tx: Any, function: Any, left: Any, right: Any) -> Any:
    """The result of a comparison that goes by identity; None of any other, and where Dynamo knows and guards it."""
    if function in _IS:
        same = _are_one(tx, left, right, strict=True)
        return None if same is None else ConstantVariable.create(same is _IS[function])
    if function in _EQUALS:
        same = _are_one(tx, left, right, strict=False)
        return None if same is None else ConstantVariable.create(same is _EQUALS[function])
    return None


def _are_one(tx: Any, left: Any, right: Any, strict: bool) -> bool | None:
    """Whether two variables are one object, which is guarded.

    None where what there was before the call does not tell, or Dynamo guards it; with `strict` False also of objects of
    classes with an equality of their own.
    """
    if _unwrapped(left) is _unwrapped(right):
        return None
    first, second = object_of(tx, left), object_of(tx, right)
    if first is UNKNOWN or second is UNKNOWN:
        return _is_literal(left, right, first, second) if strict else None
    if type(first) is not type(second) or isinstance(first, _SINGLE):
        return None
    if not strict and isinstance(first, _METHODS):
        is_equal = bool(first == second)
        _guard_pair(left.source, right.source, "==" if is_equal else "!=")
        return is_equal
    if not strict and not _inherits(first, "__eq__"):
        return None
    if first is second:
        _guard_one(left.source, right.source)
    else:
        _guard_pair(left.source, right.source, "is not")
    return first is second


def _is_literal(left: Any, right: Any, first: object, second: object) -> bool | None:
    """The same of a constant that stands in the code, and an object."""
    (literal, subject, value) = (right, left, first) if second is UNKNOWN else (left, right, second)
    if value is UNKNOWN or isinstance(literal, LazyVariableTracker) or not isinstance(literal, ConstantVariable):
        return None
    if literal.source is not None or isinstance(literal.value, _SINGLE) or type(literal.value) is not type(value):
        return None
    install_guard(subject.source.make_guard(GuardBuilder.ID_MATCH))
    return value is literal.value


def _unwrapped(variable: Any) -> Any:
    return variable.unwrap() if isinstance(variable, LazyVariableTracker) else variable


def object_of(tx: Any, variable: Any) -> Any:
    """What a variable was before the call; `UNKNOWN` if the call makes it."""
    source = variable.source
    if source is None or is_constant_source(source):
        return UNKNOWN
    names = {"G": tx.output.global_scope, "L": tx.output.local_scope}
    try:
        return source.get_value(names, guards._get_closure_vars(), {})
    except Exception:  # noqa: BLE001 - properties of the user's may raise anything, and some places cannot be read
        return UNKNOWN


def pinned_object(tx: Any, variable: Any) -> Any:
    """What a variable was before the call, guarded to be that; `UNKNOWN` if the call makes it."""
    found = object_of(tx, variable)
    if found is not UNKNOWN:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
    return found


def _inherits(value: object, name: str) -> bool:
    """Whether the class of an object has a method from `object`, which goes by identity."""
    return getattr(type(value), name) is getattr(object, name)


def _guard_one(source: Any, other: Any) -> None:
    guard = guard_of_alias(source, other)
    if guard is not None:
        install_guard(source.make_guard(guard))


def _guard_pair(source: Any, other: Any, sign: str) -> None:
    if is_from_skip_guard_source(source):
        source, other = other, source
    install_guard(source.make_guard(functools.partial(_compared, sign=sign, other=other)))


def _compared(builder: GuardBuilder, guard: Any, sign: str, other: Any) -> None:
    """As Dynamo's guard that an object under two names is one, of another comparison."""
    code = f"{builder.arg_ref(guard)} {sign} {builder.arg_ref(other.name)}"
    builder.object_aliasing_guard_codes.append((code, get_verbose_code_parts(code, guard)[0]))


def _pinning_constant(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Dynamo calls where a function is a value, as for `functions.index(f)`: it is that, and guarded to be."""

    def as_python_constant(variable: Any) -> Any:
        taken = take(variable)
        found = object_of(InstructionTranslator.current_tx(), variable)
        if found is UNKNOWN or type(found) is not type(taken):
            return taken
        return pinned_object(InstructionTranslator.current_tx(), variable)

    return as_python_constant


def _pinning(make: Callable[..., None]) -> Callable[..., None]:
    """What Dynamo calls for a key: one that goes by identity is guarded to be the object that it is."""

    def pinning(key: Any, variable: Any) -> None:
        _refuse_own_hash(_unwrapped(variable))
        make(key, variable)
        found = object_of(InstructionTranslator.current_tx(), variable)
        if isinstance(found, _METHODS) and not isinstance(found.__self__, (type(None), type, types.ModuleType)):
            refuse("a method of an object is a key of a dictionary, or a member of a set")
        goes_by_identity = found is not UNKNOWN and _inherits(found, "__hash__")
        if goes_by_identity or isinstance(found, torch.nn.Parameter):
            install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        if goes_by_identity:
            key.pinned = found

    return pinning


def _refuse_own_hash(variable: Any) -> None:
    """Of what goes by identity, Dynamo knows better from torch 2.13 on; before, it refuses the same."""
    if isinstance(variable, variables.NamedTupleVariable):  # equal to a tuple, which Dynamo does not know
        refuse("a named tuple is a key of a dictionary, or a member of a set")
    if is_array(variable):
        refuse("an array or a number of NumPy's is a key of a dictionary, or a member of a set")
    for member in variable.items if isinstance(variable, variables.TupleVariable) else ():
        _refuse_own_hash(_unwrapped(member))
    if isinstance(variable, FrozenDataClassVariable):
        read: Any = getattr(variable, "_get_field_vt", None) or variable.fields.get  # type: ignore[attr-defined]
        for field in dataclasses.fields(cast(Any, variable.value)):
            _refuse_own_hash(_unwrapped(read(field.name)))
    kind = type(variable.value) if isinstance(variable, UserDefinedObjectVariable) else object
    if not isinstance(variable, FrozenDataClassVariable) and own_method(kind, "__hash__"):
        problem = f"an object of the class {kind.__name__}, which has a __hash__() of its own, is a key of a dictionary"
        refuse(f"{problem}, or a member of a set")


def _refusing_what_has_no_hash(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What Dynamo calls before it looks for a key: it takes one that has no hash, or an array, to be missing."""

    def is_hashable(variable: Any) -> bool:
        if not ask(variable):
            refuse("what is looked for in a dictionary or a set has no hash, or is an array or a number of NumPy's")
        return True

    return is_hashable


def _hashing(compute: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda key: hash(key.pinned) if hasattr(key, "pinned") else compute(key)


def _telling_apart(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def telling_apart(key: Any, other: Any) -> bool:
        if hasattr(key, "pinned") and hasattr(other, "pinned"):
            return bool(key.pinned is other.pinned)
        return compare(key, other)

    return telling_apart
