"""Whether objects count as true, as in `if names:`, where Dynamo takes them for true without looking.

With torch 2.11 these are objects of classes made of `list`, `dict`, `str` and the like, with torch 2.13 empty
`types.MappingProxyType`s. What Dynamo does at a jump is private.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo import symbolic_convert
from torch._dynamo.variables import UserDefinedObjectVariable

from kitsune.capture.refusing import refuse


@contextmanager
def known_or_refused() -> Iterator[None]:
    """Within, captures are refused that would take something for true which is not."""
    if hasattr(symbolic_convert, "generic_bool"):  # since torch 2.13
        patch = mock.patch.object(symbolic_convert, "generic_bool", _refusing_what_is_false())
    else:
        patch = mock.patch.object(UserDefinedObjectVariable, "var_getattr", _refusing_builtin_truth())
    with patch:
        yield


def _refusing_what_is_false() -> Callable[..., Any]:
    """What Dynamo calls at a jump; where the object is none of the model's classes, it does not look at the answer."""
    ask: Callable[..., Any] = symbolic_convert.generic_bool  # type: ignore[attr-defined]

    def generic_bool(tx: Any, variable: Any) -> Any:
        answer = ask(tx, variable)
        is_looked_at = isinstance(variable, UserDefinedObjectVariable)
        if not is_looked_at and answer.is_python_constant() and not answer.as_python_constant():
            refuse(f"whether a {variable.python_type().__name__} is empty decides what is done")
        return answer

    return generic_bool


def _refusing_builtin_truth() -> Callable[..., Any]:
    """What Dynamo calls at a jump for `__bool__`; it takes for true what has one, or a length, that is built in."""
    look_up: Callable[..., Any] = UserDefinedObjectVariable.var_getattr

    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        if name == "__bool__":
            kind = type(variable.value)
            method = getattr(kind, "__bool__", None) or getattr(kind, "__len__", None)
            if isinstance(method, types.WrapperDescriptorType):
                refuse(f"whether a {kind.__name__} is true, or empty, decides what is done")
        return look_up(variable, tx, name)

    return var_getattr
