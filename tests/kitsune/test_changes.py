"""What changes in the middle of training: every change takes effect at the very next step, in both forms."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import swa_utils

from tests.kitsune.training import FORMS, Batch, Net, Training, adam, batch, compare, net_and_adam, sgd

pytestmark = pytest.mark.parametrize("form", FORMS)

GLOBAL_GAIN = 1.0


def at(step: int, change: Callable[[Training], None]) -> Callable[[Training, int], None]:
    """An edit that happens before one step only."""

    def edit(training: Training, index: int) -> None:
        if index == step:
            change(training)

    return edit


class Scale:
    """Not a module: an object that a model calls."""

    @property
    def offset(self) -> float:
        return 1.0

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 1

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2


class Scaling(Net):
    """Beside its own `forward`, runs methods of every kind, and looks at the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        wide = 2.0 if os.environ.get("KITSUNE_TEST_WIDE") else 1.0
        return Scale.shifted(self.scale.scaled(super().forward(x))) * self.scale.offset * wide


def norm_and_dropout() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(batch_norm=True, dropout=0.5)
    return model, adam(model)


# The code of the model


@pytest.mark.support("Models", "methods of the model's classes, and of others that it uses, are replaced", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight * 2, self.bias)),
        (Net, "forward", lambda self, x: self.last(self.first(x))),
        (Scaling, "forward", lambda self, x: self.last(self.first(x))),
        (Scale, "scaled", lambda self, x: x * 3),
        (Scale, "shifted", staticmethod(lambda x: x + 3)),
        (Scale, "offset", property(lambda self: 3.0)),
    ],
    ids=["torch's", "a base class's", "own", "helper's", "static", "property"],
)
def test_a_method_is_replaced(form: str, owner: type, name: str, instead: object) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        patch.undo()
        model = Scaling()
        return model, adam(model)

    with pytest.MonkeyPatch.context() as patch:
        compare(form, build, steps=12, edit=at(6, lambda _: patch.setattr(owner, name, instead)), replays=7)


@pytest.mark.support("Models", "the environment is read in the model, and changes", "replayed")
@pytest.mark.usefixtures("short_way")
def test_the_environment_changes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        monkeypatch.delenv("KITSUNE_TEST_WIDE", raising=False)
        model = Scaling()
        return model, adam(model)

    def widen(_: Training) -> None:
        monkeypatch.setenv("KITSUNE_TEST_WIDE", "1")

    compare(form, build, steps=12, edit=at(6, widen), replays=7)


# Inputs and modes


@pytest.mark.support("Shapes and modes", "a smaller last batch", "replayed")
def test_a_smaller_last_batch(form: str) -> None:
    training = compare(form, steps=12, batches=lambda index: batch(index, size=4 if index % 4 == 3 else 6), replays=8)
    assert training.status().graphs == 2


@pytest.mark.support("Shapes and modes", "inputs of other data types", "replayed")
def test_inputs_of_other_dtypes(form: str) -> None:
    class Casting(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Casting()
        return model, adam(model)

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return ((x * 3).to((torch.float32, torch.int32, torch.float64)[index % 3]), y), {}

    compare(form, build, steps=12, batches=batches, replays=6)


def test_inputs_with_other_strides(form: str) -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x.t().contiguous().t() if index % 2 else x, y), {}

    compare(form, steps=10, batches=batches, replays=6)


@pytest.mark.support("Shapes and modes", "train() and eval()", "replayed")
@pytest.mark.usefixtures("short_way")
def test_training_and_evaluation_mode(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.train(index % 3 != 2)

    compare(form, norm_and_dropout, steps=12, edit=edit, replays=7)


@pytest.mark.usefixtures("short_way")
def test_one_layer_goes_to_evaluation_mode(form: str) -> None:
    compare(form, norm_and_dropout, steps=8, edit=at(4, lambda training: training.model.norm.eval()), replays=5)


@pytest.mark.support("Shapes and modes", "validation between steps", "replayed")
def test_evaluation_between_steps(form: str) -> None:
    def evaluate(training: Training, index: int) -> None:
        training.model.eval()
        with torch.no_grad():
            (x, _), _ = batch(100 + index)
            training.memo.setdefault("outputs", []).append(training.model(x))
        training.model.train()

    outputs: dict[str, list[Tensor]] = {}

    def edit(training: Training, index: int) -> None:
        evaluate(training, index)
        outputs[training.form] = training.memo["outputs"]

    compare(form, norm_and_dropout, steps=6, edit=edit, replays=4)
    for found, wanted in zip(outputs[form], outputs["eager"], strict=True):
        assert torch.equal(found, wanted)
        assert not found.requires_grad


def test_the_model_changes_its_dtype(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 3:
            training.model.double()
            training.plain.load_state_dict(training.plain.state_dict())

    def batches(index: int) -> Batch:
        return batch(index, dtype=torch.float64 if index >= 3 else torch.float32)

    compare(form, steps=8, edit=edit, batches=batches, replays=4, rtol=1e-6, atol=1e-8)


def test_the_model_alone_changes_its_dtype(form: str) -> None:
    """Where the state of the optimizer does not, torch's Adam raises."""
    errors = {}
    for kind in ("eager", form):
        training = Training(kind, *net_and_adam())
        training.run(5)
        training.model.double()
        for index in range(5, 8):
            (x, y), _ = batch(index, dtype=torch.float64)
            with pytest.raises(RuntimeError) as caught:
                training.step(x, y)
        errors[kind] = str(caught.value)
    assert errors[form] == errors["eager"]


# Hyperparameters


def set_option(name: str, value: Any) -> Callable[[Training], None]:
    def change(training: Training) -> None:
        training.optimizer.param_groups[0][name] = value

    return change


@pytest.mark.support("Hyperparameters", "learning rate, betas, eps, weight decay changed in mid-training", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.5),
        ("lr", 0.0),
        ("betas", (0.5, 0.7)),
        ("eps", 0.1),
        ("weight_decay", 0.3),
        ("maximize", True),
    ],
)
def test_a_hyperparameter_of_adam(form: str, name: str, value: object) -> None:
    compare(form, steps=8, edit=at(4, set_option(name, value)), replays=4, rtol=2e-6, atol=1e-7)


@pytest.mark.support(
    "Hyperparameters", "options that select other code, by turns (a weight decay of 0 and another)", "replayed"
)
def test_a_term_that_comes_and_goes(form: str) -> None:
    """The update is another one each time, and both are kept."""

    def edit(training: Training, index: int) -> None:
        training.optimizer.param_groups[0]["weight_decay"] = float(index % 2)

    compare(form, steps=16, edit=edit, replays=11, rtol=2e-6, atol=1e-7)


@pytest.mark.support("Hyperparameters", "learning rate, momentum, weight decay changed in mid-training", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.5),
        ("momentum", 0.1),
        ("momentum", 0.0),
        ("dampening", 0.5),
        ("weight_decay", 0.3),
        ("nesterov", True),
        ("maximize", True),
    ],
)
def test_a_hyperparameter_of_sgd(form: str, name: str, value: object) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, sgd(model)

    compare(form, build, steps=8, edit=at(4, set_option(name, value)), replays=4, rtol=2e-6, atol=1e-7)


@pytest.mark.usefixtures("short_way")
def test_a_hyperparameter_that_changes_at_every_step(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.optimizer.param_groups[0]["betas"] = (0.9 - 0.05 * index, 0.99 - 0.01 * index)

    compare(form, steps=10, edit=edit, replays=6, rtol=2e-6, atol=1e-7)


@pytest.mark.support("Hyperparameters", "a learning rate that is a tensor", "replayed")
@pytest.mark.usefixtures("short_way")
def test_a_learning_rate_that_is_a_tensor(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, adam(model, lr=torch.tensor(0.05))

    def edit(training: Training, index: int) -> None:
        training.optimizer.param_groups[0]["lr"].mul_(0.5)

    compare(form, build, steps=6, edit=edit)


@pytest.mark.support("Hyperparameters", "groups with values of their own", "replayed")
@pytest.mark.usefixtures("short_way")
def test_groups_with_learning_rates_of_their_own(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        groups = [{"params": model.first.parameters(), "lr": 0.01}, {"params": model.last.parameters(), "lr": 0.1}]
        return model, torch.optim.SGD(groups, fused=True)

    def edit(training: Training, index: int) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.8

    compare(form, build, edit=edit)


@pytest.mark.support("Optimizers", "add_param_group in mid-training", "replayed")
@pytest.mark.usefixtures("short_way")
def test_a_parameter_group_is_added(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.Adam(model.last.parameters(), lr=0.05, fused=True)

    def change(training: Training) -> None:
        training.optimizer.add_param_group({"params": list(training.model.first.parameters()), "lr": 0.02})

    def reference(training: Training, *args: Tensor) -> Tensor:
        # TrainStep gives no gradient to parameters that the optimizer does not own; a loop gives them one.
        training.optimizer.zero_grad()
        training.model.first.zero_grad()
        loss = training.loss_fn(training.model(args[0]), args[1])
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = compare(form, build, steps=10, edit=at(4, change), loop=reference, replays=6)
    assert "update" in training.status().covered
    assert not any("torch.compile" in refusal for refusal in training.status().refusals)


# Saved and loaded state


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("make", [adam, sgd, lambda model: sgd(model, momentum=0.0)], ids=["adam", "momentum", "sgd"])
def test_the_optimizer_loads_an_earlier_state(form: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, make(model)

    def edit(training: Training, index: int) -> None:
        if index == 2:
            training.memo["state"] = training.optimizer.state_dict()
            training.memo["state"]["param_groups"][0]["lr"] = 0.3
        if index == 4:
            training.optimizer.load_state_dict(training.memo["state"])
        if index == 6:
            training.optimizer.param_groups[0]["lr"] = 0.01

    compare(form, build, steps=9, edit=edit, replays=5)


@pytest.mark.usefixtures("short_way")
def test_the_model_loads_an_earlier_state(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 2:
            training.memo["state"] = {name: value.clone() for name, value in training.model.state_dict().items()}
        if index == 4:
            training.model.load_state_dict(training.memo["state"])
        if index == 6:
            training.model.load_state_dict(training.memo["state"], assign=False)

    compare(form, norm_and_dropout, steps=9, edit=edit)


@pytest.mark.usefixtures("short_way")
def test_the_model_is_assigned_other_tensors(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 4:
            state = {name: value.clone() * 0.5 for name, value in training.model.state_dict().items()}
            training.model.load_state_dict(state, assign=True)
            training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
            training.plain.state.clear()

    compare(form, steps=9, edit=edit, replays=4)


# Parameters, buffers and optimizer state, edited


def in_place(training: Training) -> None:
    with torch.no_grad():
        training.model.last.weight.mul_(0.5)


def data_in_place(training: Training) -> None:
    training.model.last.weight.data.clamp_(-0.1, 0.1)


def data_assigned(training: Training) -> None:
    training.model.last.weight.data = training.model.last.weight.data * 0.5


def parameter_replaced(training: Training) -> None:
    old = training.model.last.weight
    training.model.last.weight = nn.Parameter(old.detach() * 0.5)
    params = training.optimizer.param_groups[0]["params"]
    params[[param is old for param in params].index(True)] = training.model.last.weight
    training.plain.state.pop(old)


def module_replaced(training: Training) -> None:
    torch.manual_seed(5)
    old = list(training.model.last.parameters())
    training.model.last = nn.Linear(8, 3)
    group = training.optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if not any(param is other for other in old)]
    group["params"] += list(training.model.last.parameters())
    for param in old:
        training.plain.state.pop(param)


def moments_in_place(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].zero_()


def steps_in_place(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["step"].fill_(1)


def one_step_count(training: Training) -> None:
    training.optimizer.state[training.model.last.weight]["step"].fill_(1)


def moments_replaced(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def state_cleared(training: Training) -> None:
    training.optimizer.state.clear()


@pytest.mark.support("Models", "parameters and state edited in place, also through .data", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    "change",
    [
        in_place,
        data_in_place,
        data_assigned,
        parameter_replaced,
        module_replaced,
        moments_in_place,
        steps_in_place,
        one_step_count,
        moments_replaced,
        state_cleared,
    ],
)
def test_an_edit_of_the_training_state(form: str, change: Callable[[Training], None]) -> None:
    compare(form, steps=9, edit=at(4, change), replays=4)


def buffer_in_place(training: Training) -> None:
    training.model.norm.running_mean.add_(1)


def buffer_replaced(training: Training) -> None:
    training.model.norm.running_mean = training.model.norm.running_mean + 1


def statistics_reset(training: Training) -> None:
    training.model.norm.reset_running_stats()


def momentum_of_norm(training: Training) -> None:
    training.model.norm.momentum = 0.5


def dropout_probability(training: Training) -> None:
    training.model.drop.p = 0.1


@pytest.mark.support("Models", "buffers edited, layers replaced", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    "change", [buffer_in_place, buffer_replaced, statistics_reset, momentum_of_norm, dropout_probability]
)
def test_an_edit_of_buffers_and_layers(form: str, change: Callable[[Training], None]) -> None:
    compare(form, norm_and_dropout, steps=9, edit=at(4, change), replays=4)


# Which parameters are trained


@pytest.mark.support("Gradients", "parameters frozen and unfrozen in mid-training", "replayed")
@pytest.mark.usefixtures("short_way")
def test_parameters_are_frozen_and_unfrozen(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index in (3, 7):
            training.model.first.requires_grad_(index == 7)
            training.model.first.zero_grad()

    training = compare(form, steps=12, edit=edit, replays=6)
    assert training.status().mode == "replay"


def test_parameters_that_start_frozen(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.first.requires_grad_(False)
        return model, adam(model)

    training = compare(form, build, steps=12, edit=at(4, lambda training: training.model.requires_grad_()), replays=6)
    assert "update" in training.status().covered


class Branches(nn.Module):
    """Two heads, of which the calls use one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return torch.stack([self.heads[head](x) for head in used]).sum(0)


def branches_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Branches()
    return model, adam(model, weight_decay=0.1)


def branch_batch(*used: int) -> Callable[[int], Batch]:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x, used, y), {}

    return batches


@pytest.mark.support("Gradients", "parameters without a gradient", "replayed")
def test_unused_parameters_keep_still(form: str) -> None:
    training = compare(form, branches_and_adam, batches=branch_batch(0))
    assert not training.plain.state.get(training.model.heads[1].weight)


def test_parameters_that_are_used_later(form: str) -> None:
    def batches(index: int) -> Batch:
        return branch_batch(*((0,) if index < 4 else (0, 1)))(index)

    training = compare(form, branches_and_adam, steps=10, batches=batches, replays=5)
    assert "update" in training.status().covered


def test_parameters_that_are_used_by_turns(form: str) -> None:
    compare(form, branches_and_adam, steps=12, batches=lambda index: branch_batch(index % 2)(index), replays=6)


def test_parameters_that_are_used_no_more(form: str) -> None:
    """Their moments and step counts stand still from then on."""

    def batches(index: int) -> Batch:
        return branch_batch(*((0, 1) if index < 4 else (1,)))(index)

    compare(form, branches_and_adam, steps=10, batches=batches, replays=5)


@pytest.mark.support("Gradients", "tied weights", "replayed")
def test_tied_parameters(form: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied()
        return model, adam(model)

    compare(form, build)


# What the model's Python code depends on


@pytest.mark.usefixtures("short_way")
def test_a_module_attribute(form: str) -> None:
    compare(form, steps=9, edit=at(4, lambda training: setattr(training.model, "gain", 0.3)), replays=5)


@pytest.mark.usefixtures("short_way")
def test_a_tensor_attribute(form: str) -> None:
    class Weighted(Net):
        scale = torch.tensor(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Weighted()
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 3:
            training.model.scale = torch.tensor(0.5)
        if index == 5:
            training.model.scale.mul_(0.5)

    compare(form, build, steps=9, edit=edit, replays=4)


@pytest.mark.usefixtures("short_way")
def test_a_variable_of_the_loss_closure(form: str) -> None:
    smoothing = 0.0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, label_smoothing=smoothing)

    def edit(_training: Training, index: int) -> None:
        nonlocal smoothing
        smoothing = 0.0 if index < 4 else 0.2

    compare(form, steps=9, edit=edit, loss_fn=loss_fn, replays=5)


class GlobalGain(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GLOBAL_GAIN


@pytest.mark.usefixtures("short_way")
def test_a_global_variable(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GlobalGain()
        return model, adam(model)

    def edit(_training: Training, index: int) -> None:
        globals()["GLOBAL_GAIN"] = 1.0 if index < 4 else 0.3

    compare(form, build, steps=9, edit=edit, replays=5)


@pytest.mark.usefixtures("short_way")
def test_a_method_is_patched(form: str) -> None:
    def change(training: Training) -> None:
        training.model.first.forward = lambda x: functional.linear(x, training.model.first.weight) * 0.5

    compare(form, steps=9, edit=at(4, change), replays=4)


@pytest.mark.usefixtures("short_way")
def test_an_activation_function_is_swapped(form: str) -> None:
    class Activated(Net):
        activation = staticmethod(torch.relu)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.activation(self.first(x)))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Activated()
        return model, adam(model)

    compare(
        form, build, steps=9, edit=at(4, lambda training: setattr(training.model, "activation", torch.tanh)), replays=5
    )


@pytest.mark.usefixtures("short_way")
def test_deterministic_algorithms_are_asked_for(form: str) -> None:
    def edit(_training: Training, index: int) -> None:
        torch.use_deterministic_algorithms(3 <= index < 6)

    try:
        compare(form, steps=9, edit=edit, replays=4)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.support("Random numbers", "dropout draws another mask at each step", "replayed")
@pytest.mark.usefixtures("short_way")
def test_dropout_draws_another_mask_at_each_step(form: str) -> None:
    """The comparison with eager shows the masks; here, that equal inputs meet different ones."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(dropout=0.5)
        return model, adam(model, lr=0.0)

    losses = []

    def keep(training: Training, index: int) -> None:
        torch.manual_seed(index // 2)

    torch.manual_seed(0)
    model, optimizer = build()
    training = Training(form, model, optimizer)
    losses = training.run(8, lambda index: batch(0))
    assert len(set(losses)) == 8
    compare(form, build, steps=8, edit=keep, batches=lambda index: batch(0))


@pytest.mark.support("Random numbers", "capturing draws none", "replayed")
def test_capturing_draws_no_random_numbers(form: str) -> None:
    def batches(index: int) -> Batch:
        return batch(index, size=3 + index // 3)

    compare(form, norm_and_dropout, steps=12, batches=batches, replays=4)


@pytest.mark.support("Random numbers", "masks repeat from a seed, and after a checkpoint was loaded", "replayed")
@pytest.mark.parametrize("resumed", ["with Kitsune", "without"])
def test_random_numbers_survive_a_checkpoint(form: str, resumed: str) -> None:

    def started(form: str) -> Training:
        model = Net(batch_norm=True, dropout=0.5)
        return Training(form, model, adam(model))

    torch.manual_seed(7)
    expected = started("eager").run(10)
    torch.manual_seed(7)
    first = started(form)
    assert first.run(5) == expected[:5]
    file = io.BytesIO()
    state = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}
    torch.save({**state, "random": torch.get_rng_state()}, file)
    assert first.run(5, start=5) == expected[5:]
    torch.manual_seed(1)
    second = started(form if resumed == "with Kitsune" else "eager")
    second.run(4, start=20)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["random"])
    assert second.run(5, start=5) == expected[5:]


def averaged(training: Training) -> None:
    if "average" not in training.memo:
        training.memo["average"] = swa_utils.AveragedModel(
            training.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
    training.memo["average"].update_parameters(training.model)


@torch.no_grad()
def blended(training: Training) -> None:
    average = training.memo.setdefault("average", copy.deepcopy(training.model))
    for mean, param in zip(average.parameters(), training.model.parameters(), strict=True):
        mean.lerp_(param, 0.1)


@pytest.mark.support("Gradients", "an exponential average of the weights", "replayed")
@pytest.mark.parametrize("update", [averaged, blended])
def test_an_average_of_the_weights(form: str, update: Callable[[Training], None]) -> None:
    averages: list[dict[str, Tensor]] = []

    def edit(training: Training, index: int) -> None:
        update(training)
        averages.append({name: value.clone() for name, value in training.memo["average"].state_dict().items()})

    compare(form, norm_and_dropout, steps=8, edit=edit)
    wanted, found = averages[:8], averages[8:]
    assert not all(torch.equal(value, wanted[0][name]) for name, value in wanted[7].items())
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=0.0)
