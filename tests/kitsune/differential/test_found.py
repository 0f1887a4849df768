"""Differences that drawn loops have shown, reduced. What is drawn in `drawing.py` leaves out what leads to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.kitsune.training import Net, Training, adam, batch, compare


@pytest.mark.xfail(
    strict=True, reason="torch's foreach SGD adds the momentum to .grad in place; a replay leaves .grad as it is"
)
def test_nesterov_momentum_in_gradients() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)

    compare("drop_in", build, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_is_frozen_has_no_gradient_left() -> None:
    """Where the step of another signature has kept it there: `zero_grad()` sets it to None by hand."""
    model = Net()
    training = Training("train_step", model, adam(model), step={"keep_grads": True})
    for index in range(4):
        if index == 3:
            model.first.requires_grad_(False)
        training.step(*batch(index, size=4 if index % 2 else 6)[0])
    assert training.status().replays == 2, "the step after freezing is replayed, or this shows nothing"
    assert model.first.weight.grad is None
