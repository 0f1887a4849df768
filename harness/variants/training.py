"""What all variants share: the prepared model, the batches, and the interface of a training in progress."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import models
from harness import context, workloads
from harness.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, WHOLE
from harness.replay_plans import ReplayPlan
from harness.variants.catalogue import Precision, Variant
from models.workload import Inputs, map_tensors

_NUM_BATCHES = 8
_SEED = 0

Mark = Callable[[str], AbstractContextManager[object]]
"""Makes the range of a phase, to be entered around it."""


@dataclass(frozen=True)
class Ingredients:
    """Everything a training starts from, on the device and in the variant's layout."""

    model: nn.Module
    loss_fn: Callable[[Any, Tensor], Tensor]
    batches: tuple[tuple[Inputs, Tensor], ...]
    learning_rate: float
    precision: Precision
    device: torch.device

    def autocast(self) -> AbstractContextManager[object]:
        """What a user of this precision writes around forward and loss."""
        if self.precision == "amp":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def adam(self, *, fused: bool | None = None, capturable: bool = False) -> torch.optim.Adam:
        """torch's Adam over the model's parameters."""
        parameters = self.model.parameters()
        return torch.optim.Adam(parameters, lr=self.learning_rate, fused=fused, capturable=capturable)


def prepare(variant: Variant, model: str, batch_size: int, device: torch.device) -> Ingredients:
    """A fresh model and its batches: the same values for every variant, each in its own memory."""
    torch.manual_seed(_SEED)
    own = context.own_models()
    workload = workloads.build(model, own, context.workload_root() if own else Path())
    return ingredients(variant, workload, batch_size, device)


def ingredients(variant: Variant, workload: models.Workload, batch_size: int, device: torch.device) -> Ingredients:
    """The workload's own module, moved to the device, and its batches.

    Batches are generated before any step; trainings go round over them.
    """
    layout = torch.contiguous_format
    if workload.channels_last and variant.uses_channels_last(device.type):
        layout = torch.channels_last
    module = workload.module.to(device)
    batches = _batches(workload, batch_size, device)
    if layout is torch.channels_last:
        module = module.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs omit this overload
        batches = [(map_tensors(_channels_last, x), y) for x, y in batches]
    return Ingredients(module, workload.loss_fn, tuple(batches), workload.learning_rate, variant.precision, device)


def _batches(workload: models.Workload, batch_size: int, device: torch.device) -> Sequence[tuple[Inputs, Tensor]]:
    """The batches on the device, in memory of their own. On a GPU the variants of a process share what is drawn for the
    harness's own models: images take seconds.
    """
    data = workload.data
    is_ours = workload.name in (*models.names(large=True), *models.names(zoo=True))
    if device.type == "cpu" or not is_ours or not isinstance(data, Hashable):
        return [workload.batch(batch_size, index=index, device=device) for index in range(_NUM_BATCHES)]
    drawn = _drawn(data, batch_size)
    return [(map_tensors(lambda tensor: tensor.to(device), x), y.to(device)) for x, y in drawn]


@functools.lru_cache(maxsize=1)
def _drawn(data: models.Data, batch_size: int) -> tuple[tuple[Inputs, Tensor], ...]:
    """The batches on the CPU of a data set whose value alone decides them."""
    return tuple(data.batch(batch_size, index=index) for index in range(_NUM_BATCHES))


def _channels_last(tensor: Tensor) -> Tensor:
    """The tensor, laid out channels last if it holds images."""
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def compiled(variant: Variant, model: nn.Module) -> Callable[[Inputs], Any]:
    """The model, compiled if the variant says so."""
    return model if variant.compile_mode is None else torch.compile(model, mode=variant.compile_mode)


class Training(ABC):
    """A training in progress: each step takes the next batch."""

    def __init__(self, ingredients: Ingredients) -> None:
        self._ingredients = ingredients
        self._next_batch = 0

    def run(self, steps: int) -> Tensor:
        """Trains for so many steps, at least one; the last one's loss, which the next run may overwrite."""
        with _matmul_precision(self._ingredients.precision):
            return self._run(steps)

    @abstractmethod
    def _run(self, steps: int) -> Tensor: ...

    def run_in_phases(self, mark: Mark) -> Tensor:
        """Trains for one step as :meth:`run` does, each of its phases within a range; its loss.

        A step that runs as one thing, captured or in one call, is one phase: its parts cannot be told apart.
        """
        with _matmul_precision(self._ingredients.precision):
            return self._run_in_phases(mark)

    def _run_in_phases(self, mark: Mark) -> Tensor:
        with mark(WHOLE):
            return self._run(1)

    @property
    def settled(self) -> bool:
        """Whether the steps taken so far have brought it into the state in which all later steps run."""
        return True

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the parameters."""

    def weights(self) -> Sequence[Tensor]:
        """The parameters and buffers, as they are: to be read, or written to in place."""
        return tuple(self._ingredients.model.state_dict().values())

    @property
    def num_replays(self) -> int:
        """How many of the steps taken so far Kitsune has replayed; 0 for its peers."""
        return 0

    @property
    def has_replayed(self) -> bool:
        """Whether it was any."""
        return self.num_replays > 0

    def status(self) -> Mapping[str, object] | None:
        """What the variant says of itself, as JSON can hold it; None for those that say nothing."""
        return None

    def mode_in_use(self) -> str | None:
        """How its latest step ran, such as "replay" or "eager"; None for those that do not tell."""
        return None

    def plan_in_use(self) -> ReplayPlan | None:
        """The plan by which it replays at present, without measuring anything; None for those that tell of none."""
        return None

    def _take(self, steps: int) -> Iterator[tuple[Inputs, Tensor]]:
        batches = self._ingredients.batches
        for _ in range(steps):
            yield batches[self._next_batch]
            self._next_batch = (self._next_batch + 1) % len(batches)


class LoopTraining(Training):
    """The loop that users write: zero_grad, forward, loss, backward, step. It settles after so many steps."""

    def __init__(
        self,
        ingredients: Ingredients,
        model: Callable[[Inputs], Any],
        optimizer: torch.optim.Optimizer,
        settles_after: int = 1,
    ) -> None:
        super().__init__(ingredients)
        self._model = model
        self._optimizer = optimizer
        self._steps_to_settle = settles_after

    def take_over(self, optimizer_state: dict[str, Any], other: Training) -> None:
        """Goes on with an optimizer's state, which becomes this one's own, and with the other's next batch."""
        self._optimizer.load_state_dict(optimizer_state)
        self._next_batch = other._next_batch

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def settled(self) -> bool:
        return self._steps_to_settle <= 0

    def _run(self, steps: int) -> Tensor:
        model, loss_fn, optimizer = self._model, self._ingredients.loss_fn, self._optimizer
        autocast = self._ingredients.autocast
        for x, y in self._take(steps):
            optimizer.zero_grad()
            with autocast():
                loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
        self._steps_to_settle -= steps
        return loss.detach()

    def _run_in_phases(self, mark: Mark) -> Tensor:
        """The same loop. The optimizer's phase is ``zero_grad`` and ``step``; the loss is part of the forward one."""
        model, loss_fn, optimizer = self._model, self._ingredients.loss_fn, self._optimizer
        with mark(DATA):
            ((x, y),) = self._take(1)
        with mark(OPTIMIZER):
            optimizer.zero_grad()
        with mark(FORWARD), self._ingredients.autocast():
            loss = loss_fn(model(x), y)
        with mark(BACKWARD):
            loss.backward()
        with mark(OPTIMIZER):
            optimizer.step()
        self._steps_to_settle -= 1
        return loss.detach()


@contextmanager
def _matmul_precision(precision: Precision) -> Iterator[None]:
    """Variants of several precisions share a process: each sets torch's switch for the time it runs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
