"""What is read of modules, parameters and the surroundings of a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kitsune.capture.watch import refuse_backward_hooks, refuse_module, refuse_parameter_hooks, refuse_surroundings
from tests.kitsune.training import Net


def compiled_part() -> nn.Module:
    model = Net()
    model.last.compile(backend="eager")
    return model


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
        (compiled_part, "module 'last' is compiled"),
        (lambda: torch.compile(Net(), backend="eager"), "the model is compiled"),
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
    handle = getattr(model.last.bias, register)(lambda *_: None)
    refusal = refuse_parameter_hooks(model.parameters())
    assert refusal is not None
    assert "shape (3,)" in refusal.reason
    handle.remove()
    assert refuse_parameter_hooks(model.parameters()) is None
