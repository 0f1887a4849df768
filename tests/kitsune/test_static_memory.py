"""Graphs that overwrite their outputs at every replay, as CUDA graphs do: nothing of it shows. On the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.engine.recording import Recording
from tests.kitsune import static_memory
from tests.kitsune.loops import LOOPS
from tests.kitsune.test_step import by_hand
from tests.kitsune.training import FORMS, Batch, Net, Training, adam, batch, net_and_adam, sgd
from tests.kitsune.training import compare as compare_anywhere


@pytest.fixture(autouse=True)
def _static_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    static_memory.install(monkeypatch)


def everything_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(batch_norm=True, dropout=0.3)
    return model, adam(model)


def compare(form: str, *arguments: Any, **options: Any) -> Training:
    training = compare_anywhere(form, *arguments, **options)
    if options.get("replays") != 0:
        assert training.status().executor == "cuda graph"
    return training


@pytest.mark.parametrize("make", [adam, sgd], ids=["adam", "sgd"])
@pytest.mark.parametrize("form", FORMS)
def test_training(form: str, make: Any) -> None:
    compare(form, lambda: (model := Net(batch_norm=True, dropout=0.3), make(model)), steps=8)


@pytest.mark.parametrize("form", FORMS)
def test_shapes_that_alternate(form: str) -> None:
    training = compare(
        form, everything_and_adam, steps=18, replays=8, batches=lambda index: batch(index, size=4 + index % 3)
    )
    assert training.status().graphs == 3


def test_graphs_of_all_shapes_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[object] = []
    record = Recording.__init__

    def noted(self: Recording, *arguments: Any, **options: Any) -> None:
        pools.append(options["pool"])
        record(self, *arguments, **options)

    monkeypatch.setattr(Recording, "__init__", noted)
    training = compare(
        "train_step", everything_and_adam, steps=18, replays=8, batches=lambda index: batch(index, size=4 + index % 3)
    )
    assert training.status().graphs == len(pools) == 3
    assert len(set(map(id, pools))) == 1


@pytest.mark.parametrize("form", FORMS)
def test_hyperparameters_that_change(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.optimizer.param_groups[0]["lr"] *= 0.9
        training.optimizer.param_groups[0]["betas"] = (0.9 - index / 50, 0.99)

    compare(form, steps=10, edit=edit, replays=6, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_and_buffers_that_change(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 4:
            with torch.no_grad():
                training.model.last.weight.mul_(0.5)
            training.model.norm.running_mean.add_(1)
        if index == 6:
            training.model.last.weight.data = training.model.last.weight.data * 2

    compare(form, everything_and_adam, steps=10, edit=edit, replays=6)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str) -> None:
    loop, replays = LOOPS[name]
    training = compare(
        "drop_in", lambda: (model := Net(batch_norm=True), adam(model)), loop=loop, steps=8, replays=replays
    )
    held = training.memo.get("held", [])
    assert all(torch.equal(*pair) for pair in held), "a gradient in the user's hands was overwritten"
    assert bool(held) == name.startswith("holding")


@pytest.mark.parametrize("step", [{"accumulate": 2}, {"accumulate": 3, "clip_grad_norm": 0.1}], ids=str)
def test_sums_of_a_train_step(step: dict[str, Any]) -> None:
    sizes = (6, 4)

    def batches(index: int) -> Batch:
        return batch(index, size=sizes[index % 7 // 4])

    compare("train_step", step=step, reference={"loop": by_hand(**step)}, batches=batches, steps=26, replays=10,
            rtol=1e-6, atol=1e-8)  # fmt: skip


def test_gradients_swapped_between_parameters() -> None:
    """The update reads gradients where they lie, and the user may have moved them."""

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y)
        loss.backward()
        first, second = training.model.first.weight, training.model.second.weight
        if count % 3 == 0:
            first.grad, second.grad = second.grad, first.grad
        if count % 4 == 0:
            assert second.grad is not None
            second.grad = second.grad.clone()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", lambda: (model := Twin(), adam(model)), loop=loop, steps=14, replays=10)


def test_gradients_read_after_the_next_forward_pass() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        loss = training.loss_fn(training.model(x), y)
        previous = [param.grad.sum() for param in training.model.parameters() if param.grad is not None]
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        return loss.detach() + sum(previous)

    compare("drop_in", loop=loop, steps=8)


def test_backward_passes_in_another_order_than_the_calls() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        first = training.loss_fn(training.model(x), y)
        second = training.loss_fn(training.model(x + 1), y)
        second.backward()
        first.backward()
        training.optimizer.step()
        return first.detach() + second.detach()

    compare("drop_in", loop=loop, steps=8, replays=4)


@pytest.mark.parametrize("fused", [False, True])
def test_calls_without_a_backward_pass_between_calls_with_one(fused: bool) -> None:
    """After an update that counts as an edit of the parameters nobody can go back from outputs that are kept.

    torch's fused updates do not, so that such a call is pending as long as its output is kept, and others run eagerly.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, adam(model, fused=fused)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        kept = training.memo.setdefault("kept", [])
        training.optimizer.zero_grad()
        output = training.model(x)
        kept.append((output, output.detach().clone()))
        loss = training.loss_fn(output, y)
        if count % 3:
            loss.backward()
            training.optimizer.step()
        return loss.detach()

    training = compare("drop_in", build, loop=loop, steps=14, replays=1 if fused else 5, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(output, value) for output, value in training.memo["kept"])


def test_a_graph_released_while_its_backward_pass_is_pending() -> None:
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(5)
    (x, y), _ = batch(5)
    expected = torch.autograd.grad(functional.cross_entropy(model.forward(x), y), list(model.parameters()))
    loss = functional.cross_entropy(model(x), y)
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    training.optimizer.hand_over()
    training.optimizer.zero_grad()
    loss.backward()
    for param, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, wanted)


def test_a_parameter_edited_while_its_backward_pass_is_pending() -> None:
    """The graph reads the parameter's memory, so the edit must be noticed, as in eager."""
    model, plain = net_and_adam()
    training = Training("drop_in", model, plain)
    training.run(5)
    loss = functional.cross_entropy(model(batch(5)[0][0]), batch(5)[0][1])
    with torch.no_grad():
        model.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()


def test_losses_and_kept_gradients_of_a_train_step() -> None:
    model, optimizer = everything_and_adam()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, keep_grads=True, mode="replay")
    losses, grads = [], []
    for index in range(8):
        loss = step(*batch(index)[0])
        losses.append((loss, loss.clone()))
        grads += [(param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None]
    assert step.status().executor == "cuda graph"
    assert all(torch.equal(*pair) for pair in [*losses, *grads])


def test_two_networks_in_one_loop() -> None:
    def run(form: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 3)
        training = Training(form, nn.ModuleList([encoder, decoder]), adam(nn.ModuleList([encoder, decoder])))
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


def test_two_trainings_take_turns() -> None:
    def run(kinds: tuple[str, str]) -> list[list[float]]:
        torch.manual_seed(0)
        pair = [Training(kind, *everything_and_adam()) for kind in kinds]
        return [training.run(1, start=index) for index in range(8) for training in pair]

    assert run(("train_step", "drop_in")) == run(("eager", "eager"))


def _replace_state(training: Training) -> None:
    training.plain.load_state_dict(training.plain.state_dict())


def _replace_gradient(training: Training) -> None:
    """The next backward pass adds to it."""
    training.model.last.bias.grad = torch.ones(3)


def _hook(training: Training) -> None:
    training.memo["handle"] = training.plain.register_step_post_hook(
        lambda optimizer, *_: optimizer.param_groups[0]["params"][0].data.mul_(0.5)
    )


def _group(training: Training) -> None:
    param = training.model.gain = nn.Parameter(torch.ones(()))
    training.optimizer.add_param_group({"params": [param]})


def _move(training: Training) -> None:
    training.model.first.weight.data = training.model.first.weight.data.clone()


def _step_count(training: Training) -> None:
    training.plain.state[training.model.last.weight]["step"].fill_(50)


UPDATES: dict[str, Any] = {
    "weight decay": lambda training: training.optimizer.param_groups[0].update(weight_decay=0.5),
    "the rate as a tensor": lambda training: training.optimizer.param_groups[0].update(lr=torch.tensor(0.01)),
    "maximize": lambda training: training.optimizer.param_groups[0].update(maximize=True),
    "state": _replace_state,
    "a gradient": _replace_gradient,
    "a hook": _hook,
    "a group": _group,
    "an address": _move,
    "a step count": _step_count,
    "frozen": lambda training: training.model.first.requires_grad_(False),
    "no state": lambda training: training.plain.state.clear(),
}


@pytest.mark.parametrize("name", UPDATES)
def test_what_an_update_depends_on_changes(name: str) -> None:
    """After it has been repeated without a closer look; twice, since the first change may have ended that."""

    def edit(training: Training, index: int) -> None:
        if index in (6, 9):
            UPDATES[name](training)

    compare("drop_in", steps=12, edit=edit, replays=5, rtol=2e-6, atol=1e-7)


def _share(training: Training) -> None:
    training.model.share_memory()


def _swap(training: Training) -> None:
    for param in training.model.parameters():
        param.data = param.data * 0.5


class Scaled(nn.Module):
    """Its backward pass needs a parameter as it is, which the graph of the forward pass returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) * self.gain)


@pytest.mark.parametrize("move", [_share, _swap])
@pytest.mark.parametrize("form", FORMS)
def test_parameters_that_get_other_memory_stay_the_users(form: str, move: Any) -> None:
    """Graphs that are given up know what memory was theirs when they were recorded."""

    def edit(training: Training, index: int) -> None:
        if index in (4, 7):
            move(training)

    compare(form, lambda: (model := Scaled(), adam(model)), steps=10, edit=edit, replays=4)


class Bank(nn.Module):
    """Writes to a buffer before it reads its argument."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("queue", torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.queue.mul_(0.9)
        return self.head(x)


@pytest.mark.support(
    "Shapes and modes", "arguments that lie in a buffer that the model writes", "plain PyTorch, with a reason"
)
@pytest.mark.parametrize("form", FORMS)
def test_arguments_that_come_to_lie_in_what_the_model_writes(form: str) -> None:
    """A replay would have copied them before. Some do from the eighth step on, and no longer from the twelfth."""
    banks: list[Bank] = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        banks.append(Bank())
        return banks[-1], adam(banks[-1])

    def edit(training: Training, index: int) -> None:
        model = training.model
        assert isinstance(model, Bank)
        current[:] = [model.queue[:6] if 8 <= index < 12 else None]

    current: list[Tensor | None] = [None]

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x if current[0] is None else current[0], y), {}

    training = compare(form, build, steps=16, edit=edit, batches=batches, replays=9)
    assert any("memory that the model writes" in reason for reason in training.status().refusals)
