"""Code around a step that wants to see, transform or differentiate what happens in it."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import kitsune
from tests.kitsune.training import FORMS, Net, Training, adam, batch, compare, net_and_adam


class Smooth(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def smooth_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Smooth()
    return model, adam(model)


def seeded_net_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    return net_and_adam()


def replaying() -> Training:
    """A loop in the middle of replaying."""
    training = Training("drop_in", *smooth_and_adam())
    training.run(4)
    assert training.status().mode == "replay"
    return training


# Dynamo switched off


@contextmanager
def stance(name: str) -> Iterator[None]:
    torch.compiler.set_stance(name)
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@contextmanager
def disabled() -> Iterator[None]:
    before, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    try:
        yield
    finally:
        torch._dynamo.config.disable = before


SWITCHES: dict[str, Callable[[], Any]] = {
    "force_eager": lambda: stance("force_eager"),
    "eager_on_recompile": lambda: stance("eager_on_recompile"),
    "disabled": disabled,
}


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("form", FORMS)
def test_training_while_torch_compile_is_switched_off(form: str, switch: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index in (0, 6):
            training.memo["switch"] = SWITCHES[switch]()
            training.memo["switch"].__enter__()
        if index in (4, 8):
            training.memo["switch"].__exit__(None, None, None)

    training = compare(form, steps=11, edit=edit, replays=3)
    assert training.status().mode == "replay"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["recompile_limit", "accumulated_recompile_limit"])
def test_a_limit_of_compilations_that_is_reached(form: str, name: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.gain = 1.0 + index // 4

    with torch._dynamo.config.patch(name, 1):
        compare(form, steps=12, edit=edit, replays=0)


def test_a_model_called_by_several_threads() -> None:
    """Each call is answered with the outputs of its own input, by a replay or not."""
    training = replaying()
    inputs = [batch(index)[0][0] for index in range(8)]
    expected = [training.model.forward(x).detach() for x in inputs]
    failures: list[object] = []

    def work(place: int) -> None:
        for _ in range(30):
            try:
                output = training.model(inputs[place])
                torch.autograd.grad(output.sum(), list(training.model.parameters()))
            except (kitsune.KitsuneError, RuntimeError) as error:
                failures.append(error)
                return
            if not torch.equal(output.detach(), expected[place]):
                failures.append((place, output))
                return

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.support("Failure", "threads that train a model each", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_threads_train_models_of_their_own(form: str) -> None:
    """One captures at a time; the steps of the others run as plain PyTorch meanwhile, and are captured later."""
    wanted = Training("eager", *seeded_net_and_adam())
    losses = wanted.run(200)
    trainings = [Training(form, *seeded_net_and_adam()) for _ in range(3)]
    found: dict[int, list[float]] = {}
    begin = threading.Barrier(len(trainings))

    def work(place: int) -> None:
        begin.wait()
        found[place] = trainings[place].run(200)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(trainings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, training in enumerate(trainings):
        assert found[place] == losses
        training.run(10, start=200)
        assert training.status().mode == "replay", training.status()
        assert training.status().replays >= 8


@pytest.mark.support("Failure", "a process that is forked in mid-training, and trains on", "replayed")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there are GPUs, autograd raises in a forked process")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_forked_process_trains_on(form: str) -> None:
    """As its parent does, and as plain PyTorch does, also with batches of a size that was not captured."""

    def go_on(training: Training) -> list[float]:
        return [*training.run(4, start=5), *training.run(4, lambda index: batch(index, size=3), start=9)]

    torch.manual_seed(7)
    expected = Training("eager", *net_and_adam())
    expected.run(5)
    torch.manual_seed(7)
    training = Training(form, *net_and_adam())
    training.run(5)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            replayed = training.status().replays
            losses = go_on(training)
            os.write(writing, json.dumps([losses, training.status().replays - replayed]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        losses, replayed = json.loads(pipe.read())
    os.waitpid(pid, 0)
    wanted = go_on(expected)
    assert losses == wanted
    assert replayed > 4
    assert go_on(training) == wanted


@pytest.mark.support("Ecosystem", "torch.profiler is told of the optimizer's `step` and `zero_grad`", "replayed")
def test_a_profiler_is_told_of_the_optimizer() -> None:
    names = {}
    for form in ("eager", "drop_in"):
        training = Training(form, *net_and_adam())
        training.run(6)
        with torch.profiler.profile() as profile:
            training.run(4, start=6)
        names[form] = {event.key: event.count for event in profile.key_averages() if "#" in event.key}
    assert names["drop_in"] == names["eager"]
    assert sorted(names["eager"]) == ["Optimizer.step#Adam.step", "Optimizer.zero_grad#Adam.zero_grad"]
    assert training.status().replays == 8


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("form", FORMS)
def test_a_dispatch_mode_sees_every_operator(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.memo["counter"] = FlopCounterMode(display=False)
            training.memo["counter"].__enter__()
            counters[training.form] = training.memo["counter"]
        if index == 6:
            training.memo["counter"].__exit__(None, None, None)

    counters: dict[str, FlopCounterMode] = {}
    compare(form, steps=9, edit=edit, replays=4)
    assert counters[form].get_total_flops() == counters["eager"].get_total_flops() > 0


class Names(TorchDispatchMode):
    """Notes the operators whose names begin alike."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(self.prefix):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("start", [0, 5], ids=["from the beginning", "later"])
def test_a_dispatch_mode_around_updates_sees_those_of_the_optimizer(start: int) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y)
        loss.backward()
        index = training.memo["index"] = training.memo.get("index", -1) + 1
        names = training.memo.setdefault("names", Names("aten._fused_adam"))
        with names if start <= index < start + 4 else nullcontext():
            training.optimizer.step()
        seen[training.form] = names.seen
        return loss.detach()

    seen: dict[str, list[str]] = {}
    training = compare("drop_in", steps=10, loop=loop)
    assert seen["drop_in"] == seen["eager"] == ["aten._fused_adam_.default"] * 4
    assert "update" in training.status().covered


# Transformations of the model in use


def test_make_fx_of_a_model_in_use() -> None:
    training = replaying()
    (x, _), _ = batch(0)
    graph = make_fx(lambda x: training.model(x))(x)
    torch.testing.assert_close(graph(x), training.model.forward(x))


def test_export_of_a_model_in_use() -> None:
    training = replaying()
    (x, _), _ = batch(0)
    exported = torch.export.export(training.model, (x,))
    torch.testing.assert_close(exported.module()(x), training.model.forward(x))
    training.run(2, start=4)
    assert training.status().mode == "replay"


def test_functional_calls_of_a_model_in_use() -> None:
    training = replaying()
    (x, y), _ = batch(0)
    params = {name: param.detach() * 2 for name, param in training.model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return training.loss_fn(torch.func.functional_call(training.model, params, (x,)), y)

    twin = copy.deepcopy(training.model)
    twin.load_state_dict(params)
    expected = torch.autograd.grad(training.loss_fn(twin(x), y), list(twin.parameters()))
    found = torch.func.grad(loss)(params)
    torch.testing.assert_close(list(found.values()), list(expected))
    stacked = torch.func.vmap(lambda row: torch.func.functional_call(training.model, params, (row[None],))[0])(x)
    torch.testing.assert_close(stacked, twin(x).detach())


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.matmuls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matmuls += function is functional.linear
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("form", FORMS)
def test_a_function_mode_sees_every_function(form: str) -> None:
    counted: dict[str, int] = {}

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.memo["mode"] = Counting()
            training.memo["mode"].__enter__()
        if index == 6:
            training.memo["mode"].__exit__(None, None, None)
            counted[training.form] = training.memo["mode"].matmuls

    compare(form, steps=9, edit=edit, replays=4)
    assert counted[form] == counted["eager"] == 4


@pytest.mark.usefixtures("short_way")
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("form", FORMS)
def test_anomaly_detection(form: str) -> None:
    """It names the function whose backward pass gave NaN."""
    training = Training(form, *smooth_and_adam())
    training.run(4)
    (x, y), _ = batch(4)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        training.step(x * float("nan"), y)
    training.run(2, start=5)
    assert training.status().mode == "replay"


# Other kinds of differentiation


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_differentiation() -> None:
    training = replaying()
    (x, _), _ = batch(0)
    tangent = torch.ones_like(x)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(training.model(forward_ad.make_dual(x, tangent))).tangent
        expected = forward_ad.unpack_dual(training.model.forward(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(found, expected)


def test_batched_gradients() -> None:
    training = replaying()
    (x, _), _ = batch(0)
    weights = torch.eye(3).unsqueeze(1).expand(3, 6, 3)
    params = list(training.model.parameters())
    found = torch.autograd.grad(training.model(x), params, weights, is_grads_batched=True)
    expected = torch.autograd.grad(training.model.forward(x), params, weights, is_grads_batched=True)
    torch.testing.assert_close(found, expected)


def test_a_jacobian() -> None:
    training = replaying()
    (x, _), _ = batch(0)
    for vectorize in (False, True):
        found = torch.autograd.functional.jacobian(training.model, x, vectorize=vectorize)
        expected = torch.autograd.functional.jacobian(training.model.forward, x, vectorize=vectorize)
        torch.testing.assert_close(found, expected)


def penalty_loop(start: int, memory: dict[str, Tensor]) -> Callable[..., Tensor]:
    """A loop with a gradient penalty at every third step from `start` on."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        x = memory.setdefault(training.form, torch.zeros_like(x)).detach().copy_(x).requires_grad_()
        loss = training.loss_fn(training.model(x), y)
        if count > start and count % 3 == 0:
            (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
            loss = loss + grad.square().sum()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    return loop


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("mode", ["replay", "auto"])
def test_a_lazy_gradient_penalty(mode: str, start: int) -> None:
    """It may come for the first time when the model is being replayed already."""
    loop = penalty_loop(start, {})
    compare("drop_in", smooth_and_adam, loop=loop, steps=12, replays=0, mode=mode, rtol=1e-5, atol=1e-6)


class Conditional(Smooth):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return super().forward(x * condition)


def conditional_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Conditional()
    return model, adam(model)


def a_reused_condition(training: Training, x: Tensor) -> Tensor:
    """Written before the call, as a buffer for batches always was."""
    buffer: Tensor = training.memo.setdefault("condition", torch.zeros(6, 4))
    return buffer.copy_(x.detach().roll(1))


def a_condition_of_the_argument(training: Training, x: Tensor) -> Tensor:
    """Computed from the other argument and from a parameter."""
    assert isinstance(training.model, Conditional)
    return x.square() + training.model.last.bias.sum()


@pytest.mark.parametrize("condition", [a_reused_condition, a_condition_of_the_argument])
def test_a_lazy_gradient_penalty_with_two_arguments(condition: Callable[[Training, Tensor], Tensor]) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = training.loss_fn(training.model(x, condition(training, x)), y)
        if count % 6 == 0:
            (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
            loss = loss + grad.square().sum()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", conditional_and_adam, loop=loop, steps=13, replays=0, rtol=1e-5, atol=1e-6)


def test_a_lazy_gradient_penalty_after_its_argument_was_edited() -> None:
    """The call would have to be repeated on values that are gone: an error, and no wrong gradient."""

    class Shifted(Smooth):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x, x.roll(1)), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    model = Shifted()
    training = Training("drop_in", model, adam(model), loop=loop)
    training.run(4)
    (x, y), _ = batch(4)
    for edited in (False, True):
        point, shift = x.clone().requires_grad_(), x.roll(1)
        expected = torch.autograd.grad(training.loss_fn(model.forward(point, shift), y), [point])
        loss = training.loss_fn(model(point, shift), y)
        if not edited:
            torch.testing.assert_close(torch.autograd.grad(loss, [point]), expected)
            training.optimizer.step()  # ends the iteration: the next call of this signature is replayed
            continue
        shift.mul_(3)
        with pytest.raises(kitsune.KitsuneError, match="edited"):
            torch.autograd.grad(loss, [point], create_graph=True)


def test_double_backward_that_cannot_be_repeated_says_so_and_runs_eagerly_from_then_on() -> None:
    model = Net(dropout=0.5)
    training = Training("drop_in", model, adam(model))
    training.run(4)
    (x, y), _ = batch(4)
    loss = training.loss_fn(model(x), y)
    with pytest.raises(kitsune.KitsuneError, match="mode='eager'"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss = training.loss_fn(model(x), y)
    assert torch.autograd.grad(loss, list(model.parameters()), create_graph=True)[0].requires_grad
    assert training.status().mode == "eager"


# Hooks on saved tensors


@pytest.mark.support("Gradients", "a checkpoint around the whole model", "plain PyTorch, with a reason")
def test_a_checkpoint_around_the_model() -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        output = checkpoint(training.model, x, use_reentrant=False)
        assert isinstance(output, Tensor)
        loss = training.loss_fn(output, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = compare("drop_in", lambda: (model := Net(dropout=0.5), adam(model)), loop=loop, steps=8, replays=0)
    assert training.status().refusals, training.status()


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("form", FORMS)
def test_saved_tensor_hooks(form: str) -> None:
    packed = {"eager": 0, form: 0}

    def edit(training: Training, index: int) -> None:
        def pack(tensor: Tensor) -> Tensor:
            packed[training.form] += 1
            assert type(tensor) in (Tensor, nn.Parameter), "the user's hooks must not see the tensors of a trace"
            return tensor

        if index == 3:
            training.memo["hooks"] = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            training.memo["hooks"].__enter__()
        if index == 6:
            training.memo["hooks"].__exit__(None, None, None)

    compare(form, steps=9, edit=edit, replays=3)
    assert packed[form] == packed["eager"] > 0


# Intermediate values in the user's hands


class Exposing(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden), hidden


def exposing_and_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Exposing()
    return model, adam(model)


USES: dict[str, Callable[[Tensor, Tensor], None]] = {
    "retain_grad": lambda hidden, loss: hidden.retain_grad(),
    "hook": lambda hidden, loss: hidden.register_hook(lambda grad: grad * 0.1),
    "nothing": lambda hidden, loss: None,
}


@pytest.mark.parametrize("use", USES)
def test_a_hidden_value_that_the_model_returns(use: str) -> None:
    seen: dict[str, list[Any]] = {"eager": [], "drop_in": []}

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        output, hidden = training.model(x)
        loss = training.loss_fn(output, y)
        USES[use](hidden, loss)
        (grad,) = torch.autograd.grad(loss, [hidden], retain_graph=True)
        loss.backward()
        seen[training.form].append((grad, hidden.grad if hidden.retains_grad else None))
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", exposing_and_adam, loop=loop, replays=0)
    torch.testing.assert_close(seen["drop_in"], seen["eager"], rtol=1e-6, atol=1e-7)


def test_an_unused_output_without_a_finite_gradient() -> None:
    """Its backward pass must not run on zeros: zero times infinity would reach the shared layers."""

    class Norms(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.first(x))
            return self.last(hidden), (hidden * 0).norm(dim=1)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        output, _ = training.model(x)
        loss = training.loss_fn(output, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = compare("drop_in", lambda: (model := Norms(), adam(model)), loop=loop)
    assert all(bool(torch.isfinite(param).all()) for param in training.model.parameters())


# A second optimizer over the same model


def test_a_new_optimizer_replaces_an_old_one() -> None:
    """As in training in phases, where the first phase's optimizer is still around."""

    def run(form: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        model, plain = net_and_adam()
        first = Training(form, model, plain)
        losses = first.run(5)
        second = Training(form, model, adam(model, lr=0.01))
        losses += second.run(6, start=5)
        if form != "eager":
            assert first.status().replays == 3
        return losses, second

    losses, second = run("drop_in")
    assert losses == run("eager")[0]
    assert second.status().mode == "replay"
    assert second.status().covered == ("forward", "backward", "update")


# The surroundings of the optimizer


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("form", FORMS)
def test_a_patched_step_method(form: str) -> None:
    """Some libraries wrap `optimizer.step` on the instance."""

    def edit(training: Training, index: int) -> None:
        if index == 4:
            inner = training.plain.step

            def step(closure: Any = None) -> None:
                for param in training.model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(0.5)
                inner(closure)

            training.plain.step = step  # type: ignore[method-assign, assignment]

    compare(form, lambda: (model := Net(), torch.optim.SGD(model.parameters(), lr=0.1)), steps=8, edit=edit, replays=3)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_change_their_memory_format(form: str) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x.view(-1, 4, 1, 1).expand(-1, 4, 3, 3).contiguous()).mean((2, 3)))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Images()
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.model.to(memory_format=torch.channels_last)

    compare(form, build, steps=9, edit=edit, replays=3, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [adam, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)], ids=["adam", "sgd"])
def test_a_parameter_in_part_of_its_memory(form: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """An update must not write into the gaps."""
    memories: dict[str, list[Tensor]] = {"eager": [], form: []}

    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.randn(4, 6)
            self.weight = nn.Parameter(self.memory[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Gaps()
        return model, torch.optim.Adam(model.parameters(), lr=0.05) if make is adam else make(model)

    def edit(training: Training, index: int) -> None:
        memories[training.form].append(training.model.memory.clone())

    compare(form, build, edit=edit, replays=0, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(memories[form], memories["eager"], rtol=1e-5, atol=1e-6)
    assert torch.equal(memories[form][0][:, 1::2], memories[form][-1][:, 1::2])
