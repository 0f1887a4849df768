"""Compares what a replay leaves behind with what plain PyTorch does, from the same state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kitsune.loop.rounding import change, norm, off_by, unit, unit_of_loss
from kitsune.verification import Difference

# Of runs that start a little apart, by which to tell what rounding explains; it may make more of it than a few show.
_DRAWS = 2
_TIMES = 10.0

Results = Mapping[str, Tensor]
"""What a run gives to its caller, by name."""


class Saved(NamedTuple):
    """The values of a `State` at some moment."""

    values: dict[str, Tensor]
    random: list[Tensor]


class Left(NamedTuple):
    """A result of a run, or what it has changed of a tensor; and the norm of what is lost where that is stored."""

    tensor: Tensor
    unit: float


class State:
    """The tensors that a step may write, by name, and the generators of random numbers.

    Args:
        tensors: are written in place only.
        device: whose generator is meant, beside the host's.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = dict(tensors), device

    def save(self) -> Saved:
        """All values, in memory of their own."""
        return Saved({name: tensor.detach().clone() for name, tensor in self._tensors.items()}, self._random())

    def load(self, saved: Saved, *, eps: float = 0.0, seed: int = 0) -> None:
        """Puts values back; those that are no scalars are off by up to `eps` of them, as drawn from `seed`."""
        generators: dict[torch.device, torch.Generator] = {}
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                value = saved.values[name]
                if eps and value.dim():
                    new = torch.Generator(value.device).manual_seed(seed)
                    value = off_by(eps, value, generators.setdefault(value.device, new))
                tensor.detach().copy_(value)
        torch.set_rng_state(saved.random[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(saved.random[1], self._device)

    def left_since(self, saved: Saved, results: Results, eps: float) -> dict[str, Left]:
        """What a run from there has returned, what it has changed of each tensor, and of the generators."""
        given = {
            name: Left(value.detach().clone(), unit(value) if name.endswith(".grad") else unit_of_loss(value, eps))
            for name, value in results.items()
        }
        tensors = {name: tensor.detach() for name, tensor in self._tensors.items()}
        changes = {name: Left(change(value, tensors[name]), unit(value)) for name, value in saved.values.items()}
        random = Left(torch.cat([state.double() for state in self._random()]), 0.0)
        return {**given, **changes, "random numbers": random}

    def _random(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]


def tensors_of(modules: Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The parameters and buffers of `modules`, and the optimizer's parameters and state, by name."""
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[name if name not in found else f"{name} of {type(module).__name__}"] = tensor
    names = {id(tensor): name for name, tensor in found.items()}
    groups = [] if optimizer is None else optimizer.param_groups
    for index, param in enumerate(param for group in groups for param in group["params"]):
        assert optimizer is not None
        name = names.get(id(param), f"parameter {index} of the optimizer")
        found[name] = param
        state = optimizer.state.get(param, {})
        found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def compare(
    state: State, replay: Callable[[], Results | None], eager: Callable[[], Results], eps: Callable[[], float]
) -> list[Difference] | None:
    """What `replay` leaves otherwise than `eager` does from the present state, by more than rounding explains.

    Rounding explains what becomes of `eager` where every number that it starts from is off by `eps` of it. When this
    returns, `eager` has run last, from the present state, and what it did stands.

    Args:
        replay: returns None if it has done nothing; then nothing is compared or run, and the answer is None.
        eps: what the coarsest of all roundings takes away, relative to a number; asked after the replay.

    Returns:
        The largest differences first, as multiples of what is allowed.
    """
    before = state.save()
    results = replay()
    if results is None:
        return None
    found = state.left_since(before, results, eps())
    draws = []
    for seed in range(_DRAWS):
        state.load(before, eps=eps(), seed=seed)
        start = state.save()
        draws.append(state.left_since(start, eager(), eps()))
    state.load(before)
    return _differences(found, state.left_since(before, eager(), eps()), draws)


def _differences(
    found: Mapping[str, Left], expected: Mapping[str, Left], draws: Sequence[Mapping[str, Left]]
) -> list[Difference]:
    differences = []
    for name in dict.fromkeys((*found, *expected)):
        one, other = found.get(name), expected.get(name)
        if one is None or other is None:  # a gradient, say, that only one of the runs has left
            differences.append(Difference(name, math.inf, 0.0))
            continue
        apart = [_distance(draw[name].tensor, other.tensor) for draw in draws if name in draw]
        error, allowed = _distance(one.tensor, other.tensor), _TIMES * max(apart, default=0.0) + other.unit
        if not error <= allowed:
            differences.append(Difference(name, error, allowed))
    return sorted(differences, key=lambda one: one.error / max(one.allowed, 1e-30), reverse=True)


def _distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference; what is the same infinity in both, or NaN in both, does not differ."""
    if one.shape != other.shape:
        return math.inf
    same = (one == other) | (one.isnan() & other.isnan())
    return norm(torch.where(same, 0.0, one.double() - other.double()))
