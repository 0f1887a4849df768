"""The status of a training is found by whatever of it is at hand."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import kitsune
from tests.kitsune.training import Net, adam, batch


class Prepared(torch.optim.Optimizer):
    """As libraries wrap optimizers; it passes nothing on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def wrapped(model: nn.Module) -> kitsune.KitsuneOptimizer:
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay")
    for index in range(4):
        (x, y), _ = batch(index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def test_of_a_loop() -> None:
    model = Net()
    optimizer = wrapped(model)
    expected = optimizer.status()
    assert expected.replays == 2
    for given in (optimizer, model, model.first, optimizer.wrapped, Prepared(optimizer), Prepared(Prepared(optimizer))):
        assert kitsune.status(given) == expected, type(given)


def test_of_a_step() -> None:
    model, (x, y) = Net(), batch(0)[0]
    optimizer = adam(model)
    step = kitsune.TrainStep(model, nn.functional.cross_entropy, optimizer, mode="replay")
    for _ in range(3):
        step(x, y)
    for given in (step, model, optimizer):
        assert kitsune.status(given) == step.status()
        assert kitsune.status(given).replays == 2


def test_of_several_the_last_one_is_meant() -> None:
    model = Net()
    _first, last = wrapped(model), kitsune.KitsuneOptimizer(adam(model), mode="eager")
    assert kitsune.status(model) == last.status()
    assert "mode='eager'" in kitsune.status(model).reason


def test_what_was_handed_over_is_no_more() -> None:
    model = Net()
    optimizer = wrapped(model)
    optimizer.hand_over()
    with pytest.raises(kitsune.KitsuneError, match="nothing of Kitsune's trains this Net: wrap its optimizer first"):
        kitsune.status(model)
    assert "handed over" in kitsune.status(optimizer).reason


@pytest.mark.parametrize("given", [adam(Net()), Net(), Prepared(adam(Net()))], ids=lambda one: type(one).__name__)
def test_what_kitsune_does_not_train(given: Any) -> None:
    with pytest.raises(kitsune.KitsuneError, match=rf"trains this {type(given).__name__}: wrap its optimizer first"):
        kitsune.status(given)


@pytest.mark.parametrize("given", [None, 3, "model", [Net()]])
def test_what_is_no_training(given: Any) -> None:
    with pytest.raises(TypeError, match=f"got an object of type {type(given).__name__}"):
        kitsune.status(given)


@pytest.mark.support("Libraries", "`kitsune.status(...)` after `accelerator.prepare(...)`", "replayed")
@pytest.mark.filterwarnings("ignore")  # of the library's own
def test_after_accelerate_has_prepared_it() -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, kitsune.KitsuneOptimizer(adam(model), mode="replay"))
    for index in range(4):
        (x, y), _ = batch(index)
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    assert kitsune.status(optimizer).replays == 2


def test_it_is_printed_where_a_console_shows_it() -> None:
    optimizer = wrapped(Net())
    assert repr(optimizer.status()) == str(optimizer.status())
    assert repr(kitsune.Verification(False, reason="because")) == "nothing was compared: because"
