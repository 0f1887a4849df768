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
from tests.kitsune.differential.programs import Program
from tests.kitsune.training import Observation, Training

CLIP = 0.5


class Exact(NamedTuple):
    """A result in float64, and the largest element that it has or had before: rounding errors are in proportion."""

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
    """A program in one of the forms `"eager"`, `"drop_in"` and `"train_step"`. It is a `Loop` for the actions."""

    def __init__(self, program: Program, form: str) -> None:
        self.program = program
        torch.manual_seed(program.seed)
        model = programs.Model(program)
        plain = programs.build_optimizer(program, model)
        options: dict[str, Any] = {} if form == "eager" else {"max_graphs": program.max_graphs}
        step = {
            "forward": lambda model, x, y: programs.loss_of(program, model, x, y)[1],
            "accumulate": program.micro_batches,
            "clip_grad_norm": CLIP if program.clip == "norm" else None,
            "keep_grads": True,
        }
        self.training = Training(form, model, plain, step=step, **options)
        make = None if program.scheduler is None else programs.SCHEDULERS[program.scheduler]
        self.scheduler = None if make is None else make(self.training.optimizer)
        self.test_batch = program.test_batch()
        self.notes: dict[str, Tensor] = {}
        self.kept: list[Tensor] = []
        self.updates = True
        self.num_updates_replayed = 0

    def iterations(self) -> Iterator[Seen]:
        """Runs one iteration after the other."""
        for index in range(self.program.iterations):
            yield self._iterate(index)

    def share_replayed(self) -> float:
        """Of the forward and backward passes."""
        return self.training.status().replays / (self.program.iterations * self.program.micro_batches)

    def set(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies values into parameters and optimizer state, which are named as they are observed."""
        params = {id(param): param for param in self.training.model.parameters()}
        with torch.no_grad():
            for name, tensor in _named(self.training.model, params, self.training.plain).items():
                if name in tensors:
                    tensor.copy_(tensors[name])

    def batches(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """What an iteration trains on."""
        return self.program.batches(index)

    def update(self, index: int) -> None:
        """The update of an iteration."""
        self.training.optimizer.step()

    def whole_steps(self, index: int) -> list[Tensor]:
        """All of an iteration, by `TrainStep`; returns the losses."""
        assert self.training.train_step is not None
        return [self.training.train_step(x, y) for x, y in self.batches(index)]

    def _iterate(self, index: int) -> Seen:
        self.notes, self.updates = {}, True
        actions = self.program.actions(index)
        self._act(actions, BEFORE)
        exact: dict[str, Exact] = {}
        if self.training.train_step is not None:
            losses = self.whole_steps(index)
        else:
            losses = self._forward_and_backward(index, actions)
            self._act(actions, AFTER_BACKWARD)
            if self.updates and self.training.form == "eager":
                exact = update_in_float64(self.training, partial(_clip, self.program))
            _clip(self.program, self._params())
            if self.updates:
                self.update(index)
        seen = Seen({**self.training.observe(torch.stack(losses)), **self.notes, **self._hyperparameters()}, exact)
        if self.program.zero == "after":
            self._zero()
        if self.scheduler is not None:
            value = (float(losses[-1]),) if self.program.scheduler == "plateau" else ()
            self.scheduler.step(*value)
        if self.training.form != "eager":
            self.num_updates_replayed += "update" in self.training.status().covered
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
            (self.loss / self.program.micro_batches).backward()
            losses.append(self.loss.detach())
        return losses

    def _zero(self) -> None:
        owner = self.training.model if self.program.zero == "model" else self.training.optimizer
        owner.zero_grad(self.program.set_to_none)

    def _params(self) -> list[Tensor]:
        return [param for group in self.training.optimizer.param_groups for param in group["params"]]

    def _act(self, names: list[str], actions: Mapping[str, Action]) -> None:
        for name in names:
            if name in actions:
                actions[name](self)

    def _hyperparameters(self) -> dict[str, Tensor]:
        groups = self.training.optimizer.param_groups
        return {
            f"{name} of group {index}": torch.tensor(value, dtype=torch.float64)
            for index, group in enumerate(groups)
            for name, value in group.items()
            if name != "params" and value is not None
        }


def _clip(program: Program, params: list[Tensor]) -> None:
    if program.clip == "norm":
        nn.utils.clip_grad_norm_(params, CLIP)
    elif program.clip == "value":
        nn.utils.clip_grad_value_(params, CLIP / 10)


def update_in_float64(training: Training, clip: Callable[[list[Tensor]], None]) -> dict[str, Exact]:
    """What clipping and the optimizer's coming step would leave behind in float64, named as it is observed."""
    plain = training.plain
    twins = {id(param): param.detach().double() for group in plain.param_groups for param in group["params"]}
    for group in plain.param_groups:
        for param in group["params"]:
            twins[id(param)].grad = None if param.grad is None else param.grad.double()
    clip(list(twins.values()))
    twin = type(plain)([{"params": [twins[id(param)] for param in group["params"]]} for group in plain.param_groups])
    twin.load_state_dict(copy.deepcopy(plain.state_dict()))
    for group in twin.param_groups:
        group.update({"foreach": False, "fused": False} if "fused" in group else {"foreach": False})
    before = {name: _largest(value) for name, value in _named(training.model, twins, twin).items()}
    twin.step()
    after = _named(training.model, twins, twin)
    after |= {f"{name}.grad": value.grad for name, value in after.items() if value.grad is not None}
    return {name: Exact(value, max(_largest(value), before.get(name, 0.0))) for name, value in after.items()}


def _largest(value: Tensor) -> float:
    return value.abs().max().item()


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
