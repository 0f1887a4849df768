"""What can be seen of an object, to be compared with what can be seen later. Of the user's code `__eq__` alone may run.

Containers are seen with all that is in them, other objects with the names of their attributes: what these hold is seen
where it is read, that one is missing, or hides one of the class, is not.
"""

from __future__ import annotations

import os
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kitsune.capture.called import IS_BEFORE_2_13
from kitsune.native.facts import Fact, definition, item

_CONSTANTS = (type(None), bool, int, str, bytes, complex, type(...))
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, deque)
_SETS: tuple[type[Any], ...] = (set, frozenset)
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _TheSame:
    """An object that nothing more is seen of: equal to itself, and to what it says that it is equal to."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TheSame):
            return False
        same = self._value is other._value
        return same or (not isinstance(self._value, torch.Tensor) and bool(self._value == other._value))

    def __hash__(self) -> int:
        return hash(type(self._value))


def seen(value: Any) -> object:
    """What can be seen of `value`: equal to what is seen later where nothing of it has changed.

    For the class of an object see `class_facts`.
    """
    return _seen(value, ())


def own_classes(value: Any) -> Iterator[type]:
    """The classes of an object, or those that a class derives from, that are written in Python, and not torch's."""
    if isinstance(value, (dict, *_SEQUENCES, *_SETS, types.ModuleType, types.FunctionType, types.MethodType)):
        return
    for kind in value.__mro__ if isinstance(value, type) else type(value).__mro__:
        if kind.__flags__ & _IS_MADE_BY_A_CLASS_STATEMENT and kind.__module__.partition(".")[0] != "torch":
            yield kind


def class_facts(kind: type) -> Iterator[Fact]:
    """That its methods and names stay, and its constants, which Dynamo has from nowhere before torch 2.13."""
    yield definition(kind)
    if IS_BEFORE_2_13:
        own: Any = vars(kind)
        yield from (item(own, name) for name, value in own.items() if type(value) in (*_CONSTANTS, float))


def attribute_names(value: object) -> tuple[tuple[str, ...], ...]:
    """The names of an object's own attributes; of a module, those of parameters, buffers and parts, too."""
    own = object.__getattribute__(value, "__dict__")
    if not isinstance(value, nn.Module):
        return (tuple(own),)
    return (tuple(own), *(tuple(own[name]) for name in _REGISTRIES if name in own))


def _seen(value: Any, around: tuple[object, ...]) -> object:
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if kind is float:
        return kind, float.hex(value)
    if any(value is one for one in around):
        return _TheSame(value)
    within = (*around, value)
    if isinstance(value, dict):
        return kind, tuple((_seen(key, within), _seen(one, within)) for key, one in dict.items(value))
    for base in _SEQUENCES:
        if isinstance(value, base):
            return kind, tuple(_seen(one, within) for one in base.__iter__(value))
    for base in _SETS:
        if isinstance(value, base):
            return kind, frozenset(_seen(one, within) for one in base.__iter__(value))
    if value is os.environ:
        return kind, tuple(os.environ.items())
    return _TheSame(value), *_beside(value)


def _beside(value: Any) -> Iterator[object]:
    """What is seen of an object beside which one it is."""
    if isinstance(value, types.FunctionType):
        yield from map(_TheSame, (value.__code__, value.__defaults__, value.__kwdefaults__))
    if isinstance(value, (types.ModuleType, types.FunctionType, types.MethodType)):
        return
    if not isinstance(value, type) and type(value).__dictoffset__:
        yield attribute_names(value)


_IS_MADE_BY_A_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE
