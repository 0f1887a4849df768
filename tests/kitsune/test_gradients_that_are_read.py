"""The model, a hook or the loss function looks at `.grad`, and finds there what it finds in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from tests.kitsune.training import Net, adam, batch

_STEPS = 6


def absent(weight: Tensor) -> Any:
    return 2.0 if weight.grad is None else 1.0


def norm(weight: Tensor) -> Any:
    return 1.0 if weight.grad is None else 1.0 + weight.grad.norm()


def by_name(weight: Tensor) -> Any:
    return 2.0 if getattr(weight, "grad", None) is None else 1.0


READS = [absent, norm, by_name]
PLACES = ["forward", "hook", "loss"]


class Looking(Net):
    """Scales its output by what a function makes of its first weight."""

    def __init__(self, read: Callable[[Tensor], Any], place: str) -> None:
        super().__init__()
        self.read, self.place = read, place
        if place == "hook":
            self.register_forward_hook(lambda module, _args, output: output * read(module.first.weight))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * self.read(self.first.weight) if self.place == "forward" else output

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(output, y)
        return loss * self.read(self.first.weight) if self.place == "loss" else loss


def seen(model: nn.Module, losses: list[Tensor], *, with_gradients: bool) -> list[Any]:
    found: list[Any] = [float(loss) for loss in losses]
    found += [param.detach().clone() for param in model.parameters()]
    if with_gradients:
        found += [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    return found


def assert_alike(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        for mine, theirs in zip(one, other, strict=True):
            if mine is None or theirs is None:
                assert mine is theirs, f"step {index}"
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, i=index: f"step {i}: {m}")


def model_and_optimizer(read: Callable[[Tensor], Any], place: str) -> tuple[Looking, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Looking(read, place)
    return model, adam(model, lr=0.01)


def plain(read: Callable[[Tensor], Any], place: str, *, accumulate: int, keep_grads: bool) -> list[list[Any]]:
    """As `TrainStep` documents it."""
    model, optimizer = model_and_optimizer(read, place)
    found = []
    for index in range(_STEPS):
        optimizer.zero_grad()
        losses = []
        for part in range(accumulate):
            (x, y), _ = batch(index * accumulate + part)
            loss = model.loss(model(x), y)
            (loss / accumulate).backward()
            losses.append(loss.detach())
        optimizer.step()
        found.append(seen(model, losses, with_gradients=keep_grads))
    return found


@pytest.mark.support(
    "Gradients", "the model, a hook or the loss looks at `.grad`, with `keep_grads` and without", "replayed"
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("read", READS)
def test_in_a_step(read: Callable[[Tensor], Any], place: str, keep_grads: bool, accumulate: int) -> None:
    model, optimizer = model_and_optimizer(read, place)
    step = kitsune.TrainStep(model, model.loss, optimizer, mode="replay", keep_grads=keep_grads, accumulate=accumulate)
    found = []
    for index in range(_STEPS):
        batches = [batch(index * accumulate + part)[0] for part in range(accumulate)]
        found.append(seen(model, [step(x, y) for x, y in batches], with_gradients=keep_grads))
    assert_alike(found, plain(read, place, accumulate=accumulate, keep_grads=keep_grads))
    assert accumulate > 1 or step.status().replays == _STEPS - 1, step.status()


@pytest.mark.parametrize("read", READS)
def test_the_loop_leaves_gradients_before_a_step(read: Callable[[Tensor], Any]) -> None:
    """Which are discarded before the model can see them."""
    model, optimizer = model_and_optimizer(read, "forward")
    step = kitsune.TrainStep(model, model.loss, optimizer, mode="replay")
    found = []
    for index in range(_STEPS):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        (x, y), _ = batch(index)
        found.append(seen(model, [step(x, y)], with_gradients=False))
    assert_alike(found, plain(read, "forward", accumulate=1, keep_grads=False))
    assert step.status().replays == _STEPS - 1, step.status()


def test_timing_a_step_leaves_gradients() -> None:
    model, optimizer = model_and_optimizer(absent, "forward")
    step = kitsune.TrainStep(model, model.loss, optimizer, mode="replay", keep_grads=True)
    for index in range(3):
        step(*batch(index)[0])
    before = [param.grad for param in model.parameters()]
    plan = step.plan(*batch(3)[0])
    assert plan is not None
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))


def test_a_sum_that_the_model_keeps_is_not_written_to() -> None:
    """Between the calls of an update."""

    class Keeping(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.first.weight.grad
            return super().forward(x)

    kept: dict[str, list[Any]] = {"plain": [], "step": []}
    for form in kept:
        torch.manual_seed(7)
        model = Keeping()
        optimizer = adam(model)
        step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay", accumulate=2)
        for index in range(4):
            if form == "plain":
                optimizer.zero_grad()
            for part in range(2):
                (x, y), _ = batch(index * 2 + part)
                if form == "step":
                    step(x, y)
                else:
                    (functional.cross_entropy(model(x), y) / 2).backward()
            if form == "plain":
                optimizer.step()
            kept[form].append([model.kept.clone()])
    assert_alike(kept["step"], kept["plain"])


@pytest.mark.support("Gradients", "the model, a hook or the loss looks at `.grad`, in a loop", "replayed")
@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("zeroing", ["to none", "in place", "every second step"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("read", [absent, norm])
def test_in_a_loop(read: Callable[[Tensor], Any], place: str, zeroing: str, defer_loss: bool) -> None:
    runs: list[list[list[Any]]] = []
    for is_plain in (True, False):
        model, optimizer = model_and_optimizer(read, place)
        loop: Any = optimizer
        if not is_plain:
            loop = kitsune.KitsuneOptimizer(optimizer, mode="replay", defer_loss=defer_loss)
        found = []
        for index in range(_STEPS):
            if zeroing != "every second step" or index % 2 == 0:
                loop.zero_grad(set_to_none=zeroing != "in place")
            (x, y), _ = batch(index)
            loss = model.loss(model(x), y)
            loss.backward()
            loop.step()
            found.append(seen(model, [loss.detach()], with_gradients=True))
        runs.append(found)
    assert_alike(runs[1], runs[0])
