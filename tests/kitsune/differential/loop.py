"""Runs a program: by hand, with `KitsuneOptimizer` around its loop, or with `TrainStep`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.kitsune.differential import programs
from tests.kitsune.differential.actions import AFTER_BACKWARD, AFTER_FORWARD, BEFORE, Action
from tests.kitsune.differential.peculiar import numbers_of
from tests.kitsune.differential.programs import Program
from tests.kitsune.training import Observation, Training

CLIP = 0.5


class Exact(NamedTuple):
    """A result in float64, and the largest finite one that it has or had before: rounding errors are in proportion."""

    value: Tensor
    scale: float


@dataclass(frozen=True)
class Seen:
    """What an iteration has left behind.

    Attributes:
        observed: the losses, what was read, and everything that training changes: copies, by name.
        exact: clipped gradients, parameters and optimizer state that the update would have left in float64; only of a
            run by hand, and empty where no update was made.
    """

    observed: Observation
    exact: dict[str, Exact] = field(default_factory=dict)


class Run:
    """A program in one of the forms `"eager"`, `"drop_in"` and `"train_step"`. It is a `Loop` for the actions.

    Attributes:
        skipped: whether the scaler has skipped the update of the present iteration.
        skipped_first: whether it has skipped one before there was any.
    """

    def __init__(self, program: Program, form: str, device: str = "cpu") -> None:
        self.program, self._device = program, device
        torch.manual_seed(program.seed)
        model = programs.Model(program).to(device)
        plain = programs.build_optimizer(program, model)
        options: dict[str, Any] = {} if form == "eager" else {"max_graphs": program.max_graphs}
        if form == "drop_in":
            options["defer_loss"] = program.defer_loss
        self.scaler = None if program.scaler is None else torch.amp.GradScaler(device, **program.scaler)
        step = {
            "forward": lambda model, x, y: programs.loss_of(program, model, x, y)[1],
            "accumulate": program.micro_batches,
            "grad_scaler": self.scaler,
            "clip_grad_norm": CLIP if program.clip == "norm" else None,
            "keep_grads": True,
        }
        self.training = Training(form, model, plain, step=step, **options)
        make = None if program.scheduler is None else programs.SCHEDULERS[program.scheduler]
        self.scheduler = None if make is None else make(self.training.optimizer)
        self.test_batch = program.test_batch().to(device)
        self.notes: dict[str, Tensor] = {}
        self.kept: list[Tensor] = []
        self.updates = True
        self.skipped = self.skipped_first = False
        self.num_updates = self.num_skipped = self.num_grown = self.num_updates_replayed = self.num_losses_replayed = 0

    def iterations(self) -> Iterator[Seen]:
        """Runs one iteration after the other."""
        for index in range(self.program.iterations):
            yield self._iterate(index)

    def share_replayed(self) -> float:
        """Of the forward and backward passes."""
        calls = self.program.iterations * self.program.micro_batches * self.program.calls
        return self.training.status().replays / calls

    def set(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies values into parameters and optimizer state, which are named as they are observed."""
        params = {id(param): param for param in self.training.model.parameters()}
        with torch.no_grad():
            for name, tensor in _named(self.training.model, params, self.training.plain).items():
                if name in tensors:
                    tensor.copy_(tensors[name])

    def batches(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """What an iteration trains on."""
        return [(x.to(self._device), y.to(self._device)) for x, y in self.program.batches(index)]

    def update(self, index: int) -> None:
        """The update of an iteration."""
        if self.scaler is None:
            self.training.optimizer.step()
            return
        self.scaler.step(self.training.optimizer)
        self.scaler.update()

    def whole_steps(self, index: int) -> list[Tensor]:
        """All of an iteration, by `TrainStep`; returns the losses."""
        assert self.training.train_step is not None
        return [self.training.train_step(x, y) for x, y in self.batches(index)]

    def _iterate(self, index: int) -> Seen:
        self.notes, self.updates = {}, True
        scale = self._scale()
        actions = self.program.actions(index)
        self._act(actions, BEFORE)
        exact: dict[str, Exact] = {}
        if self.training.train_step is not None:
            losses = self.whole_steps(index)
        else:
            losses = self._forward_and_backward(index, actions)
            self._act(actions, AFTER_BACKWARD)
            if self.scaler is not None and self.program.unscale and self.updates:
                self.scaler.unscale_(self.training.optimizer)
            if self.updates and self.training.form == "eager":
                clip, unscaled = partial(_clip, self.program), self.program.unscale
                exact = update_in_float64(self.training, clip, 1.0 if unscaled else scale)
            _clip(self.program, self._params())
            if self.updates:
                self.update(index)
        self.skipped = self._scale() < scale
        self.num_updates += self.updates and not self.skipped
        if self.skipped:
            exact = {}
            self.skipped_first |= self.num_updates == 0
        seen = Seen(
            {
                **self.training.observe(torch.stack(losses)),
                **self.notes,
                **self._numbers(),
                **numbers_of(self.training.model),
            },
            exact,
        )
        if self.program.zero == "after":
            self._zero()
        if self.scheduler is not None:
            value = (float(losses[-1]),) if self.program.scheduler == "plateau" else ()
            self.scheduler.step(*value)
        if self.training.form != "eager":
            covered = self.training.status().covered
            self.num_updates_replayed += "update" in covered
            self.num_losses_replayed += "loss" in covered
        self.num_skipped += self.skipped
        self.num_grown += self._scale() > scale
        return seen

    def _forward_and_backward(self, index: int, actions: list[str]) -> list[Tensor]:
        losses = []
        if self.program.zero in ("before", "model"):
            self._zero()
        for part, (x, y) in enumerate(self.batches(index)):
            self.output, self.loss = programs.loss_of(self.program, self.training.model, x, y)
            self._act(actions, AFTER_FORWARD)
            if self.program.zero == "between" and part == 0:
                self._zero()
            loss = self.loss / self.program.micro_batches
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(self.loss.detach())
        return losses

    def _scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def _zero(self) -> None:
        owner = self.training.model if self.program.zero == "model" else self.training.optimizer
        owner.zero_grad(self.program.set_to_none)

    def _params(self) -> list[Tensor]:
        return [param for group in self.training.optimizer.param_groups for param in group["params"]]

    def _act(self, names: list[str], actions: Mapping[str, Action]) -> None:
        for name in names:
            if name in actions:
                actions[name](self)

    def _numbers(self) -> dict[str, Tensor]:
        """Hyperparameters, and the state of the scaler."""
        numbers = {
            f"{name} of group {index}": value
            for index, group in enumerate(self.training.optimizer.param_groups)
            for name, value in group.items()
            if name != "params" and value is not None
        }
        if self.scaler is not None:
            numbers |= self.scaler.state_dict()
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def _clip(program: Program, params: list[Tensor]) -> None:
    if program.clip == "norm":
        nn.utils.clip_grad_norm_(params, CLIP)
    elif program.clip == "value":
        nn.utils.clip_grad_value_(params, CLIP / 10)


def update_in_float64(training: Training, clip: Callable[[list[Tensor]], None], scale: float) -> dict[str, Exact]:
    """What clipping and the optimizer's coming step would leave behind in float64, named as it is observed.

    Gradients are taken to be scaled by `scale`.
    """
    plain = training.plain
    twins = {id(param): param.detach().double() for group in plain.param_groups for param in group["params"]}
    for group in plain.param_groups:
        for param in group["params"]:
            twins[id(param)].grad = None if param.grad is None else param.grad.double() / scale
    clip(list(twins.values()))
    twin = type(plain)([{"params": [twins[id(param)] for param in group["params"]]} for group in plain.param_groups])
    twin.load_state_dict(copy.deepcopy(plain.state_dict()))
    for group in twin.param_groups:
        if group.get("fused"):  # which may not take float64, and leaves gradients as they are, as this does
            group.update({"foreach": False, "fused": False})
    before = {name: _largest(value) for name, value in _named(training.model, twins, twin).items()}
    twin.step()
    after = _named(training.model, twins, twin)
    after |= {f"{name}.grad": value.grad for name, value in after.items() if value.grad is not None}
    return {name: Exact(value, max(_largest(value), before.get(name, 0.0))) for name, value in after.items()}


def _largest(value: Tensor) -> float:
    return value.abs().where(value.isfinite(), 0.0).max().item()


def _named(model: nn.Module, tensors: Mapping[int, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What stands for parameters, by their `id`, and its state, by the names under which these are observed."""
    found: dict[str, Tensor] = {}
    firsts = dict(model.named_parameters())  # a tied parameter has several names, and its state the first of them
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in tensors:
            continue
        found[name] = tensors[id(param)]
        state = optimizer.state.get(found[name], {}) if name in firsts else {}
        found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found
