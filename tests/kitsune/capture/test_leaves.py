"""Tensors that a model makes, and whose `requires_grad` it sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kitsune.errors import RefusedError
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Training, adam, compare


class Encoder(nn.Module):
    """As the first layers of wav2vec 2.0."""

    def __init__(self, *, frozen: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.first.requires_grad_(not frozen)
        self.wants_gradient, self.checkpoints = not frozen, checkpoints
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[:, None]
        if self.wants_gradient and self.training:
            hidden.requires_grad = True
        hidden = checkpoint(self.first, hidden, use_reentrant=False) if self.checkpoints else self.first(hidden)
        self.seen = hidden.requires_grad
        found: Tensor = self.last(hidden[:, 0])
        return found


def build(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Encoder(**options)
    return model, adam(model)


@pytest.mark.support("Models", "`hidden.requires_grad = True` for a tensor that the model makes", "replayed")
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"checkpoints": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_training_is_the_same(form: str, options: dict[str, bool]) -> None:
    training = compare(form, partial(build, **options))
    assert training.model.seen is not options.get("frozen", False)


@pytest.mark.parametrize("form", FORMS)
def test_the_attribute_and_the_mode_change(form: str) -> None:
    """Also where nothing else has a gradient, so that it decides what is seen."""

    def edit(training: Training, index: int) -> None:
        training.model.wants_gradient = index < 4 or index >= 8
        training.model.first.requires_grad_(index % 4 < 2)

    training = compare(form, build, steps=14, edit=edit, replays=3)
    assert training.model.seen


def marked(tensor: Tensor) -> Tensor:
    tensor.requires_grad = True
    return tensor


REFUSED: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "the argument": lambda model, x: marked(x) * 2,
    "the argument by another way": lambda model, x: marked(x.to(x.dtype)) * 2,
    "returned": lambda model, x: marked(x * 2),
    "a view of the argument is returned": lambda model, x: (marked(x[:]), x * 2),
    "kept": lambda model, x: setattr(model, "kept", marked(x * 2)) or x * 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_seen_from_outside_is_refused(name: str) -> None:
    model = nn.Module()
    call, _ = guarded(lambda x: REFUSED[name](model, x))
    with pytest.raises(RefusedError):
        call(torch.ones(2))


def test_what_requires_a_gradient_already() -> None:
    weight = nn.Parameter(torch.ones(2))
    call, runner = guarded(lambda x: marked(weight * x) * 2 if (weight * x).requires_grad else x)
    try:
        found = call(torch.ones(2))
    except RefusedError:
        return  # it is no leaf
    assert found.requires_grad
    assert len(runner.graphs) == 1
