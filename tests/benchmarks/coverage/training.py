"""One model, trained with and without Kitsune: whether it is captured, and trains alike."""

from __future__ import annotations

import random
import re
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import kitsune
from tests.benchmarks.coverage.sample import Sample, library

Outcome = Literal["captured", "refused", "differs", "fails in eager", "fails", "not finished"]

_LEARNING_RATE = 1e-3
_RTOL, _ATOL = 1e-3, 1e-4
_TOLD = ("loss", "random numbers")
_SITE_PACKAGES = re.compile(r"[^\s\[]*/(?:site-packages|dist-packages)/")


@dataclass(frozen=True)
class Row:
    """What became of a model.

    Attributes:
        exact: whether losses, parameters and buffers are those of plain PyTorch bit by bit; None if not captured.
        capture_s: what the training has waited for the capture.
        reason: in the words of `status()`, or of an exception.
    """

    library: str
    family: str
    model: str
    outcome: Outcome
    exact: bool | None = None
    capture_s: float | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        took = "" if self.capture_s is None else f", {self.capture_s:.1f} s"
        return f"{self.library} {self.model}: {self.outcome}{took} {self.reason}".rstrip()


@dataclass(frozen=True)
class Job:
    """A model that is to be trained, in a process of its own.

    Attributes:
        module: what knows the library.
        memory_bytes: more than this the process cannot have.
    """

    library: str
    module: str
    family: str
    steps: int
    memory_bytes: int


def measure(job: Job, note: Callable[[str], None]) -> Row:
    """Trains it in both ways."""
    _bound(job.memory_bytes)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = library(job.module)
    note("choosing a model")
    model = known.model_of(job.family)

    def row(outcome: Outcome, **values: Any) -> Row:
        return Row(job.library, job.family, model, outcome, **values)

    note(f"training {model} with plain PyTorch")
    try:
        wanted = Trained(known.build, model, with_kitsune=False).after(job.steps)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the model's own
        return row("fails in eager", reason=_text(error))
    note(f"training {model} with Kitsune")
    trained = Trained(known.build, model, with_kitsune=True)
    found = trained.after(job.steps)
    status = trained.status()
    if status.mode != "replay" or status.replays < job.steps - 1:
        return row("refused", reason=portable("; ".join(status.refusals) or status.reason))
    differences = _different(found, wanted)
    if differences:
        note(f"comparing a step of {model}")
        differences = trained.verified(job.steps, found, wanted)
        outcome: Outcome = "differs" if differences else "captured"
        return row(outcome, exact=False, capture_s=status.setup_seconds, reason="; ".join(differences))
    return row("captured", exact=True, capture_s=status.setup_seconds)


class Trained:
    """A model in training, from seeds that are the same each time."""

    def __init__(self, build: Callable[[str], Sample], model: str, *, with_kitsune: bool) -> None:
        _seed(0)
        self._sample = build(model)
        self._model = self._sample.model.train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_LEARNING_RATE, momentum=0.9, fused=True)
        self._step: kitsune.TrainStep | None = None
        if with_kitsune:
            forward = self._sample.loss
            self._step = kitsune.TrainStep(self._model, None, self._optimizer, forward=forward, mode="replay")
        _seed(1)

    def after(self, steps: int) -> dict[str, Tensor]:
        """Trains, and returns what is there then, by name."""
        losses = [self._train(index) for index in range(steps)]
        state = {name: tensor.detach() for name, tensor in self._model.named_parameters()}
        state |= {name: tensor.detach() for name, tensor in self._model.named_buffers()}
        return {"loss": torch.stack(losses), **state, "random numbers": _next_random_numbers()}

    def status(self) -> kitsune.Status:
        assert self._step is not None
        return self._step.status()

    def verified(self, index: int, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
        """What of results that are not equal bit by bit rounding does not explain.

        Of parameters and buffers a further step tells: in several, little becomes much where few images are normalized.
        """
        assert self._step is not None
        verification = self._step.verify(**self._sample.batch(index))
        if not verification.agrees:
            return list(map(str, verification.differences)) or [verification.reason]
        return [f"{name}: others than with plain PyTorch" for name in _TOLD if not _close(found[name], wanted[name])]

    def _train(self, index: int) -> Tensor:
        batch = self._sample.batch(index)
        if self._step is not None:
            return self._step(**batch)
        self._optimizer.zero_grad()
        loss = self._sample.loss(self._model, **batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def portable(reason: str) -> str:
    """The first line, without the folders of the machine that packages lie in."""
    return _SITE_PACKAGES.sub("", reason.partition("\n")[0])


def _different(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name in wanted if name not in found or not _same(found[name], wanted[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_RTOL, atol=_ATOL, equal_nan=True)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _next_random_numbers() -> Tensor:
    """Of each generator on the host, which tells how many have been drawn."""
    numbers = [torch.rand((), dtype=torch.double).item(), random.random()]
    if "numpy" in sys.modules:
        numbers.append(sys.modules["numpy"].random.random())
    return torch.tensor(numbers, dtype=torch.double)


def _bound(memory_bytes: int) -> None:
    """Of what the process allocates; what it maps of files is not counted."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _text(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return portable(f"{type(error).__name__}: {line}")
