"""Float16 in a loop that has no gradient scaler: Kitsune brings one, which scales the losses."""

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
from torch.utils.checkpoint import checkpoint

import kitsune
from kitsune.loop.scaling import LossScale
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

        def half_of(module: nn.Module) -> Any:
            def half(*args: Any) -> Any:
                with torch.autocast(x.device.type, torch.float16):
                    output = module(*args)
                return output.float()

            return half

        training.memo |= {"half": half_of, "module": model}
        training.model = half_of(model)
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
            assert training.optimizer.loss_scale is not None
            course = training.optimizer.loss_scale.get_scale()
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
    assert courses["eager"][-1] <= 2.0**16 / 2 ** len(OVERFLOWS)
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


def test_losses_are_not_deferred() -> None:
    """They would be replayed with the backward pass."""
    training = compare_scaled(usual, defer_loss=True, replays=8)
    assert training.status().covered == ("forward", "backward", "update")
    assert training.status().not_in_effect == ("defer_loss",)


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
    with pytest.raises(kitsune.KitsuneError, match="closure once"):
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
    assert optimizer.loss_scale is not None
    before = optimizer.loss_scale.state_dict()
    for index in (4, OVERFLOWS[0]):
        (x, y), _ = batches(index)
        found = kitsune.verify(training.step, x, y, optimizer=optimizer)
        assert found.replayed, found
        assert found.differences == ()
        assert optimizer.loss_scale.state_dict() == before


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
    assert optimizer.loss_scale is not None
    state = optimizer.loss_scale.state_dict()
    assert state["scale"] == 2.0**15
    other = kitsune.KitsuneOptimizer(adam(Net()), **HALF)
    assert other.loss_scale is not None
    other.loss_scale.load_state_dict(state)
    assert other.loss_scale.get_scale() == 2.0**15
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.loss_scale is not None
    assert twin.loss_scale.state_dict() == state
    assert pickle.loads(pickle.dumps(optimizer)).loss_scale.state_dict() == state
    Training("eager", twin_model, twin).run(3, batches, start=3)
    assert optimizer.loss_scale.state_dict() == state


def test_there_is_none_without_float16() -> None:
    for options in ({}, {"enable_amp": True}, {"amp_dtype": torch.float16}):
        assert kitsune.KitsuneOptimizer(adam(Net()), **options).loss_scale is None


# What people do in loops; against torch's scaler


class Twice(nn.Module):
    """An encoder and a head, which the loop calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("its parts are called")


class Auxiliary(Net):
    """Leaves a part of the loss on the module."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.auxiliary = hidden.float().square().mean()
        return self.last(hidden)


class Accumulating(torch.autograd.Function):
    """Adds to the gradients of parameters itself, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x.float()).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x.float())
        torch.autograd.backward(output, grads[0].to(output.dtype))
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Accumulating.apply(self.first(x), self.middle)
        return self.last(hidden.float())


class Reentrant(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: torch.relu(self.first(x)), x.requires_grad_(), use_reentrant=True)
        return self.last(hidden)


class Remembering(nn.Module):
    """Keeps its state, with its graph, over the calls of an iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(12, 8), nn.Linear(8, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 8) if self.state is None else self.state
        self.state = torch.tanh(self.cell(torch.cat([x, state], 1))).float()
        return self.out(self.state)


class Caching(Net):
    """Fills what it is given."""

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x)
        return super().forward(x)


class Sparse(nn.Module):
    """Has gradients of another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x.nan_to_num(0, 0, 0).abs().long() % 5).mean(1) * x.sum(1, keepdim=True))


def of_two_modules(training: Training, x: Tensor, y: Tensor) -> Tensor:
    half = training.memo.get("half", lambda module: module)
    model = training.memo.get("module", training.model)
    return training.loss_fn(half(model.head)(half(model.encoder)(x)), y)


def with_auxiliary(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = usual(training, x, y)
    return loss + training.memo.get("module", training.model).auxiliary


def of_several_steps(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.memo.get("module", training.model).state = None
    return torch.stack([training.loss_fn(training.model(x * factor), y) for factor in (1.0, 2.0, 3.0)]).sum()


def with_cache(training: Training, x: Tensor, y: Tensor) -> Tensor:
    cache: list[Tensor] = []
    loss = training.loss_fn(training.model(x, cache), y)
    assert len(cache) == 1
    return loss


def in_place(training: Training, x: Tensor, y: Tensor) -> Tensor:
    output = training.model(x)
    output += 0.5
    output[:, 0] *= 2
    first, *others = output.unbind(1)
    return training.loss_fn(torch.stack([first, *others], 1), y) + output.max(1).values.mean()


doubled = torch.compile(lambda output, y: 2 * functional.cross_entropy(output, y), backend="aot_eager")


def compiled(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return doubled(training.model(x), y)


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "two modules": (Twice, of_two_modules),
    "a part of the loss on the module": (Auxiliary, with_auxiliary),
    "functions that accumulate themselves": (Reversible, usual),
    "reentrant checkpoints": (Reentrant, usual),
    "state with a graph": (Remembering, of_several_steps),
    "arguments that are filled": (Caching, with_cache),
    "two calls": (Net, of_two_calls),
    "sparse gradients": (Sparse, usual),
    "a compiled loss": (Net, compiled),
    "in place, and several results": (Net, in_place),
}


@pytest.mark.parametrize("mode", ["eager", "replay"])
@pytest.mark.parametrize("name", CASES)
def test_loops_of_many_kinds(name: str, mode: str) -> None:
    kind, loss = CASES[name]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    compare_scaled(loss, build, mode=mode, replays=0, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_hooks_run_once_and_see_scaled_gradients(mode: str) -> None:
    """As with torch's scaler. Those that change gradients change what the update gets."""
    seen: dict[str, dict[int, list[Tensor]]] = {"eager": {}, "drop_in": {}}

    def edit(training: Training, index: int) -> None:
        def note(grad: Tensor, place: int) -> Tensor:
            seen[training.form].setdefault(place, []).append(grad.clone())
            return grad * 0.5

        if index == 3:
            for place, param in enumerate(training.model.parameters()):
                param.register_hook(partial(note, place=place))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, sgd(model)

    options: dict[str, Any] = {"batches": batch, "steps": 6, "edit": edit, "replays": 0, "mode": mode, **HALF}
    compare("drop_in", build, loop=without_scaler(usual), reference={"loop": by_hand(usual)}, **options)
    assert len(seen["eager"]) == 4
    for place, wanted in seen["eager"].items():
        assert len(wanted) == 3
        torch.testing.assert_close(torch.stack(seen["drop_in"][place]), torch.stack(wanted))
        assert max(one.abs().max() for one in wanted) > 1000


def test_two_optimizers_over_one_model() -> None:
    """Where one overflows, the scale of both falls, so that neither waits for ever."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + 64 * self.b(x)

    torch.manual_seed(0)
    model = Both()
    first, second = (
        kitsune.KitsuneOptimizer(torch.optim.SGD(part.parameters(), lr=1e-5), **HALF) for part in (model.a, model.b)
    )
    updates = 0
    for _ in range(60):
        before = model.b.weight.detach().clone()
        first.zero_grad()
        second.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        first.step()
        second.step()
        updates += not torch.equal(before, model.b.weight)
    assert updates >= 45


def test_a_loss_that_is_not_made_by_torchs_functions_is_told_of() -> None:
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0].expand(6, 3)

    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), **HALF)
    (x, _), _ = batch(0)
    optimizer.step()
    assert not optimizer.status().refusals
    optimizer.zero_grad()
    Loss.apply(model(x)).backward()
    optimizer.step()
    assert any("in float16 is not scaled" in refusal for refusal in optimizer.status().refusals)


def test_gradients_that_have_a_graph_and_those_of_parts_are_not_scaled() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = kitsune.KitsuneOptimizer(sgd(model), **HALF)
    x = batch(0)[0][0].requires_grad_()
    for _ in range(3):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        penalty.backward(create_graph=True)
    with torch.autocast("cpu", torch.float16):
        output = twin(x)
    (wanted,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
    torch.testing.assert_close(grad, wanted, rtol=1e-2, atol=1e-3)
    (wanted.norm(dim=1) - 1).square().mean().backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-2, atol=1e-3)


def test_outputs_are_tensors_like_others() -> None:
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), **HALF)
    (x, y), _ = batch(0)
    output = [model(x) for _ in range(2)][-1]
    assert isinstance(output, Tensor)
    assert output.detach().numpy().shape == (6, 3)
    assert type(output.detach()) is Tensor
    loss = functional.cross_entropy(output, y)
    assert type(pickle.loads(pickle.dumps(output.detach()))) is Tensor
    assert repr(loss).startswith("tensor(")
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    total = 0.0
    total += loss
    loss.backward(retain_graph=True)
    first = model.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="scalar outputs"):
        model(x).backward()
    assert optimizer.loss_scale is not None


def test_inputs_of_a_backward_pass() -> None:
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), **HALF)
    (x, y), _ = batch(0)
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward(inputs=[model.last.weight])
    assert model.first.weight.grad is None
    found = model.last.weight.grad.clone()
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(model.last.weight.grad, found)


def test_a_train_step_goes_on_with_the_scale() -> None:
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), **HALF)
    Training("eager", model, optimizer).run(OVERFLOWS[0] + 1, batches)
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer)
    assert step.grad_scaler is not None
    assert step.grad_scaler.get_scale() == 2.0**15


def test_a_scaler_of_the_loops_is_the_only_one() -> None:
    """After a first update that both leave out."""
    torch.manual_seed(0)
    model, scaler, updates = Net(), torch.amp.GradScaler("cpu"), 0
    optimizer = kitsune.KitsuneOptimizer(sgd(model), **HALF)
    for index in range(10):
        (x, y), _ = batch(index)
        before = model.first.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        updates += not torch.equal(before, model.first.weight)
    assert updates == 9
    assert scaler.get_scale() == 2.0**15
    assert any("gradient scaler" in refusal for refusal in optimizer.status().refusals)


def test_an_empty_group() -> None:
    model = Net()
    groups = [{"params": []}, {"params": list(model.parameters())}]
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(groups, lr=0.1), **HALF)
    Training("eager", model, optimizer).run(3)


def test_a_scale_changes_by_the_rules_of_torch() -> None:
    scale = LossScale("cpu")
    scale.load_state_dict({**scale.state_dict(), "growth_interval": 1})
    param = nn.Parameter(torch.ones(2))
    for gradient, factor in ((1.0, 2.0), (float("nan"), 1.0), (float("inf"), 0.5)):
        updates = list[bool]()
        param.grad = torch.full((2,), gradient)
        scale.update_unless_infinite([{"params": [param]}], partial(updates.append, True))
        assert bool(updates) == (gradient == 1.0)
        assert scale.get_scale() == scale.on(torch.device("cpu")).item() == factor * 2.0**16
    param.grad = None
    scale.update_unless_infinite([{"params": [param]}], partial(updates.append, True))
    assert updates == [True]


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


# On a GPU


@pytest.mark.gpu
def test_a_loop_without_a_scaler_on_a_gpu() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().cuda()
        return model, sgd(model)

    training = compare_scaled(
        usual,
        build,
        batches=partial(batches, device="cuda"),
        replays=8,
        rtol=1e-2,
        atol=1e-3,
    )
    assert training.status().executor == "cuda graph"
