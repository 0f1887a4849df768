"""Facts about Python objects, and a quick way to see whether all of a long list still hold.

What a captured step depends on is a hundred or more facts of a few kinds. Their check is written twice: here, and in
`facts.c`, which takes a third of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

NOTED_BY_PYTHON = frozenset({"__annotations__", "__slotnames__"})
"""Attributes that Python puts into a class when somebody first asks for annotations, or copies or pickles an object."""


class Kind(IntEnum):
    """Which of the functions below has made a fact."""

    ATTRIBUTE = 0
    ITEM = 1
    RESULT = 2
    MEMBERS = 3
    CONTENTS = 4
    DEFINITION = 5
    ABSENCE = 6


class Fact(NamedTuple):
    """One fact; made by the functions below, from what is the case at present.

    Attributes:
        kind: what kind of fact it is.
        subject: what the fact is about.
        key: which part of it, where there are several.
        expected: what must be found there.
    """

    kind: Kind
    subject: Any
    key: Any
    expected: Any


def attribute(subject: object, name: str) -> Fact:
    """The attribute is the object that it is."""
    return Fact(Kind.ATTRIBUTE, subject, name, getattr(subject, name))


def item(container: Any, key: object) -> Fact:
    """The container has the object that it has for `key`."""
    return Fact(Kind.ITEM, container, key, container[key])


def result(function: Callable[..., object], *args: object) -> Fact:
    """The call returns what it returns, or something equal to that."""
    return Fact(Kind.RESULT, function, args, function(*args))


def members(sequence: list[Any]) -> Fact:
    """The list consists of the objects of which it consists."""
    return Fact(Kind.MEMBERS, sequence, None, tuple(sequence))


def contents(mapping: dict[Any, Any]) -> Fact:
    """The dictionary has the keys and the values that it has, the same objects in the order in which they came."""
    return Fact(Kind.CONTENTS, mapping, tuple(dict.keys(mapping)), tuple(dict.values(mapping)))


def definition(kind: type) -> Fact:
    """The class has the bases, and the attributes by name, that it has; functions and descriptors are the same.

    Left out is `NOTED_BY_PYTHON`.
    """
    own = _own(kind)
    return Fact(Kind.DEFINITION, kind, tuple(own), (kind.__mro__, *map(_what_runs, own, own.values())))


def absence(mapping: dict[Any, Any], key: object) -> Fact:
    """The dictionary does not have the key.

    Raises:
        KeyError: it does.
    """
    if key in mapping:
        raise KeyError(key)
    return Fact(Kind.ABSENCE, mapping, key, None)


class Facts(Protocol):
    """Facts that are checked together."""

    def hold(self) -> bool:
        """Whether all of them hold. What raises an `Exception` does not."""


class PythonFacts:
    """Checks `facts` in order, without anything that has to be built."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._facts = tuple(facts)

    def hold(self) -> bool:
        try:
            return all(_HOLDS[kind](subject, key, expected) for kind, subject, key, expected in self._facts)
        except Exception:  # noqa: BLE001 - attributes and comparisons of the user's objects may raise anything
            return False


def _returns(function: Callable[..., object], args: tuple[object, ...], expected: object) -> bool:
    found = function(*args)
    return found is expected or bool(found == expected)


def _has_contents(mapping: dict[Any, Any], keys: tuple[object, ...], values: tuple[object, ...]) -> bool:
    return _are_same(dict.keys(mapping), keys) and _are_same(dict.values(mapping), values)


def _are_same(found: Collection[object], expected: tuple[object, ...]) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _own(kind: type) -> dict[str, object]:
    """The attributes of the class itself."""
    return {name: value for name, value in vars(kind).items() if name not in NOTED_BY_PYTHON}


def _what_runs(name: str, value: object) -> object:
    """An attribute of a class, if Python may run it where nobody names it; `...` for all others."""
    is_special = name.startswith("__") and callable(value)
    return value if is_special or hasattr(type(value), "__get__") else ...


def _is_defined(kind: type, names: tuple[str, ...], expected: tuple[object, ...]) -> bool:
    own = _own(kind)
    if kind.__mro__ is not expected[0] or not _are_same(own.keys(), names):
        return False
    found = zip(own.values(), expected[1:], strict=True)
    return all(wanted is ... or value is wanted for value, wanted in found)


_HOLDS: tuple[Callable[[Any, Any, Any], bool], ...] = (
    lambda subject, name, expected: getattr(subject, name) is expected,
    lambda container, key, expected: container[key] is expected,
    _returns,
    lambda sequence, _, expected: _are_same(sequence, expected),
    _has_contents,
    _is_defined,
    lambda mapping, key, _: key not in mapping,
)
