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
from kitsune.capture.update_rules import (
    AdadeltaRule,
    AdagradRule,
    AdamaxRule,
    AdamRule,
    ASGDRule,
    NAdamRule,
    RAdamRule,
    RMSpropRule,
    RpropRule,
    Rule,
    SGDRule,
    rule_for,
)
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


Kind = type[torch.optim.Optimizer]
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


def run(
    make: Make, dtype: torch.dtype, steps: int, *, rule: bool = False, composed: bool = False, late: float | None = None
) -> dict[str, Tensor]:
    """The state after some steps, the first by torch, the others by torch or by the rule.

    Args:
        late: what the first parameter's step count is said to be after the first step; each next one's is three more.
    """
    params = parameters(dtype)
    optimizer = make(params)
    step_by_torch(optimizer, params, 0)
    if late is not None:
        for index, param in enumerate(params):
            optimizer.state[param]["step"].fill_(late + 3 * index)
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
def adams(draw: st.DrawFn) -> tuple[Kind, dict[str, Any]]:
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
def sgds(draw: st.DrawFn) -> tuple[Kind, dict[str, Any]]:
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


def fractions(*values: float) -> st.SearchStrategy[float]:
    return st.sampled_from(values)


betas = st.tuples(fractions(0.0, 0.5, 0.9), fractions(0.0, 0.9, 0.999))
epsilons = fractions(1e-8, 1e-3, 1.0)

OTHERS: dict[Kind, dict[str, st.SearchStrategy[Any]]] = {
    torch.optim.NAdam: {
        "betas": betas,
        "eps": epsilons,
        "weight_decay": decays,
        "decoupled_weight_decay": st.booleans(),
        "momentum_decay": fractions(0.0, 4e-3, 0.3),
    },
    torch.optim.RAdam: {
        "betas": betas,
        "eps": epsilons,
        "weight_decay": decays,
        "decoupled_weight_decay": st.booleans(),
    },
    torch.optim.Adamax: {"betas": betas, "eps": epsilons, "weight_decay": decays},
    torch.optim.Adagrad: {
        "lr_decay": fractions(0.0, 1e-2, 1.0),
        "eps": fractions(1e-10, 1e-3),
        "weight_decay": decays,
        "initial_accumulator_value": fractions(0.0, 0.1),
    },
    torch.optim.Adadelta: {"rho": fractions(0.0, 0.5, 0.9), "eps": fractions(1e-6, 1e-2), "weight_decay": decays},
    torch.optim.RMSprop: {
        "alpha": fractions(0.5, 0.9, 0.99),
        "eps": epsilons,
        "weight_decay": decays,
        "momentum": fractions(0.0, 0.9),
        "centered": st.booleans(),
    },
    torch.optim.Rprop: {
        "etas": st.tuples(fractions(0.3, 0.5), fractions(1.1, 1.2)),
        "step_sizes": st.tuples(fractions(1e-6, 1e-2), fractions(0.02, 50.0)),
    },
    torch.optim.ASGD: {
        "lambd": fractions(0.0, 1e-4, 0.1),
        "alpha": fractions(0.5, 0.75),
        "t0": fractions(0.0, 2.0, 3.5, 1e6),
        "weight_decay": decays,
    },
}
"""The options of the optimizers whose rules have no fused form, beside the learning rate and `maximize`."""


CHANGES: dict[Kind, dict[str, Any]] = {
    torch.optim.Adam: {"betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.4},
    torch.optim.AdamW: {"betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.4},
    torch.optim.SGD: {"momentum": 0.6, "dampening": 0.2, "weight_decay": 0.4},
    torch.optim.NAdam: {"betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.4, "momentum_decay": 0.1},
    torch.optim.RAdam: {"betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.4},
    torch.optim.Adamax: {"betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.4},
    torch.optim.Adagrad: {"lr_decay": 0.3, "eps": 1e-2, "weight_decay": 0.4},
    torch.optim.Adadelta: {"rho": 0.7, "eps": 1e-2, "weight_decay": 0.4},
    torch.optim.RMSprop: {"alpha": 0.7, "eps": 1e-2, "weight_decay": 0.4, "momentum": 0.6},
    torch.optim.Rprop: {"etas": (0.3, 1.4), "step_sizes": (1e-2, 0.2)},
    torch.optim.ASGD: {"lambd": 0.1, "alpha": 0.5, "t0": 1.0, "weight_decay": 0.4},
}
"""Other values than the defaults for every hyperparameter beside the learning rate."""


def options_of(kind: Kind) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"lr": rates, "maximize": st.booleans(), **OTHERS[kind]})


kinds = st.one_of(adams(), sgds())


def maker(kind: Kind, options: dict[str, Any], **more: Any) -> Make:
    return lambda params: kind(params, **options, **more)  # type: ignore[call-arg]


@given(kinds)
def test_the_composed_form_in_double_precision(chosen: tuple[Kind, dict[str, Any]]) -> None:
    make, late = maker(*chosen, foreach=False), None if chosen[0] is torch.optim.SGD else 2.0
    expected = run(make, torch.float64, 5, late=late)
    found = run(make, torch.float64, 5, rule=True, composed=True, late=late)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", OTHERS)
@given(data=st.data(), late=st.sampled_from([None, 1.0, 5.0, 1e4]))
def test_the_other_rules_in_double_precision(kind: Kind, data: st.DataObject, late: float | None) -> None:
    make = maker(kind, data.draw(options_of(kind)), foreach=False)
    expected = run(make, torch.float64, 5, late=late)
    found = run(make, torch.float64, 5, rule=True, composed=True, late=late)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@given(kinds)
def test_the_fused_form_is_torchs_own(chosen: tuple[Kind, dict[str, Any]]) -> None:
    make = maker(*chosen, fused=True)
    expected = run(make, torch.float32, 5)
    found = run(make, torch.float32, 5, rule=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_accuracy(make: Make, *, composed: bool, units: int) -> None:
    """Demands at most twice eager's error in float32, but for some units in the last place.

    Of a parameter that ends near zero, the last place is that of where it began.
    """
    began = {f"parameter {index}": param.abs().max().item() for index, param in enumerate(parameters(torch.float64))}
    exact = run(make, torch.float64, 3)
    eager = run(make, torch.float32, 3)
    found = run(make, torch.float32, 3, rule=True, composed=composed)
    for name, value in exact.items():
        unit = torch.finfo(torch.float32).eps * max(value.abs().max().item(), began.get(name, 0.0), 1e-30)
        error, allowed = (found[name] - value).abs().max(), (eager[name] - value).abs().max()
        assert error <= 2 * allowed + units * unit, name


@given(kinds, st.booleans())
def test_both_forms_are_as_accurate_as_eager(chosen: tuple[Kind, dict[str, Any]], composed: bool) -> None:
    check_accuracy(maker(*chosen), composed=composed, units=2)


@pytest.mark.parametrize("kind", OTHERS)
@given(data=st.data(), foreach=st.booleans())
def test_the_other_rules_are_as_accurate_as_eager(kind: Kind, data: st.DataObject, foreach: bool) -> None:
    check_accuracy(maker(kind, data.draw(options_of(kind)), foreach=foreach), composed=True, units=4)


@pytest.mark.parametrize(
    ("kind", "composed"),
    [(torch.optim.Adam, False), (torch.optim.SGD, False), *((kind, True) for kind in CHANGES)],
)
def test_groups_keep_their_own_options(kind: Kind, composed: bool) -> None:
    dtype = torch.float64 if composed else torch.float32

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        decay = {} if kind is torch.optim.Rprop else {"weight_decay": 0.3}
        groups = [
            {"params": params[:2], "lr": 0.1, **decay},
            {"params": params[2:3], "lr": 0.01, **CHANGES[kind]},
            {"params": params[3:], "lr": 1.0, "maximize": True},
        ]
        more = {"momentum": 0.9} if "momentum" in CHANGES[kind] else {}
        form = {"foreach": False} if composed else {"fused": True}
        return kind(groups, **form, **more)  # type: ignore[call-arg]

    expected = run(make, dtype, 6)
    found = run(make, dtype, 6, rule=True, composed=composed)
    torch.testing.assert_close(found, expected, rtol=1e-12 if composed else 0, atol=1e-14 if composed else 0)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(["lr", "betas", "eps", "weight_decay"]), st.integers(1, 9)), max_size=6))
def test_the_composed_form_follows_hyperparameters(changes: list[tuple[str, int]]) -> None:
    """Every hyperparameter is read anew at each step."""
    check_following(
        maker(torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "foreach": False}),
        [{name: (tenths / 10, 1 - tenths / 100) if name == "betas" else tenths / 10} for name, tenths in changes],
    )


@pytest.mark.parametrize("kind", CHANGES)
def test_every_rule_follows_its_hyperparameters(kind: Kind) -> None:
    """One after the other, and all together."""
    options = {"lr": 0.05} if kind is torch.optim.Rprop else {"lr": 0.1, "weight_decay": 0.1}
    if "momentum" in CHANGES[kind]:
        options["momentum"] = 0.9
    changes = [{"lr": 0.03}, *({name: value} for name, value in CHANGES[kind].items()), {}]
    together = {name: options[name] for name in options if name != "lr"} | {"lr": 0.07}
    check_following(maker(kind, {**options, "foreach": False}), [*changes, together])


def check_following(make: Make, changes: list[dict[str, Any]]) -> None:
    """Compares steps with torch's, before each of which options change, the kind of code staying the same."""
    outcomes = []
    for rule in (False, True):
        params = parameters(torch.float64)
        optimizer = make(params)
        step_by_torch(optimizer, params, 0)
        binding = Binding(optimizer, params, composed=True)
        for step, change in enumerate(changes, 1):
            optimizer.param_groups[0].update(change)
            if rule:
                step_by_rule(binding, params, step)
            else:
                step_by_torch(optimizer, params, step)
        outcomes.append(results(optimizer, params))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "composed"),
    [
        (torch.optim.Adam, False),
        (torch.optim.AdamW, False),
        (torch.optim.SGD, False),
        *((kind, True) for kind in CHANGES),
    ],
)
@pytest.mark.parametrize("inf", [0.0, 1.0])
def test_an_overflow_skips_the_update(kind: Kind, composed: bool, inf: float) -> None:
    params = parameters(torch.float32)
    more = {"momentum": 0.9} if "momentum" in CHANGES[kind] else {"t0": 0.0} if kind is torch.optim.ASGD else {}
    optimizer = kind(params, lr=0.1, **more)  # type: ignore[call-arg]
    step_by_torch(optimizer, params, 0)
    step_by_torch(optimizer, params, 1)
    before = copy.deepcopy(results(optimizer, params))
    binding = Binding(optimizer, params, composed=composed, found_inf=torch.tensor(inf))
    grads = gradients(params, 1)
    if inf:
        grads[0][0], grads[1][1] = torch.inf, torch.nan
    with torch.no_grad():
        binding.update([param.detach() for param in params], grads, binding.inputs())
    after = results(optimizer, params)
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert not changed if inf else changed >= {"parameter 0", "parameter 1"}


@pytest.mark.parametrize(
    ("kind", "composed"),
    [(torch.optim.Adam, False), (torch.optim.SGD, False), *((kind, True) for kind in CHANGES)],
)
def test_gradients_stay_as_they_are(kind: Kind, composed: bool) -> None:
    params = parameters(torch.float32)
    decay = {} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
    optimizer = kind(params, lr=0.1, maximize=True, **decay)  # type: ignore[call-arg]
    step_by_torch(optimizer, params, 0)
    binding = Binding(optimizer, params, composed=composed)
    grads = gradients(params, 1)
    kept = [grad.clone() for grad in grads]
    with torch.no_grad():
        binding.update([param.detach() for param in params], grads, binding.inputs())
    assert all(torch.equal(*pair) for pair in zip(grads, kept, strict=True))


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (torch.optim.Adam, AdamRule),
        (torch.optim.AdamW, AdamRule),
        (torch.optim.SGD, SGDRule),
        (torch.optim.NAdam, NAdamRule),
        (torch.optim.RAdam, RAdamRule),
        (torch.optim.Adamax, AdamaxRule),
        (torch.optim.Adagrad, AdagradRule),
        (torch.optim.Adadelta, AdadeltaRule),
        (torch.optim.RMSprop, RMSpropRule),
        (torch.optim.Rprop, RpropRule),
        (torch.optim.ASGD, ASGDRule),
    ],
)
def test_every_rule_has_its_optimizer(kind: Kind, rule: type[Rule]) -> None:
    assert isinstance(rule_for(kind(parameters(torch.float32), lr=0.1)), rule)  # type: ignore[call-arg]


def test_only_some_optimizers_have_no_rule() -> None:
    """So that one that a later torch brings is noticed."""
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    missing = kinds - {torch.optim.Optimizer} - CHANGES.keys()
    assert {kind.__name__ for kind in missing} == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def test_optimizers_without_a_rule() -> None:
    class Mine(torch.optim.Adam):
        pass

    params = parameters(torch.float32)
    for optimizer in (Mine(params), torch.optim.LBFGS(params), torch.optim.Adafactor(params)):
        refusal = rule_for(optimizer)
        assert isinstance(refusal, Refusal)
        assert type(optimizer).__name__ in refusal.reason
        assert "Adam, AdamW, SGD" in refusal.reason


@pytest.mark.parametrize("kind", CHANGES)
def test_what_no_rule_replays(kind: Kind) -> None:
    params = parameters(torch.float32)
    optimizer = kind(params, lr=0.1)  # type: ignore[call-arg]
    name, value = next(iter(CHANGES[kind].items()))
    number = value[0] if isinstance(value, tuple) else value
    tensor = torch.tensor(number)
    optimizer.param_groups[0][name] = (tensor, *value[1:]) if isinstance(value, tuple) else tensor
    refusal = rule_for(optimizer)
    assert isinstance(refusal, Refusal)
    assert "is a Tensor, not a number" in refusal.reason
    refusal = rule_for(kind(params, lr=0.1, differentiable=True))  # type: ignore[call-arg]
    assert isinstance(refusal, Refusal)
    assert "differentiable" in refusal.reason


def test_radam_divides_by_nothing_where_the_denominator_does_not_count() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.RAdam([param], eps=0.0, foreach=False)
    param.grad = torch.zeros(3)
    optimizer.step()
    binding = Binding(optimizer, [param])
    with torch.no_grad():
        binding.update([param.detach()], [torch.zeros(3)], binding.inputs())
    assert torch.equal(param, torch.ones(3))


def test_variances_of_zero_are_torchs() -> None:
    """With gradients that stay the same, rounding decides whether a centered average has a root."""
    grad, outcomes = torch.randn(500), []
    for rule in (False, True):
        param = nn.Parameter(torch.zeros(500))
        optimizer = torch.optim.RMSprop([param], centered=True, alpha=0.9)
        param.grad = grad.clone()
        optimizer.step()
        binding = Binding(optimizer, [param])
        for _ in range(300):
            if rule:
                assert binding.refresh() is None
                with torch.no_grad():
                    binding.update([param.detach()], [grad], binding.inputs())
            else:
                optimizer.step()
        outcomes.append(param.detach())
    assert outcomes[0].isnan().any()
    assert torch.equal(outcomes[0].isnan(), outcomes[1].isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sgd_on_the_cpu_is_refused(dtype: torch.dtype) -> None:
    """torch's fused SGD is wrong there, and the composed form is for float32 and float64."""
    param = nn.Parameter(torch.linspace(-1, 1, 64).to(dtype))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RefusedError, match="no captured update"):
        Binding(optimizer, [param])
