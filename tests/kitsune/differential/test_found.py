"""Differences that drawn loops have shown, reduced. What is drawn in `drawing.py` leaves out what leads to them."""

from __future__ import annotations

from tests.kitsune.training import Net, Training, adam, batch


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
