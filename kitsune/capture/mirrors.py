"""Scalars on the device for those that an optimizer keeps on the host.

`torch.optim` keeps its step counts, and what few other scalars it computes from them, on the host
unless told otherwise; a graph on the device needs them there. The host's stay the truth: they are
read (through shared memory, so that every kind of edit is seen) before each replay, and computed
after it in torch's arithmetic, so that nobody waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kitsune.capture.update_rules import Rule
from kitsune.errors import Refusal, RefusedError


class Mirrors:
    """The mirrors of one optimizer's scalars; those that are equal, and change together, share one.

    Attributes:
        originals: the scalars on the host.
    """

    def __init__(self, rule: Rule) -> None:
        self.originals: list[torch.Tensor] = []
        self._rule = rule
        self._mirrors: list[_Mirror] = []
        self._steps: dict[float, _Mirror] = {}
        self._computed: dict[tuple[Any, ...], _Computed] = {}

    def step(self, step: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A step count on `device`: `step`, or a mirror of it."""
        if step.device == device:
            return step
        value = _value("step", step)
        mirror = self._steps.get(value)
        if mirror is None:
            mirror = self._steps[value] = self._mirror(value, torch.float32, device)
        self._follow(mirror, step)
        return mirror.tensor

    def scalar(
        self, name: str, scalar: torch.Tensor, step: torch.Tensor, group: int, device: torch.device
    ) -> torch.Tensor:
        """Another scalar of a parameter in the group of that index, whose step count has a mirror already."""
        if scalar.device == device:
            return scalar
        if name not in self._rule.host_scalars:
            raise RefusedError(_misplaced(name, scalar))
        count, value = _value("step", step), _value(name, scalar)
        key = (name, scalar.dtype, value, group, count)
        computed = self._computed.get(key)
        if computed is None:
            mirror = self._mirror(value, scalar.dtype, device)
            computed = self._computed[key] = _Computed(name, group, self._steps[count], mirror)
        self._follow(computed.mirror, scalar)
        return computed.mirror.tensor

    def refresh(self) -> bool:
        """Makes the mirrors what the host's scalars are; False if those that shared one are no longer equal."""
        return all(map(_Mirror.refresh, self._mirrors))

    def advance(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Computes on the host, for the optimizer's `groups`, what a replay has computed on the device."""
        for mirror in self._steps.values():
            mirror.set(mirror.value + 1)
        for computed in self._computed.values():
            mirror, options = computed.mirror, groups[computed.group]
            value = torch.tensor(mirror.value, dtype=mirror.tensor.dtype)
            mirror.set(float(self._rule.next_scalar(computed.name, value, computed.steps.value, options)))

    def _mirror(self, value: float, dtype: torch.dtype, device: torch.device) -> _Mirror:
        mirror = _Mirror(value, dtype, device)
        self._mirrors.append(mirror)
        return mirror

    def _follow(self, mirror: _Mirror, original: torch.Tensor) -> None:
        mirror.follow(original)
        self.originals.append(original)


class _Mirror:
    """A scalar on the device for scalars on the host that are equal, and change together."""

    def __init__(self, value: float, dtype: torch.dtype, device: torch.device) -> None:
        self.value = value
        self.tensor = torch.full((), value, dtype=dtype, device=device)
        self._originals: list[Any] = []

    def follow(self, original: torch.Tensor) -> None:
        kind = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}[original.dtype]
        self._originals.append(kind.from_address(original.data_ptr()))

    def refresh(self) -> bool:
        value = self.value
        for original in self._originals:
            if original.value != value:
                return self._reread()
        return True

    def _reread(self) -> bool:
        value, *others = [original.value for original in self._originals]
        if any(other != value for other in others):
            return False
        self.tensor.fill_(value)
        self.value = value
        return True

    def set(self, value: float) -> None:
        """Sets the host's scalars; the graph has set the device's."""
        self.value = value
        for original in self._originals:
            original.value = value


@dataclass(frozen=True)
class _Computed:
    """A scalar of parameters of one group, by its index, that is computed from their step count."""

    name: str
    group: int
    steps: _Mirror
    mirror: _Mirror


def _value(name: str, scalar: torch.Tensor) -> float:
    if scalar.device.type != "cpu":
        raise RefusedError(_misplaced(name, scalar))
    return float(scalar)


def _misplaced(name: str, scalar: torch.Tensor) -> Refusal:
    return Refusal(f"the optimizer's state {name!r} is on {scalar.device}, unlike its parameter")
