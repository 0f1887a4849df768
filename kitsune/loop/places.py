"""The containers in an object, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Container = dict[Any, Any] | list[Any] | set[Any]


def containers(owner: object) -> Iterator[tuple[str, Container]]:
    """The attributes of an object, and the dicts, lists and sets in them, each once, by the names they have there."""
    known = set[int]()
    waiting: list[tuple[str, Container]] = [("", vars(owner))]
    for name, container in waiting:
        if id(container) in known:
            continue
        known.add(id(container))
        yield name, container
        waiting += [(inner, value) for inner, value in members(name, container) if isinstance(value, (dict, list, set))]


def members(name: str, container: Container) -> Iterator[tuple[str, Any]]:
    """What is in a container, by its key where that is a text, else by the name of the container."""
    if isinstance(container, dict):
        return ((key if isinstance(key, str) else name, value) for key, value in container.items())
    return ((name, value) for value in container)
