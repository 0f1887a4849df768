"""What an iteration of a loop may train, and train with: torch has no list of it, but what collects garbage has one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from types import FrameType
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from kitsune.loop.accumulation import Accumulators
from kitsune.loop.verifying import is_comparable, tensors_of

_HELPERS: tuple[type[object], ...] = (LRScheduler, torch.amp.GradScaler, Accumulators)

T = TypeVar("T")


@dataclass(frozen=True)
class Alive:
    """What an iteration may train, of all that is alive.

    Attributes:
        modules: the outermost ones.
        owners: optimizers, and what else takes part in updates.
        tensors: of these, by name.
        others: tensors of modules that are not expected to be written to, by name.
    """

    modules: Sequence[torch.nn.Module]
    owners: Sequence[object]
    tensors: dict[str, Tensor]
    others: dict[str, Tensor]


def find_alive(modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Alive:
    """All optimizers, modules that require gradients or are owned by an optimizer, and buffers of modules in training.

    What is given comes first, and is taken as it is; of the rest only tensors that can be copied and compared.
    """
    objects = _objects()
    found = _of(objects, torch.optim.Optimizer)
    own = [one for one in found if "param_groups" in vars(one)]  # others wrap some of these
    every = list({id(one): one for one in (*optimizers, *own)}.values())
    owners = [*every, *(one for kind in _HELPERS for one in _of(objects, kind))]
    outermost = _outermost(_of(objects, torch.nn.Module))
    owned = {id(param) for one in every for group in one.param_groups for param in group["params"]}
    trained = [module for module in outermost if _is_trained(module, owned)]
    wanted = [*tensors_of(trained, every, owners).values(), *_buffers_in_training(outermost)]
    taken = {id(tensor) for tensor in wanted if is_comparable(tensor)}
    taken.update(map(id, tensors_of(modules, optimizers).values()))
    named = tensors_of([*modules, *outermost], every, owners)
    return Alive(
        [*modules, *outermost],
        owners,
        {name: tensor for name, tensor in named.items() if id(tensor) in taken},
        {name: tensor for name, tensor in named.items() if id(tensor) not in taken and _has_version(tensor)},
    )


def outermost_modules() -> list[torch.nn.Module]:
    """All that are part of no other."""
    return _outermost(_of(gc.get_objects(), torch.nn.Module))


def all_modules() -> list[torch.nn.Module]:
    """All that there are."""
    return [module for module in _of(gc.get_objects(), torch.nn.Module) if "_modules" in vars(module)]


def _of(objects: Sequence[object], kind: type[T]) -> list[T]:
    """Those of a kind. What they say of it themselves is not asked for: proxies would load what they stand for."""
    kinds = {one for one in set(map(type, objects)) if issubclass(one, kind)}
    return cast(list[T], list(compress(objects, map(kinds.__contains__, map(type, objects)))))


def _objects() -> list[object]:
    """All that the collector looks after, that included which `gc.freeze()` hides from it."""
    found = gc.get_objects()
    if gc.get_freeze_count() == 0:
        return found
    known = set(map(id, found))
    new = [*_locals(), *gc.get_referents(*found)]
    while new:
        reached = {id(one): one for one in new if gc.is_tracked(one) and id(one) not in known}
        known.update(reached)
        found += reached.values()
        new = gc.get_referents(*reached.values())
    return found


def _locals() -> Iterator[object]:
    """The variables of all functions that run."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            yield from frame.f_locals.values()
            frame = frame.f_back


def _is_trained(module: torch.nn.Module, owned: Container[int]) -> bool:
    return any(param.requires_grad or id(param) in owned for param in module.parameters())


def _buffers_in_training(modules: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    parts = (part for module in modules for part in module.modules() if part.training)
    return (buffer for part in parts for buffer in part.buffers(recurse=False))


def _outermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that are part of no other."""
    begun = [module for module in modules if "_modules" in vars(module)]  # others are still being made
    parts = {id(child) for module in begun for child in module.children()}
    return [module for module in begun if id(module) not in parts]


def _has_version(tensor: Tensor) -> bool:
    return not (torch.nn.parameter.is_lazy(tensor) or tensor.is_inference())
