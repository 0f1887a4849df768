"""Kitsune in both of its forms, used as its documentation shows. Imports the Kitsune of the commit under test."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import kitsune
from harness.replay_plans import ReplayPlan, plan_in_use
from harness.variants.training import Ingredients, LoopTraining, Training

_UNSETTLED_MODES = ("idle", "measuring")


def _at_once() -> Mapping[str, Any]:
    """Options by which captures do not wait until a training has gone on for long, where the commit knows of any.

    The wait is no part of the set-up, nor of what comes after it.
    """
    known = inspect.signature(kitsune.Config).parameters if hasattr(kitsune, "Config") else {}
    return {"setup_share": 1.0} if "setup_share" in known else {}


class DropInTraining(LoopTraining):
    """The plain loop with the optimizer wrapped: the one line that a user changes."""

    def __init__(self, ingredients: Ingredients, options: Mapping[str, Any]) -> None:
        self._kitsune = kitsune.KitsuneOptimizer(
            torch.optim.Adam,
            ingredients.model.parameters(),
            lr=ingredients.learning_rate,
            **_at_once(),
            **options,
        )
        super().__init__(ingredients, ingredients.model, self._kitsune)

    @property
    def settled(self) -> bool:
        return self._kitsune.status().mode not in _UNSETTLED_MODES

    @property
    def num_replays(self) -> int:
        return self._kitsune.status().replays

    def status(self) -> Mapping[str, object]:
        return self._kitsune.status().as_dict()

    def mode_in_use(self) -> str | None:
        return self._kitsune.status().mode

    def plan_in_use(self) -> ReplayPlan | None:
        return plan_in_use(self._kitsune.status().as_dict())


class TrainStepTraining(Training):
    """The explicit form: the whole step in one call."""

    def __init__(self, ingredients: Ingredients, options: Mapping[str, Any]) -> None:
        super().__init__(ingredients)
        self._step = kitsune.TrainStep(
            ingredients.model,
            ingredients.loss_fn,
            ingredients.adam(),
            enable_amp=ingredients.precision == "amp",
            **_at_once(),
            **options,
        )

    @property
    def settled(self) -> bool:
        return self._step.status().mode not in _UNSETTLED_MODES

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._step.optimizer

    @property
    def num_replays(self) -> int:
        return self._step.status().replays

    def _run(self, steps: int) -> Tensor:
        step = self._step
        for x, y in self._take(steps):
            loss = step(x, y)
        return loss.detach()

    def status(self) -> Mapping[str, object]:
        """Kitsune's status, its plan with measured times of the tasks where the Kitsune under test can measure them."""
        status = self._step.status().as_dict()
        plan = getattr(self._step, "plan", None)
        if plan is None or not inspect.signature(plan).parameters:
            return status
        ((x, y),) = self._take(1)
        try:
            measured = plan(x, y)
        except kitsune.KitsuneError:
            return status
        return status if measured is None else {**status, "plan": json.loads(measured.to_json())}

    def mode_in_use(self) -> str | None:
        return self._step.status().mode

    def plan_in_use(self) -> ReplayPlan | None:
        return plan_in_use(self._step.status().as_dict())
