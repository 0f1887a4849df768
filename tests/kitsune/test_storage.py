"""A call, or a hook of it, gives tensors of the model other memory, and the loop does so at other moments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.kitsune.training import FORMS, Net, Training, adam, compare, plain_loop, sgd

pytestmark = pytest.mark.parametrize("form", FORMS)


def by_data(tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.99


def by_name(tensor: Tensor) -> None:
    setattr(tensor, "data", tensor.data * 0.99)  # noqa: B010 - another way for Dynamo


def by_method(tensor: Tensor) -> None:
    tensor.__setattr__("data", tensor.data * 0.99)


def by_set(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(tensor.detach() * 0.99)


def by_vector(tensor: Tensor) -> None:
    vector_to_parameters(parameters_to_vector([tensor]) * 0.99, [tensor])


def by_itself(tensor: Tensor) -> None:
    tensor.data = tensor.data


def in_place(tensor: Tensor) -> None:
    tensor.data.mul_(0.99)


class Exchanging(nn.Module):
    """Gives a tensor of its own other memory, before or after it is used."""

    def __init__(self, change: Callable[[Tensor], None], where: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))
        self.aliases = [self.first.weight]
        self.change, self.where = change, where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            self.change(self.first.weight)
        hidden = torch.tanh(self.first(x)) * self.scale
        if self.where == "after":
            self.change(self.aliases[0])
        if self.where == "buffer":
            self.change(self.scale)
        return self.last(hidden)


def exchanging(change: Callable[[Tensor], None], where: str) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Exchanging(change, where)
        if where == "pre-hook":
            model.first.register_forward_pre_hook(lambda module, _args: change(module.weight))
        if where == "hook":
            model.first.register_forward_hook(lambda module, _args, _output: change(module.weight))
        return model, adam(model)

    return build


@pytest.mark.support(
    "Models", "a call gives a tensor other memory (`weight.data = ...`)", "plain PyTorch, with a reason"
)
@pytest.mark.parametrize("where", ["before", "after", "buffer", "pre-hook", "hook"])
@pytest.mark.parametrize("change", [by_data, by_name, by_method, by_set, by_vector, by_itself])
def test_a_call_exchanges_memory(form: str, change: Callable[[Tensor], None], where: str) -> None:
    if change is by_set and where == "buffer":
        pytest.skip("autograd needs what the buffer was")
    training = compare(form, exchanging(change, where), steps=5, replays=0)
    status = training.status()
    assert status.replays == 0
    assert status.mode != "replay"


@pytest.mark.support("Models", "a call writes to a tensor by `.data`, in place", "replayed")
@pytest.mark.parametrize("where", ["before", "after", "buffer", "pre-hook", "hook"])
def test_a_call_writes_in_place(form: str, where: str) -> None:
    compare(form, exchanging(in_place, where), steps=5, rtol=1e-6, atol=1e-7)


def test_the_status_names_the_line_and_what_to_do(form: str) -> None:
    training = compare(form, exchanging(by_data, "after"), steps=4, replays=0)
    (reason,) = [one for one in training.status().refusals if "other memory" in one]
    assert "tensor.data = tensor.data * 0.99" in reason
    assert "copy_" in reason


def test_weight_norm_and_spectral_norm(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.first = nn.utils.parametrizations.weight_norm(model.first)
        model.last = nn.utils.spectral_norm(model.last)
        return model, sgd(model)

    compare(form, build, steps=5, replays=0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moment", ["call", "backward", "step"])
@pytest.mark.parametrize("change", [by_data, by_set])
def test_the_loop_exchanges_memory(form: str, change: Callable[[Tensor], None], moment: str) -> None:
    """Between the call and `backward()`, before `step()`, and after it."""
    if form == "train_step":
        pytest.skip("a step has no such moments")

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        output = training.model(x)
        if moment == "call":
            change(training.model.first.weight)
        loss = training.loss_fn(output, y)
        loss.backward()
        if moment == "backward":
            change(training.model.first.weight)
        training.optimizer.step()
        if moment == "step":
            change(training.model.first.weight)
        return loss.detach()

    compare(form, steps=6, loop=loop, replays=0, rtol=1e-6, atol=1e-7)


def test_a_gradient_hook_exchanges_memory(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        weight = model.last.weight
        weight.register_post_accumulate_grad_hook(lambda _: by_data(weight))
        return model, adam(model)

    compare(form, build, steps=6, loop=plain_loop, replays=0, rtol=1e-6, atol=1e-7)
