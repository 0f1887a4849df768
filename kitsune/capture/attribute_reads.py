"""Guards for attributes that Dynamo takes for constants: of functions, classes, members of enumerations, arrays.

What cannot be guarded is refused. Which attributes these are depends on the version of torch; before 2.13 they are
more. Where Dynamo reads an attribute is private.
"""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.variables import (
    ConstantVariable,
    NumpyVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    constant,
)
from torch._dynamo.variables.misc import ExceptionVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.user_defined import UserDefinedExceptionObjectVariable

from kitsune.capture.called import (
    IMMUTABLE,
    IS_BEFORE_2_13,
    NUMPY,
    READS,
    Called,
    own_method,
    realized,
    refuse_own_rules,
)
from kitsune.capture.refusing import refuse

_SHARED: list[Any] = [one for name, one in vars(constant).items() if name.startswith("CONSTANT_VARIABLE_")]
"""`None`, `True` and `False`."""

_OF_ARRAYS = frozenset(
    {"__class__", "data", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides"}
)
_OF_TENSORS = frozenset(
    {
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_cdata", "_python_dispatch", "_is_zerotensor"),
        *("retains_grad", "output_nr", "name", "volatile"),
    }
)
"""What Dynamo guards of no tensor: it takes what it finds for a constant."""

_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


@contextmanager
def noted(called: Called) -> Iterator[None]:
    """Within, what such attributes are is noted in `called`."""
    read: Callable[..., Any] = READS.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        is_read = not IS_BEFORE_2_13 or variable.fn is getattr
        if is_read and len(args) > 1 and args[1].is_python_constant():
            _look_at(called, args[0], args[1].as_python_constant())
        return read(variable, tx, args, kwargs)

    for one in _SHARED:
        one.source = None
    with (
        mock.patch.object(READS, "call_function", call_function),
        mock.patch.object(TensorVariable, "var_getattr", _reading_tensors()),
    ):
        yield


def _reading_tensors() -> Callable[..., Any]:
    """What Dynamo calls for an attribute of a tensor. Where one is found it notes at a constant that captures share.

    Later ones would write what is found there, instead of the constant.
    """
    read: Callable[..., Any] = TensorVariable.var_getattr

    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        if name in _OF_TENSORS and variable.source is not None:
            refuse(f"{name} of a tensor is read, which may be another one at each call")
        found = read(variable, tx, name)
        if not any(found is one for one in _SHARED):
            return found
        source, found.source = found.source, None
        return ConstantVariable(found.value, source=source)

    return var_getattr


def _look_at(called: Called, variable: Any, name: str) -> None:
    subject = realized(variable)
    if isinstance(subject, (NumpyNdarrayVariable, NumpyVariable)):
        if name in _OF_ARRAYS:
            refuse(NUMPY)
    elif isinstance(subject, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        if name == "args":  # what Python itself raises, Dynamo raises in words of its own
            refuse("the arguments of an exception are read")
    elif isinstance(subject, TorchInGraphFunctionVariable):
        if name in getattr(subject.value, "__dict__", ()):
            called.note_attribute(subject.value, name)
    elif isinstance(subject, UserFunctionVariable):
        _look_at_function(called, subject.fn, name)
    elif isinstance(subject, UserDefinedClassVariable):
        _look_at_class(called, subject.value, name)
    elif IS_BEFORE_2_13 and isinstance(vars(subject).get("value"), enum.Enum):
        _look_at_member(called, subject.value, name)
    elif IS_BEFORE_2_13 and isinstance(subject, UserDefinedObjectVariable):
        _refuse_hidden(subject.value, name)


def _refuse_hidden(value: object, name: str) -> None:
    """Before torch 2.13, an object's own attribute comes before what the class has to say about it."""
    found = inspect.getattr_static(type(value), name, None)
    if own_method(type(found), "__set__") and name in getattr(value, "__dict__", ()):
        refuse(f"{name} of an object is hidden by what its class {type(value).__name__} has")


def _look_at_function(called: Called, function: Callable[..., Any], name: str) -> None:
    if name == "__qualname__":  # Dynamo takes the descriptor that the class of functions has
        refuse(f"{name} of the function {function.__name__} is read")
    if name in _NAMES:
        called.note_attribute(function, name)
    if name == "__annotations__":
        called.note_attribute(function, name)
        called.note_contents(function.__annotations__)


def _look_at_class(called: Called, kind: type, name: str) -> None:
    if name in _NAMES and not kind.__flags__ & IMMUTABLE:
        called.note_attribute(kind, name)
    elif issubclass(kind, enum.Enum) and name in kind.__members__:
        refuse_own_rules(kind[name])


def _look_at_member(called: Called, member: enum.Enum, name: str) -> None:
    """Before torch 2.13, all that is read of a member is a constant."""
    found = getattr(type(member), name, None)
    if isinstance(vars(type(member)).get(name), property) or own_method(type(member), name):
        refuse(f"{name} of a member of the enumeration {type(member).__name__} is code of its own")
    value = member.value if name == "value" else vars(member).get(name)
    if isinstance(value, (list, dict, set, tuple, deque)) and not ConstantVariable.is_literal(value):
        refuse(f"{name} of a member of the enumeration {type(member).__name__} may change in place")
    if found is None or not callable(found):
        called.note_attribute(member, name)
