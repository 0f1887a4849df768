"""Every learning-rate scheduler of torch steers a replayed step as it steers an eager one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import kitsune
from tests.kitsune.training import FORMS, Net, Training, adam, compare, sgd

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.8),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.3),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.2, total_iters=4),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 6, power=2.0),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.StepLR(optimizer, 2)], [3]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4)]
    ),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.001, anneal_epochs=4),
}


def advance(training: Training, make: Make, index: int) -> None:
    if index == 0:
        training.memo["scheduler"] = make(training.optimizer)
        return
    scheduler = training.memo["scheduler"]
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step((1.0, 0.5, 0.6, 0.7, 0.4)[index % 5])
    else:
        scheduler.step()


def test_no_scheduler_is_left_out() -> None:
    present = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert present - {"LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


@pytest.mark.support("Hyperparameters", "every scheduler of torch.optim.lr_scheduler", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_scheduler_steers_sgd(form: str, name: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, sgd(model)

    cycles_momentum = name in ("CyclicLR", "OneCycleLR")
    compare(
        form,
        build,
        steps=10,
        edit=lambda training, index: advance(training, SCHEDULERS[name], index),
        replays=6 if cycles_momentum else None,
        rtol=2e-6 if cycles_momentum else 0,
        atol=1e-6 if cycles_momentum else 0,
    )


@pytest.mark.usefixtures("short_way")
@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("form", FORMS)
def test_one_cycle_steers_the_betas_of_adam(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, adam(model)

    training = compare(
        form,
        build,
        steps=12,
        edit=lambda training, index: advance(training, SCHEDULERS["OneCycleLR"], index),
        replays=8,
        rtol=2e-5,
        atol=2e-6,
    )
    assert training.status().mode == "replay"


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_scheduler_of_an_optimizer_that_a_train_step_took_over() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, adam(model)

    eager_model, eager_optimizer = build()
    model, plain = build()
    model.load_state_dict(eager_model.state_dict())
    wrapped = kitsune.KitsuneOptimizer(plain, mode="replay")
    eager = Training("eager", eager_model, eager_optimizer)
    training = Training("train_step", model, wrapped)
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (eager_optimizer, wrapped)]
    for index in range(6):
        assert eager.run(1, start=index) == training.run(1, start=index)
        for scheduler in schedulers:
            scheduler.step()
    assert wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.05 * 0.5**6
