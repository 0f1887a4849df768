"""Texts that are made of objects: Dynamo has words of its own for some, and guards nothing of what is said of others.

How it turns objects into text is private.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._dynamo import variables
from torch._dynamo.variables import BuiltinVariable, UserDefinedObjectVariable
from torch._dynamo.variables.misc import ExceptionVariable, StringFormatVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._dynamo.variables.user_defined import UserDefinedExceptionObjectVariable

from kitsune.capture.called import IS_BEFORE_2_13, is_array, realized
from kitsune.capture.refusing import refuse

_TEXTS = (str, repr, ascii, format, operator.mod, operator.imod)


@contextmanager
def known_or_refused() -> Iterator[None]:
    """Within, Dynamo refuses a text of which it does not know, or does not guard, how it reads."""
    patches: list[tuple[type, str, Any]] = [
        (BuiltinVariable, "call_function", _asking()),
        (StringFormatVariable, "create", _refusing_what_is_left_for_later()),
    ]
    for name in ("debug_repr", "repr_impl", "str_impl"):
        if hasattr(NumpyNdarrayVariable, name):  # of arrays that are in something which is turned into text
            patches.append((NumpyNdarrayVariable, name, _refuse_text))
    with ExitStack() as stack:
        for kind, name, patch in patches:
            stack.enter_context(mock.patch.object(kind, name, patch))
        yield


def _asking() -> Callable[..., Any]:
    """What Dynamo calls for a builtin: for `str` it asks an object for its text, and guards nothing that is in it."""
    call: Callable[..., Any] = BuiltinVariable.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if variable.fn in _TEXTS:
            for one in args:
                _refuse_text(realized(one))
        if variable.fn is not str or len(args) != 1 or kwargs:
            return call(variable, tx, args, kwargs)
        subject = realized(args[0])
        is_asked = isinstance(subject, UserDefinedObjectVariable) and type(subject.value).__str__ is object.__str__
        if not is_asked:
            return call(variable, tx, args, kwargs)
        if IS_BEFORE_2_13:
            refuse("an object is turned into text, by str()")
        return variables.object_protocol.generic_repr(tx, subject)

    return call_function


def _refusing_what_is_left_for_later() -> Any:
    """What Dynamo calls for an f-string, and for `format`: before torch 2.13 it compares what it does not know."""
    create: Callable[..., Any] = StringFormatVariable.create

    def create_or_refuse(template: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        for one in (*values, *named.values()):
            _refuse_text(realized(one))
        text = create(template, values, named)
        if IS_BEFORE_2_13 and isinstance(text, StringFormatVariable):
            refuse("an object is turned into text, in an f-string or by format()")
        return text

    return staticmethod(create_or_refuse)


def _refuse_text(subject: Any, *_: Any) -> None:
    """For these Dynamo has words of its own."""
    if is_array(subject):
        refuse("an array or a number of NumPy's is turned into text")
    if isinstance(subject, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        refuse("an exception is turned into text")
