"""What a binding notices, writes and counts between replays."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from kitsune.capture.state import Binding, Difference, hook_facts, refuse_hooks
from kitsune.errors import RefusedError
from kitsune.native.build import facts_type
from kitsune.native.facts import Fact, Facts


def pair(
    kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Two parameters and an optimizer that has made its state."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2, 2), 2.0))]
    optimizer = kind(params, **{"lr": 0.1, **options})  # type: ignore[call-arg]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def held(facts: list[Fact] | None) -> Facts:
    """Checks facts that hold."""
    assert facts is not None
    checked = facts_type()(facts)
    assert checked.hold()
    return checked


def test_nothing_changed() -> None:
    params, optimizer = pair()
    assert Binding(optimizer, params).refresh() is None


def test_a_fused_binding_asks_for_the_composed_form_when_a_constant_moves() -> None:
    params, optimizer = pair()
    binding = Binding(optimizer, params)
    facts = held(binding.facts())
    for name, value in (("betas", (0.5, 0.6)), ("eps", 0.1), ("weight_decay", 0.2)):
        before = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        changed = binding.refresh()
        assert changed is not None
        assert changed.is_constant
        assert str(changed.refusal()) == f"the optimizer's param_groups[0]['{name}'] was {before}, is {value}"
        assert not facts.hold()
        optimizer.param_groups[0][name] = before
        assert binding.refresh() is None
        assert facts.hold()


def test_a_composed_binding_follows_numbers_but_not_flags() -> None:
    params, optimizer = pair(weight_decay=0.1)
    binding = Binding(optimizer, params, composed=True)
    facts, numbers = held(binding.facts()), held(binding.number_facts())
    optimizer.param_groups[0].update(betas=(0.5, 0.6), eps=0.1, weight_decay=0.2, lr=3.0)
    assert facts.hold()
    assert not numbers.hold()
    assert binding.follow_numbers()
    assert binding.refresh() is None
    for name, value in (("weight_decay", 0.0), ("maximize", True), ("amsgrad", True)):
        before = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        assert binding.refresh() is not None, name
        assert not facts.hold() or not binding.follow_numbers()
        optimizer.param_groups[0][name] = before


def test_numbers_that_may_change_in_place_are_no_facts() -> None:
    params, optimizer = pair(torch.optim.SGD)
    binding = Binding(optimizer, params)
    held(binding.number_facts())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert binding.number_facts() is None
    held(binding.facts())
    optimizer.param_groups[0]["tags"] = ["mine"]
    assert binding.facts() is None


def add_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def reorder(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


def replace_moment(optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()


def move_moment(optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"].data = state["exp_avg"].clone()


def drop_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def replace_step(optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.state.values()))["step"] = torch.tensor(5.0)


def rename_moments(optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    names = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    renamed = {names.get(name, name): tensor for name, tensor in state.items()}
    state.clear()
    state.update(renamed)


def swap_states(optimizer: torch.optim.Optimizer) -> None:
    (one, first), (other, second) = optimizer.state.items()
    optimizer.state.clear()
    optimizer.state[other] = first
    optimizer.state[one] = second


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_group, "what the optimizer's param_groups hold changed"),
        (reorder, "what the optimizer's param_groups hold changed"),
        (replace_moment, "'exp_avg' in the optimizer's state of a parameter of shape (3,) was replaced"),
        (move_moment, "'exp_avg' in the optimizer's state of a parameter of shape (3,) has other memory"),
        (drop_state, "is missing"),
        (replace_step, "'step' in the optimizer's state of a parameter of shape (3,) was replaced"),
        (rename_moments, "'exp_avg' in the optimizer's state of a parameter of shape (3,) was replaced"),
        (swap_states, "was replaced"),
    ],
)
def test_what_makes_a_binding_stale(change: Callable[[torch.optim.Optimizer], None], words: str) -> None:
    params, optimizer = pair()
    binding = Binding(optimizer, params)
    assert binding.refresh() is None
    facts = held(binding.facts())
    change(optimizer)
    assert not facts.hold()
    changed = binding.refresh()
    assert changed is not None
    assert words in str(changed.refusal())


def test_the_learning_rate_is_written_when_it_changed() -> None:
    params, optimizer = pair(torch.optim.SGD)
    binding = Binding(optimizer, params)
    (rate,) = binding.inputs()
    for value in (0.5, torch.tensor(0.25), 0.5, 0.0, 1e-8):
        optimizer.param_groups[0]["lr"] = value
        assert binding.refresh() is None
        assert float(rate) == float(value)
    version = rate._version
    assert binding.refresh() is None
    assert rate._version == version, "an unchanged number is not written again"


def test_the_state_of_a_new_group_dictionary_is_read() -> None:
    params, optimizer = pair(torch.optim.SGD)
    binding = Binding(optimizer, params)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)
    if binding.refresh() is None:
        assert float(binding.inputs()[0]) == 0.7


def test_advancing_counts_and_tells() -> None:
    params, optimizer = pair()
    binding = Binding(optimizer, params)
    versions = [param._version for param in params]
    optimizer._opt_called = False  # type: ignore[attr-defined]
    binding.advance()
    assert optimizer._opt_called  # type: ignore[attr-defined]
    assert [param._version for param in params] == [version + 1 for version in versions]


def test_step_counts_that_torch_keeps_on_the_host() -> None:
    """The graph counts on the device; the host's counts stay the truth, and must agree with each other."""
    params = [nn.Parameter(torch.empty(3, device="meta")), nn.Parameter(torch.empty(2, device="meta"))]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=False)
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer.step()
    binding = Binding(optimizer, params)
    steps = [optimizer.state[param]["step"] for param in params]
    assert all(step.device.type == "cpu" for step in steps)
    assert not any(tensor is step for tensor in binding.inputs() for step in steps)
    assert binding.needs_skip()
    binding.advance()
    assert [float(step) for step in steps] == [2.0, 2.0]
    binding.advance(skipped=True)
    assert [float(step) for step in steps] == [2.0, 2.0]
    assert binding.refresh() is None
    for step in steps:
        step.fill_(7)
    assert binding.refresh() is None, "counts that moved together are followed"
    steps[0].fill_(1)
    assert binding.refresh() == Difference("the optimizer's step counts")


def test_the_product_of_momenta_that_torch_keeps_on_the_host() -> None:
    """It is computed there as torch computes it, bit for bit, for each group with its own numbers."""

    def make() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = [nn.Parameter(torch.empty(size, device="meta")) for size in (3, 2, 4)]
        groups = [{"params": params[:2]}, {"params": params[2:], "momentum_decay": 0.3}]
        optimizer = torch.optim.NAdam(groups, lr=0.1, foreach=False)
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        return params, optimizer

    def products(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[float]:
        return [float(optimizer.state[param]["mu_product"]) for param in params]

    (expected, torchs), (params, optimizer) = make(), make()
    binding = Binding(optimizer, params)
    mirrors = [tensor for tensor in binding.inputs() if tensor.device.type == "meta" and tensor.dim() == 0]
    assert len(mirrors) == 3 + 2 * 6, "a step count, two products, and the numbers of two groups"
    for step in range(20):
        if step == 5:
            torchs.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"] = (0.7, 0.9)
        torchs.step()
        assert binding.refresh() is None
        binding.advance()
        assert products(params, optimizer) == products(expected, torchs)
        assert float(optimizer.state[params[0]]["step"]) == step + 2
    before = products(params, optimizer)
    binding.advance(skipped=True)
    assert products(params, optimizer) == before
    versions = optimizer.state[params[0]]["mu_product"]._version
    for param in params[:2]:
        optimizer.state[param]["mu_product"].fill_(0.5)
    assert binding.refresh() is None, "products that moved together are followed"
    binding.advance()
    assert optimizer.state[params[0]]["mu_product"]._version > versions
    optimizer.state[params[0]]["mu_product"].fill_(0.25)
    assert binding.refresh() == Difference("the optimizer's step counts")


@pytest.mark.parametrize("name", ["eta", "mu"])
def test_a_scalar_that_torch_does_not_keep_on_the_host_is_not_followed_there(name: str) -> None:
    param = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.ASGD([param], foreach=False)
    scalars = {key: torch.ones((), device="meta") for key in ("step", "eta", "mu")}
    optimizer.state[param] = {**scalars, "ax": torch.empty_like(param), name: torch.ones(())}
    with pytest.raises(RefusedError, match=f"state '{name}' is on cpu, unlike its parameter"):
        Binding(optimizer, [param])


def test_a_step_count_on_another_device_is_refused() -> None:
    params, optimizer = pair()
    optimizer.state[params[0]]["step"] = torch.ones((), device="meta")
    with pytest.raises(RefusedError, match="state 'step' is on meta, unlike its parameter"):
        Binding(optimizer, params)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop])
def test_rules_that_do_not_read_the_step_count_update_all_at_once(kind: type[torch.optim.Optimizer]) -> None:
    params, optimizer = pair(kind)
    binding = Binding(optimizer, params)
    assert len(binding.inputs()) == 2 * len(optimizer.state[params[0]]) + len(binding._slots[0].scalars)
    assert len(binding._slots) == 1


def test_a_learning_rate_of_one_element() -> None:
    params, optimizer = pair(torch.optim.SGD, lr=torch.tensor([0.25]))
    (rate,) = Binding(optimizer, params).inputs()
    assert float(rate) == 0.25


def test_inputs_are_listed_once_and_in_order() -> None:
    params, optimizer = pair(amsgrad=True)
    binding = Binding(optimizer, params)
    inputs = binding.inputs()
    assert len({id(tensor) for tensor in inputs}) == len(inputs) == 2 * 4 + 1
    assert [id(tensor) for tensor in binding.inputs()] == [id(tensor) for tensor in inputs]


def test_a_parameter_without_state_is_no_reason_to_give_up() -> None:
    params, optimizer = pair()
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    assert not Binding.is_initialised(optimizer, late)
    assert Binding.is_initialised(optimizer, params[0])
    with pytest.raises(RefusedError, match="no state 'exp_avg' yet") as caught:
        Binding(optimizer, [*params, late])
    assert caught.value.passing


def test_parameters_in_another_layout_than_their_state_are_composed() -> None:
    """The fused operators pair elements by their place in memory."""
    param = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.Adam([param], lr=0.1)
    param.grad = torch.ones(2, 3)
    optimizer.step()
    param.data = param.data.t().contiguous().t()
    assert Binding(optimizer, [param]).style == "composed"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adadelta])
def test_parameters_of_another_dtype_than_their_state_are_left_to_torch(kind: type[torch.optim.Optimizer]) -> None:
    """Which raises, or rounds in its own way."""
    params, optimizer = pair(kind)
    for param in params:
        param.data = param.data.double()
    with pytest.raises(RefusedError, match=r"is of torch\.float32, and a parameter of torch\.float64") as caught:
        Binding(optimizer, params)
    assert caught.value.passing


def test_complex_parameters_are_refused() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.Adam([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RefusedError, match=r"no captured update for parameters of torch\.complex64"):
        Binding(optimizer, [param])


def test_hooks_of_the_optimizer() -> None:
    _, optimizer = pair()
    assert refuse_hooks(optimizer) is None
    facts = held(hook_facts(optimizer))
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        torch_optimizer.register_optimizer_step_pre_hook,
        torch_optimizer.register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        refusal = refuse_hooks(optimizer)
        assert refusal is not None
        assert "step hooks" in refusal.reason
        assert not facts.hold()
        handle.remove()
        assert refuse_hooks(optimizer) is None
        assert facts.hold()


def test_a_replaced_step_method() -> None:
    _, optimizer = pair()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert refuse_hooks(optimizer) is None, "a scheduler patches step only to count its calls"
    facts = held(hook_facts(optimizer))
    with mock.patch.object(torch.optim.Adam, "step"):
        assert refuse_hooks(optimizer) is not None
        assert not facts.hold()
    held(hook_facts(optimizer))
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    refusal = refuse_hooks(optimizer)
    assert refusal is not None
    assert "step was replaced" in refusal.reason
    assert not facts.hold()


def test_a_step_method_that_is_wrapped_by_others_than_torch() -> None:
    """What wraps it may say that it is torch's (`functools.wraps`), and a scheduler may wrap that."""
    _, optimizer = pair()
    usual = type(optimizer).step

    @functools.wraps(usual)
    def noting(*args: Any) -> Any:
        return usual(*args)

    with mock.patch.object(torch.optim.Adam, "step", noting):
        assert refuse_hooks(optimizer) is not None
    assert refuse_hooks(optimizer) is None
    optimizer.step = types.MethodType(noting, optimizer)  # type: ignore[method-assign]
    assert refuse_hooks(optimizer) is not None
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert refuse_hooks(optimizer) is not None
