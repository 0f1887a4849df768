"""Decides by measurement whether a replacement is worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.errors import first_line
from kitsune.fusion.agreement import agree
from kitsune.fusion.examples import examples
from kitsune.fusion.match import Alone
from kitsune.graph.signature import graph_signature
from kitsune.kernels.tuning import is_of_compiler
from kitsune.timing import CostCache, device_us, trials, turns

# A replacement that wins less is within the noise.
_CLEARLY_FASTER = 0.97

_SECONDS = 0.1

LATE = "there was no time left to try it"
SHORT_OF_MEMORY = "there is too little memory to try it"

_NEVER_US = 1e11  # kept for what never works

_failures: dict[tuple[torch.device, str], str] = {}  # of this process: they may pass


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

    def __init__(self, device: torch.device, cache: CostCache, *, limit_s: float) -> None:
        self._device, self._cache = device, cache
        self._deadline = turns.clock() + limit_s

    def __call__(self, alone: Alone) -> Verdict:
        key = key_of(alone)
        verdict = known(key, self._device, self._cache)
        if verdict is not None:
            return verdict
        if self.is_late():
            return Verdict(LATE)
        _tell(key, alone)
        try:
            if not agree(alone, self._device):
                return self._never(key, "its results differ from those of what it would replace")
            inputs = examples(alone, self._device)
            before_us = self._time(alone.before, inputs)
            after_us = self._time(alone.after, inputs, before_us)
        except Exception as error:  # noqa: BLE001 - Triton and its compilers fail in many ways
            return self._failed(key, error)
        self._cache.put(f"{key} before", before_us)
        self._cache.put(f"{key} after", after_us)
        return _by_times(before_us, after_us)

    def is_late(self) -> bool:
        """Whether the time for trials is up."""
        return turns.clock() > self._deadline

    def _failed(self, key: str, error: Exception) -> Verdict:
        """Tries again when there may be memory; in another process what may have failed in passing."""
        causes = list(_causes(error))
        if any(isinstance(one, torch.OutOfMemoryError) for one in causes):
            return Verdict(SHORT_OF_MEMORY)
        refusal = f"it failed: {first_line(error)}"
        if any(is_of_compiler(one) for one in causes):
            return self._never(key, refusal)
        _failures[self._device, key] = refusal
        return Verdict(refusal)

    def _never(self, key: str, refusal: str) -> Verdict:
        """Keeps others from trying what does not work."""
        self._cache.put(f"{key} before", 0.0)
        self._cache.put(f"{key} after", _NEVER_US)
        return Verdict(refusal)

    def _time(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor], rival_us: float = math.inf) -> float:
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return device_us(lambda: module.forward(*inputs), self._device, limit_s=_SECONDS, rival_us=rival_us)


def _tell(key: str, alone: Alone) -> None:
    operators = " ".join(str(node.target) for node in alone.after.graph.nodes if node.op == "call_function")
    trials.trying(operators, {f"{key} before": 0.0, f"{key} after": trials.KILLED_US})


def key_of(alone: Alone) -> str:
    """Equal for parts on which there is the same verdict."""
    return "fusion " + " ".join(graph_signature(module.graph) for module in alone)


def known(key: str, device: torch.device, cache: CostCache) -> Verdict | None:
    """The verdict on what has that `key_of`, if it needs no trial."""
    failure = _failures.get((device, key))
    if failure is not None:
        return Verdict(failure)
    before_us, after_us = cache.get(f"{key} before"), cache.get(f"{key} after")
    if before_us is None or after_us is None:
        return None
    if after_us == trials.KILLED_US:
        return Verdict("it ended the process that tried it, or hung there")
    if after_us == _NEVER_US:
        return Verdict("it was tried before, and does not compile or gave other results")
    return _by_times(before_us, after_us)


def _by_times(before_us: float, after_us: float) -> Verdict:
    slower = after_us > _CLEARLY_FASTER * before_us
    return Verdict("it is not faster" if slower else None, before_us, after_us)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
