"""Hooks are code of the user's: a replay runs them or gives way to a step that does, from the step after they came."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import kitsune
from tests.kitsune.training import FORMS, Net, Training, adam, batch, compare

Register = Callable[[Training, Callable[..., Any]], Any]

# Each registers a hook around `act`, which counts the call and may return a tensor in place of its argument.
HOOKS: dict[str, Register] = {
    "module forward": lambda training, act: training.model.first.register_forward_hook(lambda m, a, out: act(out)),
    "module forward pre": lambda training, act: training.model.first.register_forward_pre_hook(lambda m, a: act(a[0])),
    "model forward": lambda training, act: training.model.register_forward_hook(lambda m, a, out: act(out)),
    "module backward": lambda training, act: training.model.last.register_full_backward_hook(
        lambda m, grad_in, grad_out: (act(grad_in[0]),)
    ),
    "module backward pre": lambda training, act: training.model.last.register_full_backward_pre_hook(
        lambda m, grad_out: (act(grad_out[0]),)
    ),
    "parameter": lambda training, act: training.model.first.weight.register_hook(act),
    "global forward": lambda training, act: torch_module.register_module_forward_hook(
        lambda m, a, out: act(out) if m is training.model else None
    ),
    "global forward pre": lambda training, act: torch_module.register_module_forward_pre_hook(
        lambda m, a: act(a[0]) if m is training.model else None
    ),
    "global backward": lambda training, act: torch_module.register_module_full_backward_hook(
        lambda m, grad_in, grad_out: (act(grad_in[0]),) if m is training.model.last else None
    ),
}


def halved(value: Tensor) -> Tensor:
    return value * 0.5


@pytest.mark.usefixtures("short_way")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("form", FORMS)
def test_a_hook_comes_and_goes(form: str, kind: str) -> None:
    handles: list[Any] = []

    def edit(training: Training, index: int) -> None:
        if index == 4:
            handles.append(HOOKS[kind](training, halved))
        if index == 7:
            handles.pop().remove()

    compare(form, steps=11, edit=edit, replays=4)


@pytest.mark.parametrize("kind", ["module backward", "module backward pre", "parameter", "global forward"])
@pytest.mark.parametrize("form", FORMS)
def test_a_hook_is_called_at_every_step(form: str, kind: str) -> None:
    calls = {"eager": 0, form: 0}

    def edit(training: Training, index: int) -> None:
        def count(value: Tensor) -> Tensor:
            calls[training.form] += 1
            return value

        if index == 3:
            training.memo["handle"] = HOOKS[kind](training, count)
        if index == 6:
            training.memo["handle"].remove()

    compare(form, steps=8, edit=edit, replays=2)
    assert calls[form] == calls["eager"] == 3


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_hook_on_the_layer_that_takes_the_input(form: str, is_leaf: bool) -> None:
    """It is given the gradient of an input that requires one, which a `TrainStep` does not keep."""
    seen: dict[str, list[Tensor]] = {"eager": [], form: []}

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net()
        return model, adam(model)

    for name in seen:
        training = Training(name, *build())
        training.model.first.register_full_backward_hook(  # type: ignore[union-attr]
            lambda module, grad_in, grad_out, name=name: seen[name].append(grad_in[0].clone())
        )
        for index in range(4):
            x, y = batch(index)[0]
            leaf = x.requires_grad_()
            training.step(leaf if is_leaf else leaf * 1.0, y)
            assert (leaf.grad is None) == (name == "train_step")
    assert len(seen[form]) == 4
    assert all(torch.equal(found, wanted) for found, wanted in zip(seen[form], seen["eager"], strict=True))


@pytest.mark.support("Models", "forward hooks of modules", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_a_hook_that_was_there_from_the_start(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 0:
            HOOKS["module forward"](training, halved)

    compare(form, edit=edit)


@pytest.mark.support("Models", "backward hooks", "plain PyTorch, with a reason")
@pytest.mark.parametrize("kind", ["module backward", "parameter", "global forward"])
def test_the_status_says_that_a_hook_stands_in_the_way(kind: str) -> None:
    model = Net()
    training = Training("train_step", model, adam(model))
    training.run(4)
    assert training.status().mode == "replay"
    handle = HOOKS[kind](training, lambda value: value)
    try:
        training.run(2, start=4)
        status = training.status()
        assert status.mode == "eager"
        assert "hook" in status.reason
        assert status.covered == ()
        assert status.fallbacks == 2
    finally:
        handle.remove()
    training.run(2, start=6)
    assert training.status().mode == "replay"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["module forward", "module backward", "parameter"])
def test_a_hook_on_a_layer_that_came_in_mid_training(form: str, kind: str) -> None:
    def edit(training: Training, index: int) -> None:
        model, group = training.model, training.optimizer.param_groups[0]
        if index == 4:
            torch.manual_seed(3)
            model.first, model.last = nn.Linear(4, 8), nn.Linear(8, 3)
            group["params"] = list(model.parameters())
            training.plain.state.clear()
        if index == 8:
            HOOKS[kind](training, halved)

    compare(form, steps=12, edit=edit, replays=4)


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("form", FORMS)
def test_a_post_accumulate_hook(form: str) -> None:
    """It sees each gradient once; nothing it does is lost."""

    def edit(training: Training, index: int) -> None:
        def double(param: Tensor) -> None:
            assert param.grad is not None
            param.grad.mul_(2)

        if index == 4:
            training.model.first.weight.register_post_accumulate_grad_hook(double)

    compare(form, steps=8, edit=edit, replays=3)


@pytest.mark.parametrize("num_wrapped", [0, 1, 4])
def test_updates_within_the_backward_pass(num_wrapped: int) -> None:
    """One optimizer a parameter, stepped as soon as its gradient is there; the rest of them are plain.

    Hooks that refer to the optimizers keep them alive, by torch's own doing, and what they have captured with them.
    """

    def train(num_wrapped: int) -> tuple[Net, dict[nn.Parameter, Any]]:
        torch.manual_seed(0)
        model = Net()
        plain = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True) for param in model.parameters()}
        wrapped = [kitsune.KitsuneOptimizer(plain[param], mode="replay") for param in [*plain][:num_wrapped]]
        optimizers = {**plain, **{one.param_groups[0]["params"][0]: one for one in wrapped}}

        def update(param: nn.Parameter) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        handles = [param.register_post_accumulate_grad_hook(update) for param in optimizers]
        for index in range(6):
            (x, y), _ = batch(index)
            functional.cross_entropy(model(x), y).backward()
        assert all(param.grad is None for param in optimizers)
        for handle in handles:
            handle.remove()
        return model, optimizers

    expected, _ = train(0)
    model, optimizers = train(num_wrapped)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    statuses = [one.status() for one in optimizers.values() if isinstance(one, kitsune.KitsuneOptimizer)]
    assert sorted(status.replays for status in statuses) == [0] * (num_wrapped - 1) + [4] * min(num_wrapped, 1)
    assert all(status.replays or "another KitsuneOptimizer" in status.reason for status in statuses)
    references = [weakref.ref(thing) for thing in (model, model.first.weight, *optimizers.values())]
    del model, optimizers
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.support("Optimizers", "step hooks, as long as they are there", "replayed, but for the update")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scope", ["own", "global"])
def test_optimizer_step_hooks(form: str, scope: str) -> None:
    order: dict[str, list[str]] = {"eager": [], form: []}

    def edit(training: Training, index: int) -> None:
        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            order[training.form].append("before")
            optimizer.param_groups[0]["lr"] *= 0.9

        def after(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            order[training.form].append("after")

        if index == 4:
            training.memo["handles"] = (
                [training.optimizer.register_step_pre_hook(before), training.optimizer.register_step_post_hook(after)]
                if scope == "own"
                else [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
            )
        if index == 7:
            if training.form == "drop_in":
                assert training.status().covered == ("forward", "backward")
            for handle in training.memo.pop("handles"):
                handle.remove()

    compare(form, steps=11, edit=edit, replays=5)
    assert order[form] == order["eager"] == ["before", "after"] * 3


@pytest.mark.parametrize("form", FORMS)
def test_a_forward_hook_that_keeps_an_activation(form: str) -> None:
    kept: dict[str, list[Tensor]] = {"eager": [], form: []}

    def edit(training: Training, index: int) -> None:
        if index == 0:
            training.model.first.register_forward_hook(
                lambda module, args, output: kept[training.form].append(output.detach())
            )

    compare(form, edit=edit, replays=0)
    for found, wanted in zip(kept[form], kept["eager"], strict=True):
        assert torch.equal(found, wanted)


def test_a_hook_on_a_module_beside_the_model() -> None:
    """A loss module, or a teacher, that only the step's own code knows."""
    criterion, teacher = nn.CrossEntropyLoss(), nn.Linear(4, 3).requires_grad_(False)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), y) + (model(x) - teacher(x)).square().mean()

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward(training.model, x, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    handles: list[Any] = []

    def edit(training: Training, index: int) -> None:
        if index == 4:
            handles.append(criterion.register_forward_hook(lambda m, a, out: out * 0.5))
        if index == 7:
            handles.append(teacher.register_forward_pre_hook(lambda m, a: (a[0] * 2,)))
        if index == 9:
            while handles:
                handles.pop().remove()

    compare("train_step", step={"forward": forward}, reference={"loop": loop}, steps=12, edit=edit, replays=5)


def test_a_hook_on_a_parameter_that_was_unfrozen() -> None:
    def edit(training: Training, index: int) -> None:
        if index == 0:
            training.model.first.requires_grad_(False)
        if index == 4:
            training.model.first.requires_grad_()
            training.model.first.weight.register_hook(halved)

    compare("train_step", steps=9, edit=edit, replays=3)
