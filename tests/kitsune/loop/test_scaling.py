"""Float16 in a loop that has no gradient scaler: Kitsune brings one, which scales within the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.capture.split_program import scale_place
from kitsune.loop.scaling import GradScaler, scaled, unscaled
from tests.kitsune.training import Batch, Build, Net, Training, adam, batch, compare, net_and_adam, plain_loop, sgd

HALF: dict[str, Any] = {"enable_amp": True, "amp_dtype": torch.float16}
OVERFLOWS = (2, 5, 6, 11)
MODES = [("eager", 0), ("replay", 8)]

Loss = Callable[[Training, Tensor, Tensor], Tensor]


def batches(index: int, *, device: str = "cpu") -> Batch:
    (x, y), _ = batch(index, device=device)
    if index in OVERFLOWS:
        x[0, 0] = float("inf")
    return (x, y), {}


def by_hand(loss: Loss) -> Callable[..., Tensor]:
    """The loop with autocast and torch's scaler; gradients are unscaled before anybody looks at them."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        scaler = training.memo.setdefault("scaler", torch.amp.GradScaler(x.device.type))
        training.optimizer.zero_grad()
        model = training.model

        def half(*args: Any) -> Any:
            with torch.autocast(x.device.type, torch.float16):
                output = model(*args)
            return output.float()

        training.model = half
        try:
            found = loss(training, x, y)
        finally:
            training.model = model
        scaler.scale(found).backward()
        scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.memo["course"] = [*training.memo.get("course", []), scaler.get_scale()]
        return found.detach()

    return loop


def without_scaler(loss: Loss) -> Callable[..., Tensor]:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        found = loss(training, x, y)
        found.backward()
        training.optimizer.step()
        if isinstance(training.optimizer, kitsune.KitsuneOptimizer):
            assert training.optimizer.grad_scaler is not None
            course = training.optimizer.grad_scaler.get_scale()
            training.memo["course"] = [*training.memo.get("course", []), course]
        return found.detach()

    return loop


def usual(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return training.loss_fn(training.model(x), y)


def with_decay(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """A part of the loss that does not come from the model."""
    params = [param for group in training.optimizer.param_groups for param in group["params"]]
    return usual(training, x, y) + 0.125 * sum(param.square().sum() for param in params)


def of_two_calls(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return training.loss_fn(training.model(x) + training.model(2 * x), y)


def of_inputs_with_gradients(training: Training, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    return usual(training, x, y) + (x * training.model(x * x)[:, :1]).sum() / 256


def compare_scaled(loss: Loss, build: Build = net_and_adam, **options: Any) -> Training:
    """Compares the training and the course of the scale with those of the loop with a scaler of torch's."""
    courses: dict[str, list[float]] = {}

    def edit(training: Training, _index: int) -> None:
        courses[training.form] = training.memo.setdefault("course", [])

    options = {"batches": batches, "steps": 14, **HALF, **options}
    loop, reference = without_scaler(loss), {"loop": by_hand(loss)}
    training = compare("drop_in", build, loop=loop, edit=edit, reference=reference, **options)
    assert courses["drop_in"] == courses["eager"]
    assert courses["eager"][-1] == 2.0**16 / 2 ** len(OVERFLOWS[: len([one for one in OVERFLOWS if one < 13])])
    return training


@pytest.mark.support("Precision", "enable_amp in float16 in a loop without a scaler: Kitsune brings one", "replayed")
@pytest.mark.parametrize(("mode", "replays"), MODES)
@pytest.mark.parametrize("loss", [usual, with_decay, of_inputs_with_gradients])
def test_a_loop_without_a_scaler(loss: Loss, mode: str, replays: int) -> None:
    """Every second gradient or so would be zero otherwise; here they are those of torch's scaler, bit by bit."""
    rounding = {} if loss is usual else {"rtol": 1e-6, "atol": 1e-7}  # terms are added in another order
    compare_scaled(loss, mode=mode, replays=replays, **rounding)


def test_several_calls_in_an_iteration() -> None:
    """A replayed call cannot be made twice before its backward pass: these are eager."""
    compare_scaled(of_two_calls, replays=0, rtol=1e-3, atol=1e-4)


def test_a_loss_that_is_deferred() -> None:
    training = compare_scaled(usual, defer_loss=True, replays=8)
    assert "loss" in training.status().covered


@pytest.mark.parametrize(("mode", "replays"), MODES)
def test_optimizers_whose_updates_are_not_replayed_are_left_out_too(mode: str, replays: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.Adafactor(model.parameters(), lr=0.05)

    compare_scaled(usual, build, mode=mode, replays=replays)


@pytest.mark.parametrize(("mode", "replays"), MODES)
def test_gradients_that_would_vanish(mode: str, replays: int) -> None:
    """They reach the parameters in full, and the hooks and the loop see them as they are."""

    def loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
        return 1e-7 * usual(training, x, y)

    seen: dict[str, list[Tensor]] = {"eager": [], "drop_in": []}

    def run(form: str, loop: Callable[..., Tensor], **options: Any) -> None:
        torch.manual_seed(3)
        model = Net()
        training = Training(form, model, sgd(model), loop=loop, **options)
        for index in range(10):
            (x, y), _ = batch(index)
            training.step(x, y)
            seen[form] += [param.grad.clone() for param in model.parameters()]
        if form == "drop_in":
            assert training.status().replays >= replays

    run("drop_in", without_scaler(loss), mode=mode, **HALF)
    run("eager", lambda training, x, y: _float32(loss, training, x, y))
    for one, other in zip(seen["drop_in"], seen["eager"], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-11)


def _float32(loss: Loss, training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    found = loss(training, x, y)
    found.backward()
    training.optimizer.step()
    return found.detach()


def test_a_closure_is_called_once_and_then_the_update_may_be_left_out() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            training.optimizer.zero_grad()
            loss = usual(training, x, y)
            loss.backward()
            return loss

        loss = training.optimizer.step(closure)
        return loss.detach()

    compare("drop_in", loop=loop, reference={"loop": by_hand(usual)}, batches=batches, steps=12, replays=6, **HALF)


def test_an_optimizer_that_calls_its_closure_again_and_again_is_refused() -> None:
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(torch.optim.LBFGS(model.parameters()), **HALF)
    with pytest.raises(RuntimeError, match="closure once"):
        optimizer.step(lambda: model(torch.randn(2, 4)).sum())


def test_replays_are_verified() -> None:
    training = compare_scaled(usual, verify=2, replays=6)
    assert "differ" not in str(training.status())


def test_a_verified_iteration_leaves_the_scaler_alone() -> None:
    torch.manual_seed(0)
    model = Net()
    training = Training("drop_in", model, adam(model), loop=without_scaler(usual), **HALF)
    training.run(4)
    optimizer = training.optimizer
    assert isinstance(optimizer, kitsune.KitsuneOptimizer)
    assert optimizer.grad_scaler is not None
    before = optimizer.grad_scaler.state_dict()
    for index in (4, OVERFLOWS[0]):
        (x, y), _ = batches(index)
        found = kitsune.verify(training.step, x, y, optimizer=optimizer)
        assert found.replayed, found
        assert found.differences == ()
        assert optimizer.grad_scaler.state_dict() == before


def test_accumulation() -> None:
    """The scale stays for all backward passes of an iteration."""

    def accumulated(half: Callable[[Training], Any], training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        for part in range(3):
            loss = training.loss_fn(half(training)(x + part), y)
            training.memo["scale"](loss).backward()
        return loss.detach()

    def reference(training: Training, x: Tensor, y: Tensor) -> Tensor:
        scaler = training.memo.setdefault("scaler", torch.amp.GradScaler("cpu"))
        training.memo["scale"] = scaler.scale

        def half(training: Training) -> Any:
            def call(x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.float16):
                    output: Tensor = training.model(x)
                return output.float()

            return call

        loss = accumulated(half, training, x, y)
        scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        return loss

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.memo["scale"] = lambda loss: loss
        loss = accumulated(lambda training: training.model, training, x, y)
        training.optimizer.step()
        return loss

    compare(
        "drop_in", loop=loop, reference={"loop": reference}, batches=batches, steps=12, rtol=1e-6, atol=1e-7, **HALF
    )


def test_it_is_checkpointed_and_copied() -> None:
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), **HALF)
    training = Training("eager", model, optimizer)
    training.run(OVERFLOWS[0] + 1, batches)
    assert optimizer.grad_scaler is not None
    state = optimizer.grad_scaler.state_dict()
    assert state["scale"] == 2.0**15
    other = kitsune.KitsuneOptimizer(adam(Net()), **HALF)
    assert other.grad_scaler is not None
    other.grad_scaler.load_state_dict(state)
    assert other.grad_scaler.get_scale() == 2.0**15
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.grad_scaler is not None
    assert twin.grad_scaler.state_dict() == state
    assert pickle.loads(pickle.dumps(optimizer)).grad_scaler.state_dict() == state
    Training("eager", twin_model, twin).run(3, batches, start=3)
    assert optimizer.grad_scaler.state_dict() == state


def test_there_is_none_without_float16() -> None:
    for options in ({}, {"enable_amp": True}, {"amp_dtype": torch.float16}):
        assert kitsune.KitsuneOptimizer(adam(Net()), **options).grad_scaler is None


class Box:
    """What torch knows nothing of."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Boxed(Net):
    def forward(self, x: Tensor) -> Box:  # type: ignore[override]
        return Box(super().forward(x))


def test_an_output_that_cannot_be_scaled_has_the_gradient_that_it_has_without() -> None:
    """It is not replayed."""

    def loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
        output = training.model(x)
        return training.loss_fn(output.output.float(), y)

    def reference(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = training.model(x)
        found = training.loss_fn(output.output.float(), y)
        found.backward()
        training.optimizer.step()
        return found.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Boxed()
        return model, adam(model)

    compare("drop_in", build, loop=without_scaler(loss), reference={"loop": reference}, replays=0, **HALF)


# By itself


def scale() -> Tensor:
    return torch.tensor(2.0**12)


def test_gradients_are_multiples_within_and_not_outside() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), list[Tensor]()
    x = torch.randn(5, 4, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    model[1].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    call = unscaled(scaled(lambda args, kwargs: model(*args, **kwargs), scale()), scale())
    call((x,), {}).square().sum().backward()
    for tensor, grad in zip([x, *model.parameters()], wanted, strict=True):
        torch.testing.assert_close(tensor.grad, grad)
    within = torch.autograd.grad(model[2](hidden := model[1](model[0](x))).square().sum(), hidden)[0]
    torch.testing.assert_close(seen[0], within * 2.0**12)


def test_what_is_nested_and_what_has_no_gradient() -> None:
    weight, bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def call(args: tuple[Any, ...], kwargs: Any) -> Any:
        return {"a": [args[0] * weight, 7], "b": (args[0].detach(), kwargs["y"] + bias.detach())}

    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    found = unscaled(scaled(call, scale()), scale())((x,), {"y": y})
    assert found["a"][1] == 7
    assert not found["b"][0].requires_grad
    found["a"][0].sum().backward()
    torch.testing.assert_close(x.grad, weight.detach())
    torch.testing.assert_close(weight.grad, x.detach())
    assert bias.grad is None
    with torch.no_grad():
        assert not unscaled(scaled(call, scale()), scale())((x,), {"y": y})["a"][0].requires_grad


def test_a_graph_that_is_kept() -> None:
    """The passes within are kept as long as the pass that they are a part of."""
    weight = nn.Parameter(torch.randn(3))
    call = unscaled(scaled(lambda args, kwargs: (args[0] * weight).exp(), scale()), scale())
    loss = call((torch.randn(3),), {}).sum()
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_one_that_is_differentiated_twice_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3))
    call = unscaled(scaled(lambda args, kwargs: (args[0] * weight).exp(), scale()), scale())
    with pytest.raises(kitsune.KitsuneError, match="bfloat16"):
        torch.autograd.grad(call((torch.randn(3),), {}).sum(), weight, create_graph=True)


def test_a_graph_that_is_not_scaled_has_no_place_of_a_scale() -> None:
    assert scale_place(torch.fx.symbolic_trace(nn.Linear(2, 2)).graph) is None


def test_the_scale_is_always_the_same_tensor() -> None:
    scaler = GradScaler("cpu", growth_interval=1)
    scale = scaler.on(torch.device("cpu"))
    param = nn.Parameter(torch.ones(2))
    for gradient, factor in ((1.0, 2.0), (float("nan"), 1.0), (float("inf"), 0.5)):
        updates = list[bool]()
        param.grad = torch.full((2,), gradient)
        scaler.update_unless_infinite([{"params": [param]}], partial(updates.append, True))
        assert bool(updates) == (gradient == 1.0)
        assert scale.item() == factor * 2.0**16
        assert scaler.on(torch.device("cpu")) is scale
    param.grad = None
    scaler.update_unless_infinite([{"params": [param]}], partial(updates.append, True))
    assert updates == [True]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("defer_loss", [False, True])
def test_a_loop_without_a_scaler_on_a_gpu(defer_loss: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().cuda()
        return model, sgd(model)

    training = compare_scaled(
        usual,
        build,
        batches=partial(batches, device="cuda"),
        defer_loss=defer_loss,
        replays=8,
        rtol=1e-2,
        atol=1e-3,
    )
    assert training.status().executor == "cuda graph"


def test_what_the_reference_does_is_what_torch_does() -> None:
    """Without overflows and scale, as the plain loop under autocast."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    ours, theirs = Training("eager", model, adam(model), loop=by_hand(usual)), Training("eager", twin, adam(twin))
    for index in range(3):
        (x, y), _ = batch(index)
        torch.testing.assert_close(ours.step(x, y), plain_loop(theirs, x, y), rtol=1e-2, atol=1e-3)
    assert functional.cross_entropy(model(x), y).isfinite()
