"""Kitsune in both of its forms, used as its documentation shows. Imports the Kitsune of the commit under test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import kitsune
from harness.variants.training import Ingredients, LoopTraining, Training

_UNSETTLED_MODES = ("idle", "measuring")


class DropInTraining(LoopTraining):
    """The plain loop with the optimizer wrapped: the one line that a user changes."""

    def __init__(self, ingredients: Ingredients) -> None:
        self._kitsune = kitsune.KitsuneOptimizer(
            torch.optim.Adam, ingredients.model.parameters(), lr=ingredients.learning_rate
        )
        super().__init__(ingredients, ingredients.model, self._kitsune)

    @property
    def settled(self) -> bool:
        return self._kitsune.status().mode not in _UNSETTLED_MODES

    def status(self) -> Mapping[str, object]:
        return self._kitsune.status().as_dict()


class TrainStepTraining(Training):
    """The explicit form: the whole step in one call."""

    def __init__(self, ingredients: Ingredients) -> None:
        super().__init__(ingredients)
        self._step = kitsune.TrainStep(
            ingredients.model, ingredients.loss_fn, ingredients.adam(), enable_amp=ingredients.precision == "amp"
        )

    @property
    def settled(self) -> bool:
        return self._step.status().mode not in _UNSETTLED_MODES

    def _run(self, steps: int) -> Tensor:
        step = self._step
        for x, y in self._take(steps):
            loss = step(x, y)
        return loss.detach()

    def status(self) -> Mapping[str, object]:
        return self._step.status().as_dict()
