"""Transforms of `torch.func` in a model, over functions that have rules of their own and over those that have none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap

from kitsune.capture import frontend
from tests.kitsune.capture.test_autograd_functions import Forward, Parts, alike, built, differs, reasons


class Rounded(Function):
    """A straight-through estimator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 1.5


class RoundedOverBatches(Rounded):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return RoundedOverBatches.apply(x), in_dims[0]


Rule = Callable[[Tensor], Tensor]
Transform = Callable[[Rule, Parts, Tensor], Tensor]


def scalar(rule: Rule) -> Callable[[Tensor], Tensor]:
    return lambda x: (rule(x) * x).sum()


def dual(rule: Rule, parts: Parts, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(rule(forward_ad.make_dual(x, x * 2)))
        return primal + tangent


def pulled_back(rule: Rule, parts: Parts, x: Tensor) -> Tensor:
    output, back = vjp(rule, x)
    return back(output * 2)[0]


TRANSFORMS: dict[str, Transform] = {
    "grad": lambda rule, parts, x: grad(scalar(rule))(x),
    "grad_and_value": lambda rule, parts, x: sum(grad_and_value(scalar(rule))(x)),
    "vjp": pulled_back,
    "jvp": lambda rule, parts, x: sum(jvp(rule, (x,), (x * 2,))),
    "vmap": lambda rule, parts, x: vmap(rule)(x),
    "vmap of grad": lambda rule, parts, x: vmap(grad(scalar(rule)))(x),
    "jacrev": lambda rule, parts, x: x + jacrev(lambda z: rule(z).sum(0))(x).sum((0, 1)),
    "jacfwd": lambda rule, parts, x: x + jacfwd(lambda z: rule(z).sum(0))(x).sum((0, 1)),
    "grad of grad": lambda rule, parts, x: grad(lambda z: grad(scalar(rule))(z).square().sum())(x),
    "forward mode": dual,
    "torch.autograd.grad": lambda rule, parts, x: x + torch.autograd.grad(rule(x).sum(), x, create_graph=True)[0],
}


def transformed(transform: Transform, rule: Rule) -> Forward:
    return lambda parts, x: parts.last(transform(rule, parts, parts.first(x)))


@pytest.mark.support("Gradients", "an `autograd.Function` within `torch.func`", "plain PyTorch, with a reason")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("function", [Rounded, RoundedOverBatches])
def test_functions_with_rules_of_their_own(name: str, function: Any) -> None:
    training = alike("drop_in", built(transformed(TRANSFORMS[name], function.apply)), steps=4, replays=0)
    assert training.status().replays == 0
    assert reasons(training)


def test_the_reason_names_the_function_and_the_transform() -> None:
    training = alike("drop_in", built(transformed(TRANSFORMS["grad"], Rounded.apply)), steps=4, replays=0)
    assert "test_transforms.Rounded is called within a transform of torch.func" in reasons(training)


def test_a_step_with_a_function_in_a_transform() -> None:
    alike("train_step", built(transformed(TRANSFORMS["grad"], Rounded.apply)), steps=4, replays=0)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x.cos()
    return x.sin() * factor


def hooked(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda gradient: gradient * 1.5)
    return y.sin()


RULES: dict[str, Rule] = {
    "detach": lambda x: x + (x.round() - x).detach(),
    "detach, in place": lambda x: x.clone().add_((x.round() - x).detach()),
    "no_grad": without_gradient,
    "where": lambda x: torch.where(x > 0, x.sin(), x.detach() * 2),
    ".data": lambda x: x + (x.round() - x).data,
    "requires_grad is asked": lambda x: x.sin() * (2 if x.requires_grad else 3),
    "in place": lambda x: (x * 1).sin_().mul_(2),
}


@pytest.mark.support("Gradients", "transforms of `torch.func` with `detach` and `no_grad`", "replayed")
@pytest.mark.parametrize("transform", ["grad", "vjp"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_that_torch_knows(transform: str, rule: str) -> None:
    alike("drop_in", built(transformed(TRANSFORMS[transform], RULES[rule])), steps=4)


@pytest.mark.support("Gradients", "a hook of a tensor within `torch.func`", "plain PyTorch, with a reason")
@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_a_hook_within_a_transform(transform: str) -> None:
    training = alike("drop_in", built(transformed(TRANSFORMS[transform], hooked)), steps=4, replays=0)
    assert "a hook is put on a tensor within a transform of torch.func" in reasons(training)


def test_gradients_of_a_functional_call() -> None:
    def forward(parts: Parts, x: Tensor) -> Tensor:
        h = parts.first(x)
        params = dict(parts.other.named_parameters())
        found = grad(lambda given: functional_call(parts.other, given, (h,)).square().sum())(params)
        return parts.last(h + found["weight"].sum(0))

    alike("drop_in", built(forward), steps=4)


def test_without_requires_grad_as_it_is_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend.transforms, "requires_grad_asked", nullcontext)
    assert differs(built(transformed(TRANSFORMS["grad"], RULES["requires_grad is asked"])))


def test_without_calls_of_the_functions_themselves_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend.autograd_functions, "called_themselves", lambda _called: nullcontext())
    assert differs(built(transformed(TRANSFORMS["grad"], Rounded.apply)))
