"""The update rules against `torch.optim`, in both forms, over their hyperparameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kitsune.capture.state import Binding
from kitsune.capture.update_rules import AdamRule, SGDRule, rule_for
from kitsune.errors import Refusal, RefusedError

SHAPES = ((3, 2), (5,), (), (1, 4, 2))


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(params: list[nn.Parameter], step: int) -> list[Tensor]:
    """Gradients of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(1000 + step)
    grads = []
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 10.0 ** (index - 2)
        grads.append((grad * (torch.rand(param.shape, generator=generator) > 0.2)).to(param.dtype))
    return grads


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def step_by_torch(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], step: int) -> None:
    for param, grad in zip(params, gradients(params, step), strict=True):
        param.grad = grad
    optimizer.step()


def step_by_rule(binding: Binding, params: list[nn.Parameter], step: int) -> None:
    assert binding.refresh() is None
    with torch.no_grad():
        binding.update([param.detach() for param in params], gradients(params, step), binding.inputs())
    binding.advance()


def results(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> dict[str, Tensor]:
    values = {f"parameter {index}": param.detach().double() for index, param in enumerate(params)}
    for index, param in enumerate(params):
        for name, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                values[f"{name} {index}"] = value.double()
    return values


def run(make: Make, dtype: torch.dtype, steps: int, *, rule: bool = False, composed: bool = False) -> dict[str, Tensor]:
    """The state after some steps, the first by torch, the others by torch or by the rule."""
    params = parameters(dtype)
    optimizer = make(params)
    step_by_torch(optimizer, params, 0)
    binding = Binding(optimizer, params, composed=composed) if rule else None
    if binding is not None:
        assert binding.style == ("composed" if composed else "fused")
    for step in range(1, steps):
        if binding is None:
            step_by_torch(optimizer, params, step)
        else:
            step_by_rule(binding, params, step)
    return results(optimizer, params)


rates = st.sampled_from([0.0, 1e-3, 0.1, 1.0])
decays = st.sampled_from([0.0, 1e-2, 0.5])


@st.composite
def adams(draw: st.DrawFn) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    kind = draw(st.sampled_from([torch.optim.Adam, torch.optim.AdamW]))
    options = {
        "lr": draw(rates),
        "betas": (draw(st.sampled_from([0.0, 0.5, 0.9])), draw(st.sampled_from([0.0, 0.9, 0.999]))),
        "eps": draw(st.sampled_from([1e-8, 1e-3, 1.0])),
        "weight_decay": draw(decays),
        "amsgrad": draw(st.booleans()),
        "maximize": draw(st.booleans()),
    }
    if kind is torch.optim.Adam:
        options["decoupled_weight_decay"] = draw(st.booleans())
    return kind, options


@st.composite
def sgds(draw: st.DrawFn) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.99]))
    nesterov = momentum > 0 and draw(st.booleans())
    return torch.optim.SGD, {
        "lr": draw(rates),
        "momentum": momentum,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
        "weight_decay": draw(decays),
        "nesterov": nesterov,
        "maximize": draw(st.booleans()),
    }


kinds = st.one_of(adams(), sgds())


def maker(kind: type[torch.optim.Optimizer], options: dict[str, Any], **more: Any) -> Make:
    return lambda params: kind(params, **options, **more)  # type: ignore[call-arg]


@given(kinds)
def test_the_composed_form_in_double_precision(chosen: tuple[type[torch.optim.Optimizer], dict[str, Any]]) -> None:
    make = maker(*chosen, foreach=False)
    expected = run(make, torch.float64, 5)
    found = run(make, torch.float64, 5, rule=True, composed=True)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@given(kinds)
def test_the_fused_form_is_torchs_own(chosen: tuple[type[torch.optim.Optimizer], dict[str, Any]]) -> None:
    make = maker(*chosen, fused=True)
    expected = run(make, torch.float32, 5)
    found = run(make, torch.float32, 5, rule=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@given(kinds, st.booleans())
def test_both_forms_are_as_accurate_as_eager(
    chosen: tuple[type[torch.optim.Optimizer], dict[str, Any]], composed: bool
) -> None:
    exact = run(maker(*chosen, foreach=False), torch.float64, 3)
    eager = run(maker(*chosen), torch.float32, 3)
    found = run(maker(*chosen), torch.float32, 3, rule=True, composed=composed)
    for name, value in exact.items():
        unit = torch.finfo(torch.float32).eps * max(value.abs().max().item(), 1e-30)
        error, allowed = (found[name] - value).abs().max(), (eager[name] - value).abs().max()
        assert error <= 2 * allowed + 2 * unit, name


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("composed", [False, True])
def test_groups_keep_their_own_options(kind: type[torch.optim.Optimizer], composed: bool) -> None:
    dtype = torch.float64 if composed else torch.float32

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.3},
            {"params": params[2:3], "lr": 0.01},
            {"params": params[3:], "lr": 1.0, "maximize": True},
        ]
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return kind(groups, fused=not composed, **more)  # type: ignore[call-arg]

    expected = run(make, dtype, 6)
    found = run(make, dtype, 6, rule=True, composed=composed)
    torch.testing.assert_close(found, expected, rtol=1e-12 if composed else 0, atol=1e-14 if composed else 0)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(["lr", "betas", "eps", "weight_decay"]), st.integers(1, 9)), max_size=6))
def test_the_composed_form_follows_hyperparameters(changes: list[tuple[str, int]]) -> None:
    """Every hyperparameter is read anew at each step."""
    outcomes = []
    for rule in (False, True):
        params = parameters(torch.float64)
        optimizer = torch.optim.Adam(params, lr=0.1, weight_decay=0.1, foreach=False)
        step_by_torch(optimizer, params, 0)
        binding = Binding(optimizer, params, composed=True)
        for step, (name, tenths) in enumerate(changes, 1):
            value: Any = tenths / 10
            optimizer.param_groups[0][name] = (value, 1 - value / 10) if name == "betas" else value
            if rule:
                step_by_rule(binding, params, step)
            else:
                step_by_torch(optimizer, params, step)
        outcomes.append(results(optimizer, params))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("inf", [0.0, 1.0])
def test_an_overflow_skips_the_fused_update(kind: type[torch.optim.Optimizer], inf: float) -> None:
    params = parameters(torch.float32)
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(params, lr=0.1, **more)  # type: ignore[call-arg]
    step_by_torch(optimizer, params, 0)
    before = copy.deepcopy(results(optimizer, params))
    binding = Binding(optimizer, params, found_inf=torch.tensor(inf))
    with torch.no_grad():
        binding.update([param.detach() for param in params], gradients(params, 1), binding.inputs())
    after = results(optimizer, params)
    for name, value in before.items():
        assert torch.equal(after[name], value) == bool(inf), name


@pytest.mark.parametrize("composed", [False, True])
def test_gradients_stay_as_they_are(composed: bool) -> None:
    for make in (
        maker(torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
        maker(torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    ):
        params = parameters(torch.float32)
        optimizer = make(params)
        step_by_torch(optimizer, params, 0)
        binding = Binding(optimizer, params, composed=composed)
        grads = gradients(params, 1)
        kept = [grad.clone() for grad in grads]
        with torch.no_grad():
            binding.update([param.detach() for param in params], grads, binding.inputs())
        assert all(torch.equal(*pair) for pair in zip(grads, kept, strict=True))


def test_every_rule_has_its_optimizer() -> None:
    params = parameters(torch.float32)
    assert isinstance(rule_for(torch.optim.Adam(params)), AdamRule)
    assert isinstance(rule_for(torch.optim.AdamW(params)), AdamRule)
    assert isinstance(rule_for(torch.optim.SGD(params)), SGDRule)


def test_optimizers_without_a_rule() -> None:
    class Mine(torch.optim.Adam):
        pass

    params = parameters(torch.float32)
    for optimizer in (Mine(params), torch.optim.RMSprop(params)):
        refusal = rule_for(optimizer)
        assert isinstance(refusal, Refusal)
        assert type(optimizer).__name__ in refusal.reason
        assert "Adam, AdamW, SGD" in refusal.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sgd_on_the_cpu_is_refused(dtype: torch.dtype) -> None:
    """torch's fused SGD is wrong there, and the composed form is for float32 and float64."""
    param = nn.Parameter(torch.linspace(-1, 1, 64).to(dtype))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RefusedError, match="no captured update"):
        Binding(optimizer, [param])
