"""Values in a few words, without running code of the user's and without holding what they are of."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Sequence
from typing import TypeGuard, TypeVar

import torch

_MOST_CHARACTERS = 40
_MOST_MEMBERS = 8
_MOST_BITS = 128

_BY_VALUE = (int, float, complex, bool, str, bytes, type(None), type(...))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_T = TypeVar("_T")

_BRACKETS: dict[type, str] = {tuple: "()", list: "[]"}


def is_a(value: object, *kinds: type[_T]) -> TypeGuard[_T]:
    """As `isinstance`, which asks a `__class__` that the user has written."""
    return issubclass(type(value), kinds)


def shown(value: object) -> str:
    """A value in at most about 40 characters: itself where it is simple, what it is where it is not."""
    kind = type(value)
    if kind is int and int.bit_length(value) > _MOST_BITS:  # type: ignore[arg-type]
        return "a large int"
    if kind in (str, bytes):
        return _shown_text(value)  # type: ignore[arg-type]
    if kind in _BY_VALUE:
        return cut(repr(value))
    if kind in _OF_TORCH:
        return repr(value)
    if kind in _BRACKETS or kind is torch.Size:
        return _shown_sequence(value, _BRACKETS.get(kind, "()"))  # type: ignore[arg-type]
    if is_a(value, enum.Enum):
        return f"{class_name(kind)}.{inspect.getattr_static(value, '_name_', '?')}"
    if is_a(value, type):
        return f"the class {class_name(value)}"
    if is_a(value, types.ModuleType):
        return f"the module {vars(value).get('__name__')}"
    if is_a(value, types.MethodType):
        return f"the method {function_name(value.__func__)}"
    if is_a(value, types.CodeType):
        return f"that of {_short(value.co_name)}()"
    if is_a(value, types.FunctionType, types.BuiltinFunctionType):
        return f"the function {function_name(value)}"
    return of_kind(class_name(kind))


def of_kind(name: str) -> str:
    """An object of the class that is called `name`."""
    return f"an {name}" if name[:1] in "AEIOUaeiou" else f"a {name}"


def class_name(kind: type) -> str:
    """The name of a class, without the function in which it is defined."""
    return _short(type.__dict__["__qualname__"].__get__(kind))


def function_name(function: object) -> str:
    """The same of a function, or of what stands for one."""
    if is_a(function, types.FunctionType):
        return _short(function.__qualname__)
    if is_a(function, types.BuiltinFunctionType):
        return function.__name__
    name = inspect.getattr_static(function, "__name__", None)
    return name if type(name) is str else of_kind(class_name(type(function)))


def cut(text: str) -> str:
    """A text without what is beyond about 40 characters. It ends before a word or a number, if it has several."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    kept = text[: _MOST_CHARACTERS - 3]
    whole = kept.rpartition(" ")[0] if text[len(kept)] != " " else kept
    return f"{whole.rstrip(' ,') or kept} ..."


def _shown_text(text: str | bytes) -> str:
    """Its beginning, in quotes, where it is long."""
    if len(repr(text[: _MOST_CHARACTERS + 1])) <= _MOST_CHARACTERS:
        return repr(text)
    begin = text[: _MOST_CHARACTERS - 6]
    return f"{begin!r}..."


def _shown_sequence(members: Sequence[object], brackets: str) -> str:
    if len(members) > _MOST_MEMBERS:
        return f"{of_kind(class_name(type(members)))} of {len(members)}"
    inside = ", ".join(map(_shown_member, members))
    comma = "," if len(members) == 1 and brackets == "()" else ""
    return cut(f"{brackets[0]}{inside}{comma}{brackets[1]}")


def _shown_member(member: object) -> str:
    return "..." if type(member) in _BRACKETS else shown(member)


def _short(name: str) -> str:
    return name.rpartition("<locals>.")[2]
