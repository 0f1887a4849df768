"""`KitsuneOptimizer`: still an optimizer, in whatever loop it is used."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from tests.kitsune import static_memory
from tests.kitsune.training import Batch, Net, Training, adam, batch, compare, net_and_adam, num_looking, sgd

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def forward_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return training.loss_fn(training.model(x), y)


# It is an optimizer


def test_the_two_forms() -> None:
    model = Net()
    first = kitsune.KitsuneOptimizer(torch.optim.Adam, model.parameters(), lr=0.3, mode="eager", betas=(0.5, 0.6))
    assert isinstance(first, torch.optim.Optimizer)
    assert isinstance(first.wrapped, torch.optim.Adam)
    assert first.param_groups[0]["lr"] == 0.3
    assert first.param_groups[0]["betas"] == (0.5, 0.6)
    assert first.config.mode == "eager"
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = kitsune.KitsuneOptimizer(adamw, enable_amp=True, enable_fusion=True, num_streams=4)
    assert second.wrapped is adamw
    assert second.config.enable_amp
    assert set(second.status().not_in_effect) == {"enable_fusion", "num_streams"}


def test_it_shares_everything_with_the_wrapped_optimizer() -> None:
    _, plain = net_and_adam()
    optimizer = kitsune.KitsuneOptimizer(plain)
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert optimizer.defaults is plain.defaults
    assert repr(plain) in repr(optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    assert plain.param_groups[0]["lr"] == 0.7
    assert optimizer.state_dict() == plain.state_dict()


@pytest.mark.support("Optimizers", "state_dict from and into a plain optimizer", "replayed")
def test_the_state_dict_goes_both_ways() -> None:
    model, plain = net_and_adam()
    Training("drop_in", model, plain).run(4)
    other = Net()
    wrapped = kitsune.KitsuneOptimizer(torch.optim.Adam, other.parameters())
    wrapped.load_state_dict(plain.state_dict())
    assert wrapped.param_groups[0]["lr"] == 0.05
    assert torch.equal(wrapped.state[other.first.weight]["exp_avg"], plain.state[model.first.weight]["exp_avg"])
    third = torch.optim.Adam(Net().parameters())
    third.load_state_dict(wrapped.state_dict())
    assert third.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


@pytest.mark.parametrize("mode", ["replay", "auto", "eager"])
def test_zero_grad(mode: str) -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain, mode=mode)
    training.run(4)
    training.optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    training.optimizer.zero_grad(0)
    assert all(param.grad is not None for param in model.parameters())
    training.optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


class Scaled(torch.optim.SGD):
    """An optimizer of another library: it takes a number at each step, returns one, and zeroes gradients in its way."""

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
        super().step(closure)
        return scale

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None if param.grad is None else torch.zeros_like(param)


@pytest.mark.parametrize("options", [{}, {"defer_loss": True}], ids=["usual", "deferred"])
@pytest.mark.parametrize("mode", ["replay", "eager"])
def test_an_optimizer_with_arguments_and_results_of_its_own(mode: str, options: dict[str, Any]) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for index in range(8):
            (x, y), _ = batch(index)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            # Of torch's optimizers none takes such an argument.
            results.append(optimizer.step(scale=index + 1.0) if index % 3 else optimizer.step())  # type: ignore[call-arg]
        return results

    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    wrapped = kitsune.KitsuneOptimizer(Scaled(model.parameters(), lr=0.1), mode=mode, **options)
    results = run(other, Scaled(other.parameters(), lr=0.1))
    assert run(model, wrapped) == results == [1.0, 2.0, 3.0, 1.0, 5.0, 6.0, 1.0, 8.0]
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
    with pytest.raises(TypeError, match="factor"):
        wrapped.step(factor=2.0)
    if mode == "replay":
        assert "forward" in wrapped.status().covered


def test_state_that_is_reset_the_way_optimizers_take_it() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    training.optimizer.__setstate__({"state": defaultdict(dict)})
    assert not plain.state
    training.run(4)
    assert {float(state["step"]) for state in plain.state.values()} == {4.0}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (lambda: (torch.optim.Adam,), {}, TypeError, "params are missing"),
        (lambda: (nn.Linear, [1]), {}, TypeError, "expected a torch.optim optimizer"),
        (lambda: (3,), {}, TypeError, "expected a torch.optim optimizer"),
        (lambda: (adam(Net()), [1]), {}, TypeError, "params belong to an optimizer class"),
        (lambda: (adam(Net()),), {"lr": 0.1}, kitsune.ConfigError, "option 'lr'"),
        (lambda: (adam(Net()),), {"num_stream": 4}, kitsune.ConfigError, "option 'num_stream'.*num_streams"),
        (lambda: (adam(Net()),), {"num_streams": 0}, kitsune.ConfigError, "num_streams.*from 1 to 8"),
        (lambda: (adam(Net()),), {"model": 3}, TypeError, "model must be a torch.nn.Module, or several, got int"),
        (lambda: (adam(Net()),), {"model": []}, kitsune.ConfigError, "modules that own a parameter"),
        (lambda: (kitsune.KitsuneOptimizer(adam(Net())),), {}, TypeError, "a KitsuneOptimizer already"),
        (lambda: (torch.optim.Adam, Net().parameters()), {"learning_rate": 1}, kitsune.ConfigError, "learning_rate"),
        (
            lambda: (torch.optim.Adam, Net().parameters()),
            {"lr": 1e-3, "enable_fusoin": True},
            kitsune.ConfigError,
            "'enable_fusoin' got True.*Kitsune.*enable_fusion.*Adam.*betas",
        ),
        (lambda: (adam(Net()),), {"config": {"mode": "eager"}}, TypeError, "config must be a kitsune.Config, got dict"),
    ],
)
def test_wrong_arguments(
    arguments: Callable[[], tuple[Any, ...]], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kitsune.KitsuneOptimizer(*arguments(), **options)


# Loops


def test_the_usual_loop() -> None:
    training = compare("drop_in")
    assert training.status().covered == ("forward", "backward", "update")


@pytest.mark.support("Gradients", "zero_grad with and without set_to_none", "replayed")
def test_zero_grad_after_the_step_and_zeroed_in_place() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        loss = forward_loss(training, x, y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    compare("drop_in", loop=loop)


def test_the_model_zeroes_its_gradients() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.model.zero_grad()
        loss = forward_loss(training, x, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop)


@pytest.mark.support("Gradients", "accumulation over 2, 4 and 8 micro-batches", "replayed")
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_accumulation_over_backward_passes(micro_batches: int) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        total = torch.zeros(())
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = forward_loss(training, part_x, part_y) / micro_batches
            loss.backward()
            total += loss.detach()
        training.optimizer.step()
        return total

    training = compare("drop_in", loop=loop, batches=lambda index: batch(index, size=8), steps=5)
    assert training.status().replays == 4 * micro_batches


@pytest.mark.support("Gradients", "several losses", "replayed")
def test_accumulation_over_losses() -> None:
    """Several forward passes before one backward pass."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward_loss(training, x[:3], y[:3]) + forward_loss(training, x[3:], y[3:])
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    build: Build = lambda: (model := Net(batch_norm=True, dropout=0.3), adam(model))  # noqa: E731
    compare("drop_in", build, loop=loop)


def test_backward_without_an_update() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        loss = forward_loss(training, x, y)
        loss.backward()
        if count % 3 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()
        return loss.detach()

    compare("drop_in", loop=loop, steps=14, replays=6)


def clip_norm(params: list[nn.Parameter]) -> None:
    assert torch.nn.utils.clip_grad_norm_(params, 0.1) > 0.1


def clip_value(params: list[nn.Parameter]) -> None:
    assert any((param.grad.abs() > 0.02).any() for param in params if param.grad is not None)
    torch.nn.utils.clip_grad_value_(params, 0.02)


@pytest.mark.support("Gradients", "clipping by norm and by value", "replayed")
@pytest.mark.parametrize("clip", [clip_norm, clip_value])
def test_clipping_in_the_loop(clip: Callable[[list[nn.Parameter]], None]) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward_loss(training, x, y)
        loss.backward()
        clip(list(training.model.parameters()))
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop)


@pytest.mark.support("Gradients", "gradients replaced between backward() and step()", "replayed")
def test_gradients_replaced_by_the_user() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward_loss(training, x, y)
        loss.backward()
        weight = training.model.first.weight
        weight.grad = weight.grad * 0.5
        training.model.last.bias.grad = None
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop, steps=8)


@pytest.mark.support("Gradients", "gradients kept over iterations", "replayed")
def test_gradients_belong_to_the_user() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    held = []
    for index in range(8):
        training.run(1, start=index)
        held += [(param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None]
    assert len(held) == 8 * 4
    assert all(torch.equal(grad, value) for grad, value in held)


@pytest.mark.support("Models", "outputs kept over iterations", "replayed")
def test_outputs_belong_to_the_user() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    outputs = [model(batch(index)[0][0]) for index in range(4)]
    kept = [output.detach().clone() for output in outputs]
    training.run(3, start=4)
    assert all(torch.equal(output, value) for output, value in zip(outputs, kept, strict=True))


class Wrapper(nn.Module):
    """Something around a net that the loop calls in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Net(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        print("called")  # which no graph can hold
        return self.head(self.net(x))


class Partial(Net):
    """Its outputs have gaps, or elements that share memory."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return out[:, :2], out.mean(0).expand(4, 3), out.T


@pytest.mark.parametrize("options", [{}, {"defer_loss": True}], ids=["usual", "deferred"])
def test_outputs_lie_as_those_of_the_model(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    static_memory.install(monkeypatch)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        found = []
        for index in range(8):
            (x, _), _ = batch(index)
            optimizer.zero_grad()
            outputs = model(x)
            if index % 2:
                found += [(one.stride(), one.detach().clone()) for one in outputs]
            sum(one.square().mean() for one in outputs).backward()
            with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
                outputs[1].add_(1)
            outputs[0].detach().zero_()
            found += [one.detach().clone() for one in outputs[:2]]
            assert outputs[1].untyped_storage().nbytes() == 12
            optimizer.step()
        return found

    torch.manual_seed(0)
    model, other = Partial(), Partial()
    other.load_state_dict(model.state_dict())
    wrapped = kitsune.KitsuneOptimizer(sgd(model), mode="replay", **options)
    torch.testing.assert_close(run(model, wrapped), run(other, sgd(other)))
    assert wrapped.status().covered


@pytest.mark.support("Models", "`model=`: a part of what the loop calls, or several", "replayed")
@pytest.mark.parametrize("several", [False, True])
def test_the_modules_that_are_named_are_replayed(several: bool) -> None:
    losses = {}
    for named in (False, True):
        torch.manual_seed(0)
        model = Wrapper()
        optimizer: torch.optim.Optimizer = adam(model)
        if named:
            parts: Any = [model.net, model.head] if several else model.net
            optimizer = kitsune.KitsuneOptimizer(optimizer, model=parts, mode="replay")
        losses[named] = Training("eager", model, optimizer).run(8)
    assert losses[True] == losses[False]
    assert isinstance(optimizer, kitsune.KitsuneOptimizer)
    status = optimizer.status()
    assert status.replays >= 6 * (1 + several)
    assert not status.refusals


def test_a_copy_replays_the_copied_module() -> None:
    model = Wrapper()
    optimizer = kitsune.KitsuneOptimizer(adam(model), model=model.net, mode="replay")
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    losses = [Training("eager", *one).run(8) for one in ((model, optimizer), (twin, twin_optimizer))]
    assert losses[0] == losses[1]
    assert twin_optimizer.status().replays == optimizer.status().replays >= 6


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (nn.Linear(2, 2), kitsune.ConfigError, "own a parameter"),
        ([Net(), 1], kitsune.ConfigError, "own"),
        ([1], TypeError, "int"),
    ],
)
def test_what_cannot_be_named(model: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        kitsune.KitsuneOptimizer(adam(Net()), model=model)


@pytest.mark.support("Gradients", "retain_graph", "replayed")
def test_retain_graph() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward_loss(training, x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop)


@pytest.mark.support("Gradients", "a second backward pass without retain_graph", "raises, as in plain PyTorch")
def test_a_second_backward_pass_without_retain_graph_fails_as_in_eager() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    loss = forward_loss(training, *batch(4)[0])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.support("Gradients", "a step between a call and its backward pass, with fused=True", "replayed")
def test_a_fused_update_between_a_call_and_its_backward_pass() -> None:
    """torch's fused updates leave the versions of parameters as they are, so that nobody minds."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        loss = forward_loss(training, x, y)
        pending = training.memo.get("loss")
        training.memo["loss"] = loss
        if pending is not None:
            training.optimizer.zero_grad()
            pending.backward()
            training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop, steps=8, replays=5)


def test_an_output_used_twice() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        output = training.model(x)
        loss = training.loss_fn(output, y) + 0.1 * output.square().mean()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop)


def test_an_output_fed_back_in() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(training.model(x)), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Square()
        return model, adam(model)

    compare("drop_in", build, loop=loop, steps=8, replays=8)


@pytest.mark.parametrize("edit", ["add_", "relu_"])
@pytest.mark.parametrize("shape", [(6, 3), (3, 6)])
def test_an_output_edited_in_place(edit: str, shape: tuple[int, int]) -> None:
    """Whether the output is a view inside the graph must not show."""

    class Shaped(Net):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            return output.view(*shape) if shape != (6, 3) else output

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        output = training.model(x)
        output.add_(1) if edit == "add_" else output.relu_()
        loss = training.loss_fn(output.reshape(6, 3), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Shaped()
        return model, adam(model)

    compare("drop_in", build, loop=loop)


def test_part_of_the_outputs_used() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            hidden = torch.relu(self.trunk(x))
            return self.left(hidden), {"right": self.right(hidden), "size": hidden.argmax(1)}

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        left, others = training.model(x)
        assert set(others) == {"right", "size"}
        assert not others["size"].requires_grad
        loss = training.loss_fn(left if count % 3 else others["right"], y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = TwoHeads()
        return model, adam(model)

    compare("drop_in", build, loop=loop, steps=12)


def test_a_loss_that_ignores_the_model() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        loss = forward_loss(training, x, y)
        if count % 3:
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop, steps=10)


def test_an_argument_that_requires_a_gradient() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = forward_loss(training, x, y)
        (grad,) = torch.autograd.grad(loss, [x], retain_graph=True)
        loss = loss + forward_loss(training, x.detach() + 0.1 * grad.sign(), y)
        loss.backward()
        assert x.grad is not None
        training.optimizer.step()
        return loss.detach() + x.grad.sum()

    compare("drop_in", loop=loop, steps=8, replays=8)


class Shifted(Net):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) + shift


@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize(
    "shift",
    [
        lambda model, _x: model.first.bias[:3],
        lambda model, _x: model.first.weight.t()[0, 1:4],
        lambda _model, x: x[0, :3],
    ],
    ids=["of a parameter", "of a view of a parameter", "of another argument"],
)
def test_an_argument_is_a_view(shift: Callable[[Net, Tensor], Tensor], defer_loss: bool) -> None:
    """Its gradient goes on to what it is a view of by way of autograd, once."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = training.loss_fn(training.model(x, shift(training.model, x)), y)
        loss.backward()
        training.optimizer.step()
        assert x.grad is not None
        return torch.stack([loss.detach(), x.grad[0].sum()])

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Shifted()
        return model, adam(model)

    compare("drop_in", build, loop=loop, defer_loss=defer_loss)


def test_an_argument_is_no_leaf_any_more() -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if x.is_leaf else 2.0)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Asking()
        return model, adam(model)

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        x.requires_grad_()
        return (x if index < 6 else x * 1, y), {}

    compare("drop_in", build, steps=12, batches=batches, replays=6)


def test_autograd_grad_in_place_of_backward() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward_loss(training, x, y)
        params = list(training.model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop)


@pytest.mark.support("Gradients", "a gradient penalty (double backward)", "plain PyTorch, with a reason")
def test_a_gradient_penalty() -> None:
    """Double backward goes through plain autograd."""

    class Smooth(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = forward_loss(training, x, y)
        (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
        loss = loss + grad.square().sum()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Smooth()
        return model, adam(model)

    training = compare("drop_in", build, loop=loop, replays=0)
    assert any("differentiated" in refusal for refusal in training.status().refusals)


@pytest.mark.support("Gradients", "a parameter edited between forward and backward", "raises, as in plain PyTorch")
def test_a_parameter_edited_between_forward_and_backward_fails_as_in_eager() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    loss = forward_loss(training, *batch(4)[0])
    with torch.no_grad():
        model.last.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


def test_an_argument_edited_between_forward_and_backward() -> None:
    """The first layer needs its input again, as in eager."""
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    (x, y), _ = batch(4)
    loss = forward_loss(training, x, y)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.support("Optimizers", "step(closure)", "replayed")
def test_a_step_with_a_closure() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            training.optimizer.zero_grad()
            loss = forward_loss(training, x, y)
            loss.backward()
            return loss

        loss = training.optimizer.step(closure)
        assert isinstance(loss, Tensor)
        return loss.detach()

    training = compare("drop_in", loop=loop, steps=8)
    assert training.status().covered == ("forward", "backward", "update")


def test_a_closure_between_step_hooks() -> None:
    """What is before it comes before the closure, so that the optimizer calls it itself."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        order = training.memo.setdefault("order", [])
        if not order:
            training.plain.register_step_pre_hook(lambda *_: order.append("before"))
            training.plain.register_step_post_hook(lambda *_: order.append("after"))

        def closure() -> Tensor:
            order.append("closure")
            training.optimizer.zero_grad()
            loss = forward_loss(training, x, y)
            loss.backward()
            return loss

        loss = training.optimizer.step(closure)
        assert order[-3:] == ["before", "closure", "after"]
        assert isinstance(loss, Tensor)
        return loss.detach()

    training = compare("drop_in", loop=loop)
    assert any("step(closure)" in refusal for refusal in training.status().refusals)


def test_a_closure_that_raises() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.memo["count"] = training.memo.get("count", 0) + 1

        def closure() -> Tensor:
            training.optimizer.zero_grad()
            loss = forward_loss(training, x, y)
            loss.backward()
            if training.memo["count"] == 5:
                raise ZeroDivisionError
            return loss

        try:
            loss = training.optimizer.step(closure)
        except ZeroDivisionError:
            return torch.zeros(())
        assert isinstance(loss, Tensor)
        return loss.detach()

    compare("drop_in", loop=loop, steps=8)


@pytest.mark.support("Optimizers", "LBFGS, with a closure", "replayed, but for the update")
def test_lbfgs() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> float:
            training.optimizer.zero_grad()
            loss = forward_loss(training, x, y)
            loss.backward()
            return loss.item()

        return torch.tensor(training.optimizer.step(closure))

    training = compare("drop_in", build, loop=loop, steps=4, replays=4)
    assert training.status().covered == ("forward", "backward")
    assert any("no update rule for LBFGS" in refusal for refusal in training.status().refusals)


@pytest.mark.support("Precision", "torch.autocast in the loop", "replayed")
def test_autocast_in_the_loop() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=count % 5 != 0):
            output = training.model(x)
            assert output.dtype is (torch.bfloat16 if count % 5 else torch.float32)
            loss = training.loss_fn(output, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop, steps=14, replays=9)


@pytest.mark.parametrize("mode", ["replay", "eager"])
def test_autocast_by_option(mode: str) -> None:
    """As with the model under autocast and its output in float32."""

    def by_hand(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = training.model(x)
        loss = training.loss_fn(output.float(), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", enable_amp=True, mode=mode, reference={"loop": by_hand}, replays=4 if mode == "replay" else 0)


# Models


@pytest.mark.support("Optimizers", "two models and two optimizers", "replayed")
def test_two_models_with_an_optimizer_each() -> None:
    """A generator and a discriminator, the gradients of the one passing through the other."""

    def run(form: str) -> tuple[list[float], list[Tensor], list[kitsune.Status]]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizers = [Training(form, model, adam(model)).optimizer for model in (generator, judge)]
        losses = []
        for index in range(8):
            (x, _), _ = batch(index)
            fake = generator(x)
            optimizers[1].zero_grad()
            loss = functional.softplus(-judge(x)).mean() + functional.softplus(judge(fake.detach())).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            other = functional.softplus(-judge(fake)).mean()
            other.backward()
            optimizers[0].step()
            losses += [loss.item(), other.item()]
        params = [param.detach() for model in (generator, judge) for param in model.parameters()]
        return losses, params, [o.status() for o in optimizers if isinstance(o, kitsune.KitsuneOptimizer)]

    losses, params, statuses = run("drop_in")
    expected, wanted, _ = run("eager")
    assert losses == expected
    assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))
    assert all(status.mode == "replay" and status.replays >= 6 for status in statuses)


def test_one_model_with_two_optimizers() -> None:
    def run(form: str) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = Net()
        first, last = (Training(form, model, adam(part)).optimizer for part in (model.first, model.last))
        losses = []
        for index in range(8):
            (x, y), _ = batch(index)
            first.zero_grad()
            last.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            first.step()
            if index % 2:
                last.step()
            losses.append(loss.item())
        return losses, [param.detach() for param in model.parameters()]

    (losses, params), (expected, wanted) = run("drop_in"), run("eager")
    assert losses == expected
    assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))


def test_one_optimizer_over_two_models() -> None:
    def run(form: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 3)
        model = nn.ModuleList([encoder, decoder])
        training = Training(form, model, adam(model))
        losses = []
        for index in range(8):
            (x, y), _ = batch(index)
            training.optimizer.zero_grad()
            loss = functional.cross_entropy(decoder(torch.relu(encoder(x))), y)
            loss.backward()
            training.optimizer.step()
            losses.append(loss.item())
        return losses, training

    losses, training = run("drop_in")
    assert losses == run("eager")[0]
    assert training.status().replays == 12


def test_a_parameter_outside_of_any_module() -> None:
    def run(form: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        model, temperature = Net(), nn.Parameter(torch.ones(()))
        training = Training(form, model, torch.optim.Adam([*model.parameters(), temperature], lr=0.05, fused=True))
        losses = []
        for index in range(8):
            (x, y), _ = batch(index)
            training.optimizer.zero_grad()
            loss = functional.cross_entropy(model(x) * temperature, y)
            loss.backward()
            training.optimizer.step()
            losses.append(loss.item())
        return losses, training

    losses, training = run("drop_in")
    assert losses == run("eager")[0]
    assert training.status().replays == 6
    assert training.status().covered == ("forward", "backward", "update")


def test_a_part_of_the_model_is_called_before_the_whole() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y) + training.model.first(x).square().mean()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def edit(training: Training, index: int) -> None:
        if index == 0:
            training.model.first(batch(0)[0][0])

    compare("drop_in", loop=loop, edit=edit, replays=0)


def test_a_model_and_a_part_of_it_in_one_step() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y) + training.model.first(x).square().mean()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", loop=loop, replays=4)


def test_two_parameter_sets_in_one_model_of_which_one_is_trained() -> None:
    """Parameters that the optimizer does not own get their gradients, as in any loop."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.Adam(model.last.parameters(), lr=0.05, fused=True)

    training = compare("drop_in", build)
    assert training.model.first.weight.grad is not None


# Copies and the end


def test_repeated_copies_of_the_optimizer_leave_the_original_as_fast() -> None:
    """As in a loop that keeps the best state of each epoch."""

    def edit(training: Training, index: int) -> None:
        if index >= 3 and index % 2:
            training.memo["copy"] = copy.deepcopy(training.optimizer)
            gc.collect()

    training = compare("drop_in", edit=edit, steps=16, replays=12)
    assert training.status().mode == "replay"
    twin = training.memo["copy"]
    assert isinstance(twin, kitsune.KitsuneOptimizer)
    assert twin.config == training.optimizer.config
    assert twin.config.mode == "replay"
    assert twin.param_groups[0]["params"][0] is not training.optimizer.param_groups[0]["params"][0]


@pytest.mark.support("Optimizers", "deepcopy and pickle", "replayed")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_trains_on(duplicate: Callable[[Any], Any]) -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    twin, optimizer = duplicate((model, training.optimizer))
    assert twin._compiled_call_impl is None
    other = Training("eager", twin, optimizer)
    other.loss_fn = functional.cross_entropy
    assert other.run(5, start=4) == training.run(5, start=4)
    assert other.optimizer.status().replays == 3  # type: ignore[attr-defined]
    assert training.status().replays == 7


def test_the_model_in_use_can_be_copied_and_saved(tmp_path: Any) -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    (x, _), _ = batch(9)
    replays = training.status().replays
    for other in (twin, loaded):
        assert torch.equal(other(x), model.forward(x))
    assert training.status().replays == replays


@pytest.mark.support("Failure", "models and optimizers that are dropped free everything", "replayed")
def test_no_hook_is_left_behind_and_everything_is_freed() -> None:
    before = num_looking()
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    assert num_looking() == before + 1
    training.run(5)
    assert num_looking() == before
    references = [weakref.ref(thing) for thing in (model, plain, training.optimizer, model.first.weight)]
    del model, plain, training
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_an_optimizer_that_is_dropped_gives_the_model_back() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(5)
    del training
    gc.collect()
    (x, _), _ = batch(0)
    assert torch.equal(model(x), model.forward(x))
    assert model._compiled_call_impl is None
    assert compare("drop_in").status().replays == 4


def test_an_optimizer_that_was_never_used_leaves_no_hook() -> None:
    before = num_looking()
    optimizer = kitsune.KitsuneOptimizer(adam(Net()))
    assert num_looking() == before + 1
    del optimizer
    gc.collect()
    assert num_looking() == before


def test_an_idle_optimizer_does_not_slow_others_down() -> None:
    idle = kitsune.KitsuneOptimizer(sgd(Net()))
    assert compare("drop_in").status().replays == 4
    assert idle.status().mode == "idle"


# What cannot be captured


@pytest.mark.support("Failure", "an exception in the model", "raises, as in plain PyTorch")
def test_exceptions_in_the_users_forward_reach_the_user() -> None:
    class Raising(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise LookupError("the user's own")
            return super().forward(x)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Raising()
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index in (0, 4):
            training.model.fails = True
            with pytest.raises(LookupError, match="the user's own"):
                training.model(batch(0)[0][0])
            training.model.fails = False

    compare("drop_in", build, steps=9, edit=edit, replays=2)


def test_a_wrong_argument_fails_as_in_eager() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(4)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(2, 5))
    training.run(2, start=4)
    assert training.status().replays == 4
