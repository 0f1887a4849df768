"""Loops that differentiate gradients (`create_graph`): penalties, inner steps, products with the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, grad
from torch.func import functional_call
from torch.nn import functional

import kitsune
from kitsune.loop import drop_in, following
from tests.kitsune.training import Build, Training, adam, batch, compare

Loss = Callable[[Training, Tensor, Tensor], Tensor]


class Smooth(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


class Squared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 * ctx.saved_tensors[0]


def smooth(dropout: float = 0.0) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Smooth(dropout=dropout).double()
        return model, adam(model)

    return build


def params(training: Training) -> list[nn.Parameter]:
    return list(training.model.parameters())


def squares(gradients: Any) -> Tensor:
    return sum(one.square().sum() for one in gradients)


def input_penalty(training: Training, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = training.model(x)
    (gradient,) = grad(output.sum(), x, create_graph=True)
    return functional.cross_entropy(output, y) + (gradient.norm(dim=1) - 1).square().mean()


def interpolated_penalty(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Calls that are not differentiated come first, as in a WGAN-GP."""
    real, fake = training.model(x), training.model(x.roll(1, 0) * 2)
    between = (x * 0.3 + x.flip(0) * 0.7).requires_grad_()
    output = training.model(between)
    (gradient,) = grad(output, between, torch.ones_like(output), create_graph=True)
    return fake.mean() - real.mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


def parameter_penalty(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(training.model(x), y)
    return loss + squares(grad(loss, params(training), create_graph=True))


def inner_step(training: Training, x: Tensor, y: Tensor) -> Tensor:
    named = dict(training.model.named_parameters())
    inner = functional.cross_entropy(training.model(x), y)
    steps = grad(inner, list(named.values()), create_graph=True)
    fast = {name: param - 0.1 * step for (name, param), step in zip(named.items(), steps, strict=True)}
    return functional.cross_entropy(functional_call(training.model, fast, (x + 0.1,)), y)


def hessian_product(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(training.model(x), y)
    gradients = grad(loss, params(training), create_graph=True)
    products = sum((one * param.detach()).sum() for one, param in zip(gradients, params(training), strict=True))
    return loss + 0.01 * squares(grad(products, params(training), create_graph=True))


def backward_with_graph(training: Training, x: Tensor, y: Tensor) -> Tensor:
    functional.cross_entropy(training.model(x), y).backward(create_graph=True)
    gradients = [param.grad for param in params(training)]
    training.optimizer.zero_grad()
    return functional.cross_entropy(training.model(x), y) + squares(gradients)


LOSSES: dict[str, Loss] = {
    "input_penalty": input_penalty,
    "interpolated_penalty": interpolated_penalty,
    "parameter_penalty": parameter_penalty,
    "inner_step": inner_step,
    "hessian_product": hessian_product,
    "backward_with_graph": backward_with_graph,
}


def looping(loss_of: Loss, begin: int = 0) -> Callable[..., Tensor]:
    """A loop in which `loss_of` makes the loss from the step `begin` on, and cross entropy before."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        is_plain = count <= begin
        loss = functional.cross_entropy(training.model(x), y) if is_plain else loss_of(training, x, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    return loop


def doubles(index: int) -> Any:
    return batch(index, dtype=torch.float64)


def alike(build: Build, loss_of: Loss, *, begin: int = 0, steps: int = 5, **options: Any) -> Training:
    loop = looping(loss_of, begin)
    options = {"replays": 0, "rtol": 1e-9, "atol": 1e-11, **options}
    return compare("drop_in", build, loop=loop, steps=steps, batches=doubles, **options)


pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


@pytest.mark.support("Gradients", "gradients of gradients: penalties, inner steps", "plain PyTorch, with a reason")
@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_gradients(name: str, defer_loss: bool) -> None:
    alike(smooth(), LOSSES[name], defer_loss=defer_loss)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_gradients_with_random_numbers(name: str) -> None:
    """A call that was replayed could not be repeated: none that is differentiated may be."""
    alike(smooth(0.5), LOSSES[name])


@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("name", ["parameter_penalty", "hessian_product", "backward_with_graph"])
def test_they_begin_when_the_model_is_replayed(name: str, defer_loss: bool) -> None:
    training = alike(smooth(), LOSSES[name], begin=4, steps=7, replays=2, defer_loss=defer_loss)
    assert "create_graph" in training.status().reason


def test_a_call_that_cannot_be_repeated_raises_once() -> None:
    training = Training("drop_in", *smooth(0.5)(), loop=looping(parameter_penalty, 3))
    training.run(3, doubles)
    with pytest.raises(kitsune.KitsuneError, match="cannot be repeated"):
        training.run(1, doubles, start=3)
    training.run(2, doubles, start=4)
    assert training.status().mode == "eager"


def test_a_step_whose_loss_is_differentiated_runs_as_plain_pytorch() -> None:
    def penalized(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        return loss + squares(grad(loss, list(model.parameters()), create_graph=True))

    expected = Training("eager", *seeded(smooth()), loop=looping(parameter_penalty))
    found = Training("train_step", *seeded(smooth()), step={"forward": penalized})
    assert found.run(4, doubles) == pytest.approx(expected.run(4, doubles), rel=1e-9)
    assert found.status().replays == 0


def seeded(build: Build) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    return build()


# Functions that are not followed, with `defer_loss`


def of_function(training: Training, x: Tensor) -> Tensor:
    return Squared.apply(training.model(x)).mean()


def of_function_and_sum(training: Training, x: Tensor) -> Tensor:
    output = training.model(x)
    return Squared.apply(output).mean() + output.sum()


def penalized(loss_of: Callable[[Training, Tensor], Tensor]) -> Loss:
    def loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
        one = loss_of(training, x)
        return one + squares(grad(one, params(training), create_graph=True))

    return loss


def penalized_backward(training: Training, x: Tensor, y: Tensor) -> Tensor:
    of_function(training, x).backward(create_graph=True)
    gradients = [param.grad for param in params(training)]
    training.optimizer.zero_grad()
    return squares(gradients)


def summed(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Gradients that are asked for where some may be missing."""
    loss = of_function_and_sum(training, x)
    found = grad(loss, params(training), retain_graph=True, allow_unused=True)
    assert None not in found
    return loss * (1 + sum(float(one.sum()) for one in found))


DETOURS: dict[str, Loss] = {
    "grad": penalized(of_function),
    "grad, by two ways": penalized(of_function_and_sum),
    "backward": penalized_backward,
    "allow_unused": summed,
}


@pytest.mark.parametrize("name", DETOURS)
def test_a_function_of_an_output_without_a_value(name: str) -> None:
    alike(smooth(), DETOURS[name], begin=6, steps=9, replays=4, defer_loss=True)


def test_gradients_for_some_inputs_alone_are_refused() -> None:
    training = Training("drop_in", *smooth()(), loop=looping(LOSSES["parameter_penalty"], 6), defer_loss=True)
    training.run(6, doubles)
    (x, _), _ = doubles(6)
    with pytest.raises(kitsune.KitsuneError, match="leave inputs out"):
        of_function(training, x).backward(inputs=params(training))


# Each mend, taken back


def test_without_going_on_from_detours_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "go_on_from_detours", lambda: None)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd.graph._engine_run_backward)
    with pytest.raises(AssertionError):
        alike(smooth(), DETOURS["grad, by two ways"], begin=6, steps=9, defer_loss=True)


def test_without_a_look_at_the_first_call_the_next_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_in, "watch_first_backward", lambda *_: nullcontext())
    with pytest.raises(kitsune.KitsuneError, match="cannot be repeated"):
        alike(smooth(0.5), LOSSES["backward_with_graph"])
