"""Where tensors and numbers are: gradients in `.grad`, buffers in modules, others in attributes, dicts, lists, sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Container = dict[Any, Any] | list[Any] | set[Any]


class Places:
    """What is where at some moment.

    Args:
        modules: whose buffers are meant, those of their parts included.
        owners: optimizers and the like; what is in their `containers` is meant.
        leaves: whose gradients are meant.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], owners: Iterable[object], leaves: Iterable[Tensor]) -> None:
        self._grads = [(tensor, tensor.grad) for tensor in leaves]
        parts = {id(part): part for module in modules for part in module.modules()}
        buffers: list[Any] = [part._buffers for part in parts.values()]
        found: list[Container] = [one for one in buffers if isinstance(one, dict)]  # a script has something else
        found += [container for owner in owners for _, container in containers(owner)]
        self._contents = [(container, container.copy()) for container in found]

    def restore(self, *, copies: bool) -> None:
        """Puts it back, copies of the gradients if that is wanted: these may be added to."""
        for tensor, grad in self._grads:
            tensor.grad = grad.clone() if copies and grad is not None else grad
        for container, kept in self._contents:
            _put_back(container, kept)


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


def _put_back(container: Any, kept: Any) -> None:
    """Lets a container have the members that it had; at no time is it without those that stay."""
    if isinstance(container, list):
        container[:] = kept
        return
    for member in [member for member in container if member not in kept]:
        container.pop(member) if isinstance(container, dict) else container.remove(member)
    container.update(kept)
