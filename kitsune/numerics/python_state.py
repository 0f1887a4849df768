"""What runs do to Python objects: saved, put back, and compared."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from kitsune.numerics.python_objects import Content, Holder, holders, is_plain, reachable


@dataclass(frozen=True)
class Contents:
    """What all holders held at some moment.

    Attributes:
        kept: holders and their contents.
        numbers: copies of the tensors in them, by `id`.
    """

    kept: dict[tuple[int, str], tuple[Holder, Content]]
    numbers: dict[int, Tensor]

    @cached_property
    def known(self) -> set[int]:
        """All objects that there were, by `id`; they are kept alive."""
        found = {id(value) for _, content in self.kept.values() for _, value in content}
        return found | {key for key, _ in self.kept}

    @cached_property
    def tensors(self) -> dict[int, tuple[str, Tensor]]:
        """The tensors that there were, by `id`, with their names."""
        return {
            id(one): (holder.member(key), one)
            for holder, content in self.kept.values()
            for key, value in content
            for one in _tensors(value)
        }


@dataclass(frozen=True)
class Changes:
    """In what two runs differ.

    Attributes:
        names: of what is another object, or is there in one of them only.
        numbers: by name, tensors that both have made; they may differ by rounding.
    """

    names: tuple[str, ...]
    numbers: dict[str, tuple[Tensor, Tensor]]


class PythonState:
    """The objects that are reached from named roots; see `reachable`."""

    def __init__(self, roots: Iterable[tuple[str, object]]) -> None:
        self._roots = list(roots)

    def save(self, beside: Contents | None = None) -> Contents:
        """What is held now, with copies of all tensors that were not there in `beside`."""
        kept = {holder.key: (holder, content) for holder, content in reachable(self._roots)}
        if beside is None:
            return Contents(kept, {})
        values = (value for _, content in kept.values() for _, value in content)
        new = {id(one): one for value in values for one in _tensors(value) if id(one) not in beside.tensors}
        return Contents(kept, {key: tensor.detach().clone() for key, tensor in new.items()})

    def load(self, contents: Contents) -> None:
        """Puts back what is not as it was."""
        for holder, content in contents.kept.values():
            if not _is_same(holder.read(holder.subject), content):
                holder.write(holder.subject, content)


def changes(before: Contents, one: Contents, other: Contents) -> Changes:
    """In what two runs differ that both began with what was held `before`."""
    comparison = _Comparison(before.known, one, other)
    for key, (holder, _) in before.kept.items():
        if key in one.kept and key in other.kept:
            comparison.contents(holder, one.kept[key][1], other.kept[key][1])
    return Changes(tuple(dict.fromkeys(comparison.names)), comparison.numbers)


class _Comparison:
    def __init__(self, known: set[int], one: Contents, other: Contents) -> None:
        self.names: list[str] = []
        self.numbers: dict[str, tuple[Tensor, Tensor]] = {}
        self._known, self._one, self._other = known, one, other
        self._begun: set[tuple[int, int]] = set()

    def contents(self, holder: Holder, one: Content, other: Content) -> None:
        if [_told(key) for key, _ in one] != [_told(key) for key, _ in other]:
            if not (isinstance(holder.subject, set) and {key for key, _ in one} == {key for key, _ in other}):
                self.names.append(holder.name)
            return
        for (key, value), (_, another) in zip(one, other, strict=True):
            self.values(holder.member(key), value, another)

    def values(self, name: str, one: Any, other: Any) -> None:
        if one is other or (id(one), id(other)) in self._begun:
            return
        self._begun.add((id(one), id(other)))
        if type(one) is not type(other) or (is_plain(one) and repr(one) != repr(other)):
            self.names.append(name)
        elif not is_plain(one):
            self._objects(name, one, other)

    def _objects(self, name: str, one: Any, other: Any) -> None:
        if isinstance(one, tuple):
            self._sequences(name, one, other)
        elif isinstance(one, frozenset):
            if one != other:
                self.names.append(name)
        elif id(one) in self._known or id(other) in self._known:
            self.names.append(name)
        elif isinstance(one, Tensor):
            self.numbers[name] = self._one.numbers[id(one)], self._other.numbers[id(other)]
        elif isinstance(one, types.FunctionType) and one.__code__ is not other.__code__:
            self.names.append(name)
        else:
            for part, another in zip(holders(name, one), holders(name, other), strict=False):
                found, expected = self._one.kept.get(part.key), self._other.kept.get(another.key)
                if found is not None and expected is not None:
                    self.contents(part, found[1], expected[1])

    def _sequences(self, name: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
        if len(one) != len(other):
            self.names.append(name)
            return
        for place, (value, another) in enumerate(zip(one, other, strict=True)):
            self.values(f"{name}[{place}]", value, another)


def _tensors(value: Any) -> Iterator[Tensor]:
    """A tensor itself, and those in tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (tensor for one in value for tensor in _tensors(one))


def _told(key: object) -> object:
    """Equal for keys that are the same: numbers and texts as they are written, others as objects."""
    return (type(key), repr(key)) if is_plain(key) or isinstance(key, tuple) else id(key)


def _is_same(one: Content, other: Content) -> bool:
    return len(one) == len(other) and all(
        (key is another or _told(key) == _told(another)) and value is what
        for (key, value), (another, what) in zip(one, other, strict=True)
    )
