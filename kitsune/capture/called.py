"""What decides which functions a captured call runs, beside what Dynamo guards.

Dynamo takes it that classes keep their methods, and that the environment of the process stays as it is.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

from kitsune.native.facts import Fact, attribute, item, result


def called_facts(function: types.FunctionType, owner: type | None) -> Iterator[Fact]:
    """What must stay for a call to run `function` again.

    Args:
        owner: the class of which it may be a method: that of its first argument, or that argument itself.
    """
    if owner is os._Environ:
        yield result(_environment)
    for place in {owner, _written_in(function)} - {None}:
        assert place is not None
        for definer in place.__mro__:
            for name in [name for name, value in list(vars(definer).items()) if _function_of(value) is function]:
                yield item(vars(definer), name)
                if definer is not place and vars(definer)[name] is getattr(place, name):
                    yield attribute(place, name)  # it may come to be defined there, too


def _environment() -> tuple[tuple[Any, Any], ...]:
    """All of it, to be compared by value: captures set some of it anew, to what it is."""
    return tuple(os.environ._data.items())  # type: ignore[attr-defined]  # nothing public shows it in microseconds


def _function_of(method: Any) -> Any:
    """What runs when it is called or read: properties, class methods and static methods hold another function."""
    if isinstance(method, property):
        return method.fget
    return method.__func__ if isinstance(method, (classmethod, staticmethod)) else method


def _written_in(function: types.FunctionType) -> type | None:
    """The class at a module's top level in whose body a function was written, which tells static methods apart."""
    place: Any = inspect.getmodule(function)
    for name in function.__qualname__.split(".")[:-1]:
        place = getattr(place, name, None)
    return place if isinstance(place, type) else None
