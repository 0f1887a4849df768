"""Decides by measurement whether a replacement is worth it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.errors import first_line
from kitsune.fusion.match import Alone
from kitsune.graph import dataflow
from kitsune.graph.signature import graph_signature
from kitsune.timing import CostCache, device_us

# A replacement that wins less is within the noise.
_CLEARLY_FASTER = 0.97

_SECONDS = 0.1

# Most of a trial is compiling the forms of a kernel.
_TRIAL_SECONDS = 30.0

# Both round differently. Of the norm of a difference, relative to that of the result: a rounding of the lowest
# precision costs a quarter of its epsilon, and the order of a sum matters to float32.
_ROUNDINGS = 1.5
_SUMS = 1e-4

_NEVER_US = 1e11  # kept for what does not work


@dataclass(frozen=True)
class Verdict:
    """Whether a replacement shall be used, and the device times on which that rests.

    Attributes:
        refusal: why not; None if it shall.
        before_us, after_us: microseconds; None where nothing was measured.
    """

    refusal: str | None
    before_us: float | None = None
    after_us: float | None = None


Judge = Callable[[Alone], Verdict]
"""Compares a part of a graph with its replacement."""


class Measured:
    """Times both on a device, on random values, and makes sure that they agree.

    Args:
        device: all values are there.
        cache: of the times; what is in it is not measured again.
        limit_s: after so many seconds nothing more is tried; a later judge with the same cache goes on.
    """

    def __init__(self, device: torch.device, cache: CostCache, *, limit_s: float = _TRIAL_SECONDS) -> None:
        self._device, self._cache = device, cache
        self._deadline = time.monotonic() + limit_s

    def __call__(self, alone: Alone) -> Verdict:
        key = "fusion " + " ".join(graph_signature(module.graph) for module in alone)
        before_us, after_us = self._cache.get(f"{key} before"), self._cache.get(f"{key} after")
        if before_us is None or after_us is None:
            if self.is_late():
                return Verdict("there was no time left to try it")
            try:
                if not agree(alone, self._device):
                    return self._never(key, "its results differ from those of what it would replace")
                inputs = examples(alone.given, self._device)
                before_us, after_us = (self._time(module, inputs) for module in (alone.before, alone.after))
            except torch.OutOfMemoryError:
                return Verdict("there is too little memory to try it")
            except Exception as error:  # noqa: BLE001 - Triton and its compilers fail in many ways
                return self._never(key, f"it failed: {first_line(error)}")
            self._cache.put(f"{key} before", before_us)
            self._cache.put(f"{key} after", after_us)
        if after_us == _NEVER_US:
            return Verdict("it was tried before, and failed or gave other results")
        slower = after_us > _CLEARLY_FASTER * before_us
        return Verdict("it is not faster" if slower else None, before_us, after_us)

    def is_late(self) -> bool:
        """Whether the time for trials is up."""
        return time.monotonic() > self._deadline

    def _never(self, key: str, refusal: str) -> Verdict:
        """Keeps others from trying what does not work."""
        self._cache.put(f"{key} before", 0.0)
        self._cache.put(f"{key} after", _NEVER_US)
        return Verdict(refusal)

    def _time(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> float:
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return device_us(lambda: module.forward(*inputs), self._device, limit_s=_SECONDS)


def examples(given: fx.GraphModule, device: torch.device) -> Sequence[torch.Tensor]:
    """Inputs, equal at each call: of normal numbers, but for positive ones in scalars and vectors.

    Integers are 0, which is a valid class, index and count; half of the Booleans are true.
    """
    generator = torch.Generator(device).manual_seed(0)
    free = [_example(node.meta["val"], generator) for node in dataflow.placeholders(given.graph)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        made: Sequence[torch.Tensor] = given.forward(*free)
    return made


def _example(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    size = [1 if stride == 0 else size for size, stride in zip(value.size(), value.stride(), strict=True)]
    made = torch.empty_strided(size, value.stride(), dtype=value.dtype, device=device)
    if value.dtype == torch.bool:
        made.copy_(torch.rand(size, generator=generator, device=device) < 0.5)
    elif not value.dtype.is_floating_point:
        made.zero_()
    else:
        draw = torch.rand if value.dim() < 2 else torch.randn
        made.copy_(draw(size, generator=generator, device=device))
    return made.expand(value.size())


def agree(alone: Alone, device: torch.device) -> bool:
    """Whether the results are the same but for rounding, and so is what is written to the inputs."""
    floats = [tensor.dtype for node in alone.before.graph.nodes for tensor in dataflow.tensors(node)]
    lowest = max((torch.finfo(dtype).eps for dtype in floats if dtype.is_floating_point), default=0.0)
    tolerance = max(_ROUNDINGS * lowest, _SUMS)
    initial = examples(alone.given, device)
    written = {*dataflow.written_inputs(alone.before.graph), *dataflow.written_inputs(alone.after.graph)}
    results, changes = [], []
    for module in (alone.before, alone.after):
        inputs = examples(alone.given, device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            results.append(module.forward(*inputs))
        changes.append([inputs[place].double() - initial[place].double() for place in sorted(written)])
    same = all(_error(one, other) <= tolerance for one, other in zip(*results, strict=True))
    return same and all(_error(one, other) <= tolerance + _SUMS for one, other in zip(*changes, strict=True))


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of `other`, relative to `one`, where they are not equal or both no numbers.

    Infinite where only one is no number, where there are none but such, and for tensors of another kind.
    """
    if (one.dtype, one.size()) != (other.dtype, other.size()):
        return float("inf")
    if one.numel() == 0:
        return 0.0
    if one.is_floating_point() and bool(one.isnan().all()):
        return float("inf")
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    finite = torch.where(one.isfinite(), one, 0)
    difference = torch.linalg.vector_norm(torch.where(same, 0, one - other))
    error = float(difference / torch.linalg.vector_norm(finite).clamp_min(1e-30))
    return error if error == error else float("inf")
