"""Gradient scaling: the scale's course and the skipped updates are those of the same loop in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kitsune.test_step import by_hand
from tests.kitsune.training import FORMS, Batch, Net, Training, adam, batch, compare, sgd

OVERFLOWS = (2, 5, 6, 11)


def batches_with_overflows(index: int) -> Batch:
    (x, y), _ = batch(index)
    if index in OVERFLOWS:
        x[0, 0] = float("inf")
    return (x, y), {}


def grad_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})


def loop_with_scaler(training: Training, x: Tensor, y: Tensor) -> Tensor:
    scaler = training.memo["scaler"]
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(x), y)
    scaler.scale(loss).backward()
    if training.memo.get("clip"):
        scaler.unscale_(training.optimizer)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.memo["clip"])
    scaler.step(training.optimizer)
    scaler.update()
    return loss.detach()


Edit = Callable[[Training, int, torch.amp.GradScaler], None]


def compare_scaled(
    form: str,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    steps: int = 14,
    edit: Edit | None = None,
    step: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Training:
    """Compares the training and the course of the scale, with infinities at the steps `OVERFLOWS`."""
    scalers: dict[str, torch.amp.GradScaler] = {}
    courses: dict[str, list[tuple[float, int]]] = {"eager": [], form: []}

    def scaler(kind: str) -> torch.amp.GradScaler:
        return scalers.setdefault(kind, grad_scaler(**options or {}))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, make(model)

    def observe(training: Training, index: int) -> None:
        own = training.memo["scaler"] = scaler(training.form)
        if step and "clip_grad_norm" in step:
            training.memo["clip"] = step["clip_grad_norm"]
        if edit is not None:
            edit(training, index, own)
        courses[training.form].append((own.get_scale(), own._get_growth_tracker()))

    if form == "train_step":
        whole = {**(step or {}), "grad_scaler": scaler(form)}
        arguments["step"] = whole
        arguments["reference"] = {"loop": by_hand(**{**whole, "grad_scaler": scaler("eager")})}
    else:
        arguments["loop"] = loop_with_scaler
    # A fused optimizer under a scaler unscales gradients itself, but not those of a step that it skips.
    arguments = {"replays": 8, "gradients": False, **arguments}
    training = compare(form, build, steps=steps, batches=batches_with_overflows, edit=observe, **arguments)
    assert courses[form] == courses["eager"]
    assert len({scale for scale, _ in courses[form]}) > 2, "the scale did not move"
    return training


@pytest.mark.support("Precision", "GradScaler, with skipped updates", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    "make", [adam, sgd, lambda model: adam(model, fused=None)], ids=["fused adam", "fused sgd", "adam"]
)
@pytest.mark.parametrize("form", FORMS)
def test_the_scale_and_the_skipped_updates(form: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    compare_scaled(form, make=make, rtol=1e-5, atol=1e-6)


@pytest.mark.support(
    "Precision",
    "GradScaler over 1,000 steps with infinities: the same course of the scale",
    "replayed",
)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_steps(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kitsune.test_scaling.OVERFLOWS", (*range(2, 1000, 37), *range(500, 503)))
    compare_scaled(form, steps=1000, replays=950, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_scaling_and_clipping(form: str) -> None:
    compare_scaled(form, step={"clip_grad_norm": 0.05}, rtol=1e-5, atol=1e-6)


def test_scaling_and_accumulation() -> None:
    compare_scaled("train_step", step={"accumulate": 2}, steps=28, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_beside_a_scaler(form: str) -> None:
    def edit(training: Training, index: int, scaler: torch.amp.GradScaler) -> None:
        training.optimizer.param_groups[0]["lr"] *= 0.9

    compare_scaled(form, edit=edit, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("change", ["growth_interval", "growth_factor", "backoff_factor", "scale", "state"])
@pytest.mark.parametrize("form", FORMS)
def test_the_scaler_is_changed_in_mid_training(form: str, change: str) -> None:
    def edit(training: Training, index: int, scaler: torch.amp.GradScaler) -> None:
        if index != 4:
            return
        if change == "growth_interval":
            scaler.set_growth_interval(1)
        elif change == "growth_factor":
            scaler.set_growth_factor(4.0)
        elif change == "backoff_factor":
            scaler.set_backoff_factor(0.25)
        elif change == "scale":
            scaler.update(64.0)
        else:
            state = {"scale": 32.0, "growth_factor": 3.0, "backoff_factor": 0.1, "growth_interval": 2}
            scaler.load_state_dict({**state, "_growth_tracker": 1})

    compare_scaled(form, edit=edit, rtol=1e-5, atol=1e-6, replays=6)


@pytest.mark.parametrize("form", FORMS)
def test_a_scaler_with_other_hyperparameters_changing(form: str) -> None:
    """Betas that change need the composed update, which is captured once more."""

    def edit(training: Training, index: int, scaler: torch.amp.GradScaler) -> None:
        if index == 4:
            training.optimizer.param_groups[0]["betas"] = (0.5, 0.7)

    compare_scaled(form, edit=edit, replays=12, rtol=1e-5, atol=1e-6)


def test_a_disabled_scaler_is_none() -> None:
    training = compare(
        "train_step", step={"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)}, reference={}, steps=6
    )
    assert training.status().mode == "replay"


def test_a_scaler_of_the_users_that_unscales_by_hand_in_the_loop() -> None:
    """Two optimizers under one scaler, one of them plain."""

    def run(form: str) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        model, other = Net(), nn.Linear(3, 3)
        training = Training(form, model, adam(model))
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        scaler = grad_scaler()
        losses = []
        for index in range(10):
            (x, y), _ = batches_with_overflows(index)
            training.optimizer.zero_grad()
            plain.zero_grad()
            loss = training.loss_fn(other(training.model(x)), y)
            scaler.scale(loss).backward()
            scaler.unscale_(training.optimizer)
            scaler.step(training.optimizer)
            scaler.step(plain)
            scaler.update()
            losses.append((loss.item(), scaler.get_scale()))
        if form != "eager":
            assert training.status().replays >= 7
        return losses

    torch.testing.assert_close(torch.tensor(run("drop_in")), torch.tensor(run("eager")), equal_nan=True)


@pytest.mark.support("Precision", "enable_amp in float16 without a scaler: `TrainStep` makes one", "replayed")
def test_a_step_in_float16_brings_its_own_scaler() -> None:
    """Its scale takes the course that one of torch's takes in the same loop, and so does the training."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        scaler = training.memo.setdefault("scaler", torch.amp.GradScaler("cpu"))
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = training.loss_fn(training.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        courses[training.form].append(scaler.get_scale())
        return loss.detach()

    def edit(training: Training, index: int) -> None:
        if index and training.train_step is not None:
            assert training.train_step.grad_scaler is not None
            courses["train_step"].append(training.train_step.grad_scaler.get_scale())

    courses: dict[str, list[float]] = {"eager": [], "train_step": []}
    options = {"enable_amp": True, "amp_dtype": torch.float16}
    training = compare(
        "train_step",
        loop=loop,
        edit=edit,
        batches=batches_with_overflows,
        steps=14,
        reference={"loop": loop},
        **options,
    )
    edit(training, 14)
    assert courses["train_step"] == courses["eager"]
    assert courses["eager"][-1] == 2.0**16 / 2 ** len(OVERFLOWS)
    assert training.status().replays >= 12
