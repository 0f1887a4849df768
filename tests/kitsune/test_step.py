"""`TrainStep`: what one call does, its options, and what it hands out."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from tests.kitsune.training import Batch, Net, Training, adam, batch, compare, net_and_adam, sgd


def by_hand(**step: Any) -> Callable[..., Tensor]:
    """The loop that `TrainStep(**step)` stands for, written as its documentation says."""
    accumulate = step.get("accumulate", 1)
    scaler: torch.amp.GradScaler | None = step.get("grad_scaler")
    max_norm = step.get("clip_grad_norm")
    forward = step.get("forward")

    def loop(training: Training, *args: Any, **kwargs: Any) -> Tensor:
        calls = training.memo["calls"] = training.memo.get("calls", 0) + 1
        model, optimizer = training.model, training.optimizer
        if forward is not None:
            loss = forward(model, *args, **kwargs)
        else:
            loss = training.loss_fn(model(*args[:-1], **kwargs), args[-1])
        mean = loss / accumulate
        (mean if scaler is None else scaler.scale(mean)).backward()
        if calls % accumulate:
            return loss.detach()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return loop


def compare_step(step: Mapping[str, Any], **arguments: Any) -> Training:
    """Like `compare`, for a `TrainStep` with these arguments."""
    return compare("train_step", step=step, reference={"loop": by_hand(**step)}, **arguments)


# The loss, and how it is given


def test_the_loss_belongs_to_the_caller() -> None:
    model, optimizer = net_and_adam()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay")
    losses = [step(*batch(index)[0]) for index in range(6)]
    values = [float(loss) for loss in losses]
    assert all(loss.shape == () and not loss.requires_grad and loss.grad_fn is None for loss in losses)
    losses[2].add_(100)
    step(*batch(6)[0])
    assert [float(loss) for loss in losses] == [*values[:2], pytest.approx(values[2] + 100), *values[3:]]


def test_a_loss_with_one_element_in_a_dimension() -> None:
    compare("train_step", loss_fn=lambda output, target: functional.cross_entropy(output, target).reshape(1))


def test_the_forward_form() -> None:
    def forward(model: nn.Module, inputs: dict[str, Tensor], *, weight: float) -> Tensor:
        return functional.cross_entropy(model(inputs["x"]), inputs["y"]) * weight

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return ({"x": x, "y": y},), {"weight": 0.5}

    compare_step({"forward": forward}, batches=batches)


def test_the_forward_form_with_a_model_that_computes_its_own_loss() -> None:
    class WithLoss(Net):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(super().forward(x), target)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = WithLoss()
        return model, adam(model)

    compare_step({"forward": lambda model, x, y: model(x, y)}, build=build)


def test_a_forward_that_calls_the_model_twice() -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y) + model(-x).square().mean()

    compare_step({"forward": forward}, build=lambda: (model := Net(batch_norm=True, dropout=0.3), adam(model)))


def test_a_frozen_teacher_in_the_loss() -> None:
    torch.manual_seed(11)
    teacher = Net().requires_grad_(False).eval()

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x), teacher(x)) + functional.cross_entropy(model(x), y)

    before = copy.deepcopy(teacher.state_dict())
    compare_step({"forward": forward})
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_a_teacher_that_moves_between_steps() -> None:
    torch.manual_seed(11)
    start = Net().requires_grad_(False).state_dict()
    teacher = Net().requires_grad_(False)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x), teacher(x)) + functional.cross_entropy(model(x), y)

    def edit(training: Training, index: int) -> None:
        if index == 0:
            teacher.load_state_dict(start)
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), training.model.parameters(), strict=True):
                own.lerp_(other, 0.1)

    compare_step({"forward": forward}, edit=edit)


# Gradients


def test_gradients_are_none_after_a_call() -> None:
    training = compare("train_step")
    assert all(param.grad is None for param in training.model.parameters())


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_kept_gradients(clip: float | None, accumulate: int) -> None:
    step = {"keep_grads": True, "clip_grad_norm": clip, "accumulate": accumulate}
    model, optimizer = net_and_adam()
    other = copy.deepcopy(model)
    training = Training("train_step", model, optimizer, step=step)
    eager = Training("eager", other, adam(other), loop=by_hand(**step))
    eager.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    held = []
    for index in range(8):
        if index % accumulate == 0:
            for param in other.parameters():
                param.grad = None
        training.run(1, start=index)
        eager.run(1, start=index)
        if index % accumulate != accumulate - 1:
            continue
        for param, reference in zip(model.parameters(), other.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(param.grad, reference.grad, rtol=1e-6, atol=1e-9)
            held.append((param.grad, param.grad.clone()))
    assert training.status().replays >= 6
    assert all(torch.equal(grad, value) for grad, value in held), "a kept gradient was overwritten by a later step"


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_grad_norm": 0.5}], ids=str)
def test_kept_gradients_that_the_update_writes_to(options: dict[str, Any], scales: bool) -> None:
    """torch's `foreach` form of SGD adds Nesterov's momentum to them, unless a step is skipped for an overflow.

    It may be infinite then.
    """

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))  # get one gradient

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + self.first + self.second)

    def trained(mode: str) -> Iterator[tuple[Training, list[Tensor]]]:
        torch.manual_seed(0)
        model = Shared().double()
        optimizer = sgd(model, nesterov=True, fused=None, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scales else None
        step = {"keep_grads": True, "grad_scaler": scaler, **options}
        training = Training("train_step", model, optimizer, step=step, mode=mode)
        for index in range(12):
            (x, y), _ = batch(index, dtype=torch.float64)
            if scales and index == 7:
                x[0, 0] = 1e308  # scaled gradients of the first weights are infinite, and that of the last bias is not
                optimizer.state[model.net.last.bias]["momentum_buffer"][0] = torch.inf
            if scales and index == 8:
                optimizer.state[model.net.last.bias]["momentum_buffer"][0] = 0.0
            training.step(x, y)
            params = list(model.parameters())
            yield training, [*params, *(param.grad for param in params if param.grad is not None)]

    for (_, wanted), (replayed, found) in zip(trained("eager"), trained("replay"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, equal_nan=True)
        num_replays = replayed.status().replays
    assert num_replays >= 10


def test_kept_gradients_of_parameters_that_a_step_leaves_out() -> None:
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    optimizer = adam(model)

    def forward(model: nn.ModuleList, x: Tensor, y: Tensor, which: int) -> Tensor:
        return functional.cross_entropy(model[which](x), y)

    step = kitsune.TrainStep(model, optimizer=optimizer, forward=forward, keep_grads=True, mode="replay")
    for index in range(8):
        which = index % 2
        step(*batch(index)[0], which)
        assert model[which].weight.grad is not None
        assert model[1 - which].weight.grad is None
    assert step.status().replays >= 4


def test_a_kept_gradient_of_a_scalar_is_the_users() -> None:
    """The gradient of a parameter that is added to the loss is the loss's own gradient, a constant of the graph."""

    class Biased(Net):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(()))

    def forward(model: Biased, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y) + model.offset

    model = Biased()
    step = kitsune.TrainStep(model, optimizer=sgd(model), forward=forward, keep_grads=True, mode="replay")
    for index in range(6):
        step(*batch(index)[0])
        assert model.offset.grad is not None
        assert model.offset.grad.item() == 1.0
        assert model.last.weight.grad is not None
        assert model.last.weight.grad.any()
        model.offset.grad.zero_()
    assert step.status().replays == 5


def test_kept_gradients_go_with_the_next_accumulating_call() -> None:
    model, optimizer = net_and_adam()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, keep_grads=True, accumulate=2, mode="replay")
    for index in range(10):
        step(*batch(index)[0])
        assert all((param.grad is not None) == bool(index % 2) for param in model.parameters())
    assert step.status().replays >= 6


@pytest.mark.parametrize("keep_grads", [False, True])
def test_gradients_from_before_a_call_are_discarded(keep_grads: bool) -> None:
    def edit(training: Training, index: int) -> None:
        for param in training.model.parameters():
            param.grad = torch.full_like(param, 1e3) if training.form != "eager" else None

    training = compare("train_step", step={"keep_grads": keep_grads}, reference={}, edit=edit)
    for param in training.model.parameters():
        assert param.grad is None if not keep_grads else param.grad.abs().max() < 100


def test_parameters_that_the_optimizer_does_not_own_get_no_gradient() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.last.parameters(), lr=0.05)
    training = Training("train_step", model, optimizer)
    before = model.first.weight.detach().clone()
    training.run(5)
    assert training.status().replays == 4
    assert torch.equal(model.first.weight, before)
    assert all(param.grad is None for param in model.parameters())


# Clipping


@pytest.mark.support("Gradients", "clipping by norm", "replayed")
@pytest.mark.parametrize("max_norm", [0.05, 1.0, 1e6])
def test_clipping(max_norm: float) -> None:
    compare_step({"clip_grad_norm": max_norm}, rtol=1e-6, atol=1e-8)


def test_clipping_leaves_small_gradients_alone() -> None:
    compare_step({"clip_grad_norm": 1e6})


def test_clipping_gradients_that_are_not_finite() -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x * (float("inf") if index == 4 else 1.0), y), {}

    compare_step({"clip_grad_norm": 1.0}, batches=batches, rtol=1e-6, atol=1e-8)


# Accumulation


@pytest.mark.support("Gradients", "accumulation over 2, 4 and 8 micro-batches", "replayed")
@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_accumulation(accumulate: int) -> None:
    compare_step({"accumulate": accumulate}, steps=4 * accumulate, replays=2 * accumulate, rtol=1e-6, atol=1e-8)


def test_accumulation_with_clipping_and_everything_random() -> None:
    step = {"accumulate": 2, "clip_grad_norm": 0.1}
    build = lambda: (model := Net(batch_norm=True, dropout=0.3), sgd(model))  # noqa: E731
    compare_step(step, build=build, steps=10, replays=6, rtol=1e-6, atol=1e-8)


def test_accumulation_over_batches_of_two_sizes() -> None:
    """The sums pass between replayed and eager calls in every order."""
    sizes = (6, 6, 4, 6, 4, 6, 6, 4, 4, 4, 6, 6, 4, 6)
    compare_step(
        {"accumulate": 2},
        steps=len(sizes),
        batches=lambda index: batch(index, size=sizes[index]),
        replays=6,
        rtol=1e-6,
        atol=1e-8,
    )


def test_accumulation_where_the_calls_use_different_parameters() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        return model, adam(model)

    def forward(model: nn.ModuleList, x: Tensor, y: Tensor, which: int) -> Tensor:
        return functional.cross_entropy(model[which](x), y)

    used = (0, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0)

    def batches(index: int) -> Batch:
        return (*batch(index)[0], used[index]), {}

    step = {"accumulate": 2, "forward": forward}
    compare_step(step, build=build, steps=len(used), batches=batches, replays=4, rtol=1e-6, atol=1e-8)


def test_accumulation_after_parameters_were_unfrozen() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.first.requires_grad_(False)
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.model.requires_grad_()

    compare_step({"accumulate": 2}, build=build, steps=12, edit=edit, replays=4, rtol=1e-6, atol=1e-8)


def test_accumulation_after_a_parameter_group_was_added() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.first.requires_grad_(False)
        return model, torch.optim.Adam(model.last.parameters(), lr=0.05, fused=True)

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.model.first.requires_grad_()
            training.optimizer.add_param_group({"params": list(training.model.first.parameters())})

    compare_step({"accumulate": 2}, build=build, steps=12, edit=edit, replays=4, rtol=1e-6, atol=1e-8)


def test_accumulation_survives_an_exception() -> None:
    """A call that raised counts as none: the one that repeats it takes its place."""
    compare_step(
        {"accumulate": 2, "forward": raising_forward},
        steps=10,
        edit=raise_once(5),
        replays=4,
        rtol=1e-6,
        atol=1e-8,
    )


RAISE = False


def raising_forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    if RAISE:
        raise LookupError("the user's own")
    return loss


def raise_once(step: int) -> Callable[[Training, int], None]:
    def edit(training: Training, index: int) -> None:
        if index == step and training.form != "eager":
            globals()["RAISE"] = True
            try:
                with pytest.raises(LookupError, match="the user's own"):
                    training.step(*batch(77)[0])
            finally:
                globals()["RAISE"] = False

    return edit


def test_an_exception_in_the_users_forward_reaches_the_user() -> None:
    compare_step({"forward": raising_forward}, steps=8, edit=raise_once(4), replays=3)


# Precision


@pytest.mark.parametrize("batch_norm", [False, True])
def test_autocast(batch_norm: bool) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss_fn(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    build = lambda: (model := Net(batch_norm=batch_norm), adam(model))  # noqa: E731
    compare("train_step", build, enable_amp=True, reference={"loop": loop})


def test_a_model_in_double_precision() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    compare(
        "train_step", build, batches=lambda index: batch(index, dtype=torch.float64), rtol=1e-12, atol=1e-14, steps=8
    )


# Optimizers


def test_a_kitsune_optimizer_is_taken_over() -> None:
    model, plain = net_and_adam()
    wrapped = kitsune.KitsuneOptimizer(plain, mode="replay")
    step = kitsune.TrainStep(model, functional.cross_entropy, wrapped, mode="replay")
    for index in range(4):
        step(*batch(index)[0])
    assert step.status().replays == 3
    assert model._compiled_call_impl is None
    status = wrapped.status()
    assert status.mode == "eager"
    assert "TrainStep" in status.reason
    wrapped.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    step(*batch(4)[0])
    assert step.status().replays == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_options_of_a_kitsune_optimizer_are_taken_over() -> None:
    model, plain = net_and_adam()
    chosen = kitsune.KitsuneOptimizer(plain, mode="replay", max_memory="1GB", num_streams=2)
    step = kitsune.TrainStep(model, functional.cross_entropy, chosen, num_streams=3)
    assert step.config == dataclasses.replace(chosen.config, num_streams=3)
    chosen = kitsune.KitsuneOptimizer(plain, mode="replay")
    step = kitsune.TrainStep(model, functional.cross_entropy, chosen, config=kitsune.Config(mode="eager"))
    assert step.config == kitsune.Config(mode="eager")


def test_an_optimizer_without_a_rule_runs_eagerly() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.Adafactor(model.parameters())

    training = compare("train_step", build, replays=0)
    status = training.status()
    assert status.mode == "eager"
    assert "Adafactor" in status.reason


def test_a_subclass_of_a_known_optimizer_runs_eagerly() -> None:
    class Doubling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            super().step(closure)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, Doubling(model.parameters(), lr=0.1)

    training = compare("train_step", build, replays=0)
    assert "Doubling" in training.status().reason


@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"amsgrad": True, "fused": True},
        {"maximize": True, "fused": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "fused": True},
    ],
    ids=str,
)
def test_options_of_adam(options: dict[str, Any]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.Adam(model.parameters(), lr=0.05, **options)

    exact = options.get("fused", False)
    compare("train_step", build, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


# Wrong arguments


def make(**changes: Any) -> kitsune.TrainStep:
    model = Net()
    arguments = {"model": model, "loss_fn": functional.cross_entropy, "optimizer": adam(model), **changes}
    return kitsune.TrainStep(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda x: x}, "model must be a torch.nn.Module"),
        ({"optimizer": None}, "optimizer must be a torch.optim.Optimizer, got NoneType"),
        ({"optimizer": torch.optim.Adam}, "optimizer must be a torch.optim.Optimizer"),
        ({"loss_fn": None}, "either loss_fn or forward"),
        ({"forward": lambda model, x: x}, "either loss_fn or forward"),
        ({"loss_fn": 3}, "loss_fn must be callable, got int"),
        ({"loss_fn": None, "forward": "x"}, "forward must be callable, got str"),
        ({"grad_scaler": "yes"}, "grad_scaler must be"),
    ],
)
def test_arguments_of_a_wrong_type(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_grad_norm": 0}, "clip_grad_norm must be a positive number, got 0"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm must be"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm must be"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm must be"),
        ({"accumulate": "x"}, "accumulate must be a whole number from 1 up, got 'x'"),
        ({"accumulate": 0}, "accumulate must be a whole number"),
        ({"accumulate": 1.5}, "accumulate must be a whole number"),
        (
            {
                "enable_amp": True,
                "amp_dtype": torch.float16,
                "grad_scaler": torch.amp.GradScaler("cpu", enabled=False),
            },
            "not enabled",
        ),
        ({"mode": "fast"}, "'auto', 'replay', 'eager'"),
        ({"mod": "replay"}, "option 'mod'"),
    ],
)
def test_arguments_of_a_wrong_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_an_optimizer_whose_parameters_are_all_frozen() -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        kitsune.TrainStep(model, functional.cross_entropy, adam(model))


def of_the_first_layer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The others have gradients, but nobody trains them."""
    model = Net()
    return model, adam(model.first)


@pytest.mark.parametrize("mode", ["replay", "auto", "eager"])
def test_parameters_that_are_all_frozen_for_a_while(mode: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index in (3, 6):
            training.model.first.requires_grad_(index == 6)

    training = compare("train_step", of_the_first_layer, steps=10, edit=edit, replays=0, mode=mode)
    refusals = training.status().refusals
    assert any("no parameter of the optimizer requires a gradient" in one for one in refusals) == (mode != "eager")


def test_frozen_parameters_and_a_loss_that_needs_no_gradient() -> None:
    model, optimizer = net_and_adam()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay")
    for index in range(3):
        args, kwargs = batch(index)
        step(*args, **kwargs)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(*args, **kwargs)
    model.requires_grad_()
    assert torch.isfinite(step(*args, **kwargs))


def test_a_loss_that_needs_no_gradient_fails_as_in_eager() -> None:
    model = Net()
    step = kitsune.TrainStep(
        model, optimizer=adam(model), forward=lambda model, x: model(x).detach().sum(), mode="replay"
    )
    for _ in range(3):
        with pytest.raises(RuntimeError, match="does not require grad"):
            step(batch(0)[0][0])


def test_a_loss_with_many_elements_fails_as_in_eager() -> None:
    model = Net()
    step = kitsune.TrainStep(model, optimizer=adam(model), forward=lambda model, x: model(x), mode="replay")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="scalar outputs"):
            step(batch(0)[0][0])


# The end


def test_release_gives_graphs_back_and_training_goes_on() -> None:
    def edit(training: Training, index: int) -> None:
        if index == 4 and training.train_step is not None:
            assert training.status().graphs == 1
            training.train_step.release()
            assert training.status().graphs == 0
            assert training.status().mode == "idle"

    training = compare("train_step", steps=9, edit=edit, replays=7)
    assert training.status().graphs == 1


def test_eager_mode_captures_nothing() -> None:
    training = compare("train_step", mode="eager", replays=0)
    status = training.status()
    assert (status.mode, status.graphs, status.replays, status.setup_seconds) == ("eager", 0, 0, 0.0)
    assert "mode='eager'" in status.reason


def test_calls_that_overlap_are_refused() -> None:
    """In another thread or from within: both would replay into the same memory."""
    model, optimizer = net_and_adam()
    (x, y), _ = batch(0)
    refused: list[str] = []
    step: kitsune.TrainStep

    def call_again() -> None:
        try:
            step(x, y)
        except kitsune.KitsuneError as error:
            refused.append(str(error))

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        call_again()
        thread = threading.Thread(target=call_again)
        thread.start()
        thread.join()
        return functional.cross_entropy(model(x), y)

    step = kitsune.TrainStep(model, optimizer=optimizer, forward=forward, mode="eager")
    step(x, y)
    assert len(refused) == 2
    assert all("must not overlap" in reason for reason in refused)
    refused.clear()
    step(x, y)
    assert len(refused) == 2


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("is_all", [False, True])
@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_what_was_added_up_before_a_freeze_is_applied(mode: str, is_all: bool, clip: float | None) -> None:
    def trained(*, by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = sgd(model.first if is_all else model)
        step = None
        if not by_hand:
            step = kitsune.TrainStep(
                model, functional.cross_entropy, optimizer, accumulate=2, clip_grad_norm=clip, mode=mode
            )
        for index in range(12):
            model.first.requires_grad_(index != 7)
            (x, y), _ = batch(index)
            if step is not None:
                step(x, y)
                continue
            if index % 2 == 0:
                optimizer.zero_grad()
            (functional.cross_entropy(model(x), y) / 2).backward()
            if index % 2:
                if clip is not None:
                    nn.utils.clip_grad_norm_((model.first if is_all else model).parameters(), clip)
                optimizer.step()
        return [param.detach() for param in model.parameters()]

    for found, wanted in zip(trained(by_hand=False), trained(by_hand=True), strict=True):
        torch.testing.assert_close(found, wanted)
