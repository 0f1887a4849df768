"""Compares what a replay leaves behind with what plain PyTorch does, from the same state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from kitsune.engine.rounding import change, doubled, norm, off_by, unit, unit_of_loss
from kitsune.graph.dataflow import storage_of
from kitsune.loop.places import containers, members
from kitsune.numerics.python_state import Contents, PythonState, changes
from kitsune.verification import Difference

# Of runs that start a little apart, by which to tell what rounding explains; it may make more of it than a few show.
_DRAWS = 2
_TIMES = 10.0

_LEAST = 1e-30

Results = Mapping[str, Tensor]
"""What a run gives to its caller, by name."""


class Saved(NamedTuple):
    """A `State` at some moment: copies of its tensors, the memory that they had, generators, and Python objects."""

    values: dict[str, Tensor]
    memory: dict[str, Tensor]
    random: list[Tensor]
    random_of_python: tuple[Any, ...]
    objects: Contents


class Left(NamedTuple):
    """A result of a run, or what it has changed of a tensor; and the norm of what is lost where that is stored."""

    tensor: Tensor
    unit: float

    def size(self) -> float:
        """The norm, and no less than what is lost; never zero."""
        return max(norm(self.tensor), self.unit, _LEAST)


class Outcome(NamedTuple):
    """What a run has left: numbers, by name, and Python objects."""

    numbers: dict[str, Left]
    objects: Contents


class State:
    """What a step may change: tensors, by name, generators of random numbers, and Python objects.

    Args:
        tensors: those that are known to be written.
        device: whose generator is meant, beside the host's.
        roots: objects, by name, from which all others are reached that the step may change; tensors that they hold are
            meant, too.
        left_out: but for these, of which there are no copies.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        roots: Iterable[tuple[str, object]] = (),
        left_out: Iterable[Tensor] = (),
    ) -> None:
        self._objects = PythonState(roots)
        known = set(map(id, (*tensors.values(), *left_out)))
        held = self._objects.save().tensors.values()
        beside = {name: tensor for name, tensor in held if id(tensor) not in known and is_comparable(tensor)}
        self._tensors, self._device = {**beside, **tensors}, device

    def save(self) -> Saved:
        """All values, in memory of their own."""
        values = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        memory = {name: tensor.detach() for name, tensor in self._tensors.items()}
        return Saved(values, memory, self._random(), random.getstate(), self._objects.save())

    def load(self, saved: Saved) -> None:
        """Puts back what is not as it was."""
        self._objects.load(saved.objects)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                value = saved.values[name]
                if not tensor.is_sparse and storage_of(tensor) != storage_of(saved.memory[name]):
                    tensor.data = saved.memory[name]
                if tensor.is_sparse:  # by itself: what is detached has coordinates of its own
                    tensor.copy_(value)
                elif not torch.equal(tensor, value):
                    tensor.detach().copy_(value)
        torch.set_rng_state(saved.random[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(saved.random[1], self._device)
        random.setstate(saved.random_of_python)

    def offset(self, eps: float, seed: int) -> None:
        """See `put_off`."""
        put_off([tensor.detach() for tensor in self._tensors.values()], eps, seed)

    @contextmanager
    def undone(self) -> Iterator[Saved]:
        """Within, it may be written to. Afterwards it is as it was, for autograd too: what has saved it may go on."""
        saved = self.save()
        versioned = tuple(tensor for tensor in self._tensors.values() if not tensor.is_inference())
        with _unsafe_preserve_version_counter(versioned):
            try:
                yield saved
            finally:
                self.load(saved)

    def left_since(self, saved: Saved, results: Results, eps: float) -> Outcome:
        """What a run from there has returned, what it has changed of each tensor and of the generators, and objects."""
        given = {
            name: Left(value.detach().clone(), unit(value) if name.endswith(".grad") else unit_of_loss(value, eps))
            for name, value in results.items()
        }
        pairs = self._pairs(saved).items()
        changed = {name: Left(_change(before, after), unit(before)) for name, (before, after) in pairs}
        generators = Left(torch.cat([state.double() for state in self._random()]), 0.0)
        return Outcome({**given, **changed, "random numbers": generators}, self._objects.save(beside=saved.objects))

    def changes_since(self, saved: Saved) -> dict[str, Tensor]:
        """What is added to each tensor."""
        return {name: _change(before, after) for name, (before, after) in self._pairs(saved).items()}

    def _pairs(self, saved: Saved) -> dict[str, tuple[Tensor, Tensor]]:
        """The numbers of each tensor, before and after."""
        return {name: _numbers(saved.values[name], tensor.detach()) for name, tensor in self._tensors.items()}

    def _random(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]


def put_off(tensors: Iterable[Tensor], eps: float, seed: int) -> None:
    """Puts numbers off by up to `eps` of them, in place, as drawn from `seed`; not scalars, nor in sparse tensors."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.dim() and not tensor.is_sparse:
                new = torch.Generator(tensor.device).manual_seed(seed)
                tensor.copy_(off_by(eps, tensor, generators.setdefault(tensor.device, new)))


def _change(before: Tensor, after: Tensor) -> Tensor:
    """What is added to each number; all of `after` where that has other sizes."""
    return change(before, after) if before.shape == after.shape else after


def _numbers(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Both; of sparse tensors the values at the coordinates that either of them has."""
    if not before.is_sparse:
        return before, after
    one, other = before.coalesce(), after.coalesce()
    zeros = [one.clone(), other.clone()]
    for tensor in zeros:
        tensor.values().zero_()
    return (one + zeros[1]).coalesce().values(), (other + zeros[0]).coalesce().values()


def tensors_of(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer] = (),
    owners: Iterable[object] = (),
) -> dict[str, Tensor]:
    """The tensors of `modules`, the optimizers' parameters and state, and what `owners` hold, each once, by name."""
    found: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def add(name: str, tensor: Tensor, owner: object) -> str:
        if id(tensor) not in names:
            of_owner = f"{name} of {type(owner).__name__}"
            others = chain((name, of_owner), (f"{of_owner} {number}" for number in count(2)))
            names[id(tensor)] = next(one for one in others if one not in found)
            found[names[id(tensor)]] = tensor
        return names[id(tensor)]

    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            add(name, tensor, module)
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            name = add(f"parameter {index} of the optimizer", param, optimizer)
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    add(f"{name}.{key}", value, optimizer)
    for owner in owners:
        for place, container in containers(owner):
            for name, value in members(place, container):
                if isinstance(value, Tensor):
                    add(name, value, owner)
    return found


def spread(run: Callable[[int | None], Mapping[str, Tensor]]) -> dict[str, float]:
    """How far apart runs end, by the names of what they leave, that start a little apart.

    Args:
        run: a run off by as much as rounding takes away, as drawn from a seed; None: from exact numbers.
    """
    exact = run(None)
    draws = [run(seed) for seed in range(_DRAWS)]
    return {
        name: max(distance(draw[name], value) for draw in draws)
        for name, value in exact.items()
        if all(name in draw for draw in draws)
    }


def compare(
    state: State,
    replay: Callable[[], Results | None],
    eager: Callable[[], Results],
    eps: Callable[[], float],
    apart: Callable[[], Mapping[str, float]],
) -> list[Difference] | None:
    """What `replay` leaves otherwise than `eager` does from the present state, by more than rounding explains.

    Rounding explains what becomes of a run where every number that it starts from is off by `eps` of it. When this
    returns, `eager` has run once, as the last, from the present state, and what it did stands.

    Args:
        replay: returns None if it has done nothing; then nothing is compared or run, and the answer is None.
        eps: what the coarsest of all roundings takes away, relative to a number; asked after the replay.
        apart: see `spread`; asked after the replay, for runs that leave the state as it is.

    Returns:
        The largest differences first, as multiples of what is allowed.
    """
    with state.undone() as before:
        results = replay()
        found = None if results is None else state.left_since(before, results, eps())
    if found is None:
        return None
    with torch.compiler.set_stance("force_eager"):  # what is compiled rounds in other places
        allowed = apart()
        return _differences(before.objects, found, state.left_since(before, eager(), eps()), allowed)


def _differences(before: Contents, found: Outcome, expected: Outcome, apart: Mapping[str, float]) -> list[Difference]:
    of_objects = changes(before, found.objects, expected.objects)
    differences = [Difference(name, math.inf, 0.0) for name in of_objects.names]
    relative = max(
        (most / one.size() for name, most in apart.items() if (one := expected.numbers.get(name))), default=0
    )
    for name, (tensor, another) in of_objects.numbers.items():
        error, allowed = distance(tensor, another), _TIMES * relative * norm(another) + unit(another)
        if error and not error <= allowed:
            differences.append(Difference(name, error, allowed))
    for name in dict.fromkeys((*found.numbers, *expected.numbers)):
        one, other = found.numbers.get(name), expected.numbers.get(name)
        if one is None or other is None:  # a gradient, say, that only one of the runs has left
            differences.append(Difference(name, math.inf, 0.0))
            continue
        error, allowed = distance(one.tensor, other.tensor), _TIMES * apart.get(name, 0.0) + other.unit
        if error and not error <= allowed:  # which is NaN where numbers overflow
            differences.append(Difference(name, error, allowed))
    return sorted(differences, key=lambda one: one.error / max(one.allowed, _LEAST), reverse=True)


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference; what is the same infinity in both, or NaN in both, does not differ."""
    if one.shape != other.shape:
        return math.inf
    same = (one == other) | (one.isnan() & other.isnan())
    return norm(torch.where(same, 0.0, doubled(one) - doubled(other)))


def is_comparable(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be copied and compared, each in a place of its own."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        return tensor.is_sparse and not tensor.is_inference()
    if tensor.is_quantized or (tensor.is_floating_point() and tensor.dtype.itemsize < 2):
        return False
    return all(stride != 0 or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
