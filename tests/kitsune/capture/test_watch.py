"""What is read of modules, parameters and the surroundings of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from kitsune.capture.watch import (
    parameter_hook_facts,
    refuse_backward_hooks,
    refuse_module,
    refuse_parameter_hooks,
    refuse_surroundings,
    refuse_wrapper_hooks,
    surrounding_facts,
    wrapper_hook_facts,
    wrappers_of,
)
from kitsune.native.build import facts_type
from tests.kitsune.training import Net


def special_parameter() -> nn.Module:
    class Special(nn.Parameter):
        pass

    model = Net()
    model.first.weight = Special(torch.randn(8, 4))
    return model


def two_devices() -> nn.Module:
    model = Net()
    model.last.to("meta")
    return model


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (lambda: nn.DataParallel(Net()), "the model is a DataParallel"),
        (lambda: nn.Sequential(nn.DataParallel(Net())), "module '0' is a DataParallel"),
        (special_parameter, "the parameter 'first.weight' is a Special"),
        (two_devices, "several devices (cpu, meta)"),
    ],
)
def test_modules_that_are_refused(kind: Callable[[], nn.Module], words: str) -> None:
    refusal = refuse_module(kind())
    assert refusal is not None
    assert words in refusal.reason


def test_a_plain_module_is_accepted() -> None:
    model = nn.Sequential(Net(batch_norm=True), nn.Dropout(0.5))
    assert refuse_module(model) is None
    assert refuse_backward_hooks(model) is None
    assert refuse_parameter_hooks(model.parameters()) is None
    assert refuse_surroundings() is None


def test_hooks_of_wrappers_are_looked_at() -> None:
    model = nn.Sequential(torch.compile(Net(), backend="eager"))
    wrappers = wrappers_of(model)
    assert wrappers == [model[0]]
    facts = facts_type()(wrapper_hook_facts(wrappers))
    for register in ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"):
        assert refuse_wrapper_hooks(wrappers) is None
        assert facts.hold()
        handle = getattr(model[0], register)(lambda *_: None)
        refusal = refuse_wrapper_hooks(wrappers)
        assert refusal is not None
        assert "hooks of the wrapper" in refusal.reason
        assert not facts.hold()
        handle.remove()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_anywhere_in_the_model(register: str) -> None:
    model = nn.Sequential(Net())
    handle = getattr(model[0].last, register)(lambda *_: None)
    refusal = refuse_backward_hooks(model)
    assert refusal is not None
    assert "backward hooks" in refusal.reason
    handle.remove()
    assert refuse_backward_hooks(model) is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(register: str) -> None:
    model = Net()
    facts = facts_type()(parameter_hook_facts(model.parameters()))
    assert facts.hold()
    for _ in range(2):
        handle = getattr(model.last.bias, register)(lambda *_: None)
        refusal = refuse_parameter_hooks(model.parameters())
        assert refusal is not None
        assert "shape (3,)" in refusal.reason
        assert not facts.hold()
        handle.remove()
        assert refuse_parameter_hooks(model.parameters()) is None
        facts = facts_type()(parameter_hook_facts(model.parameters()))
        assert facts.hold(), "an empty dictionary of hooks stays"


@contextmanager
def hooked(register: Callable[..., Any]) -> Iterator[None]:
    handle = register(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def stance(name: str) -> Iterator[None]:
    torch.compiler.set_stance(name)
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


class Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "forward pre": lambda: hooked(torch_module.register_module_forward_pre_hook),
    "forward": lambda: hooked(torch_module.register_module_forward_hook),
    "backward pre": lambda: hooked(torch_module.register_module_full_backward_pre_hook),
    "backward": lambda: hooked(torch_module.register_module_full_backward_hook),
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "function mode": Passing,
    "anomaly": torch.autograd.detect_anomaly,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "forward-mode": forward_ad.dual_level,
    "stance": lambda: stance("force_eager"),
    "disabled": lambda: torch._dynamo.config.patch("disable", True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_is_seen_of_the_surroundings(name: str) -> None:
    facts = facts_type()(surrounding_facts())
    assert facts.hold()
    with SURROUNDINGS[name]():
        assert refuse_surroundings() is not None
        assert not facts.hold()
    assert refuse_surroundings() is None
    assert facts_type()(surrounding_facts()).hold()


def test_a_default_device_is_no_mode_that_stands_in_the_way() -> None:
    with torch.device("cpu"):
        facts = facts_type()(surrounding_facts())
        assert refuse_surroundings() is None
        assert facts.hold()
        with Passing():
            assert not facts.hold()
        assert facts.hold()
    assert not facts.hold()
