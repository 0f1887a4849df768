"""Replays that are compared with plain PyTorch: in training (`verify=N`), and by themselves (`kitsune.verify`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.capture.frontend import GuardedFunction
from kitsune.engine.contest import Contest
from kitsune.execution.in_order import InOrder
from kitsune.loop import verifying
from kitsune.loop.backward_graph import BackwardGraph
from kitsune.loop.update_step import UpdateStep
from kitsune.loop.whole_step import WholeStep
from tests.kitsune.training import FORMS, Net, Training, adam, batch, compare, plain_loop, sgd

BUILDS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "adam": lambda: with_optimizer(adam),
    "sgd": lambda: with_optimizer(sgd),
    "dropout and batch norm": lambda: with_optimizer(adam, batch_norm=True, dropout=0.4),
}


def with_optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net(**options)
    return model, make(model)


def training(form: str, **options: Any) -> Training:
    return Training(form, *BUILDS["dropout and batch norm"](), **options)


@pytest.mark.parametrize("verify", [1, 3])
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_as_plain_pytorch_does(form: str, name: str, verify: int, counted: list[str]) -> None:
    done = compare(form, BUILDS[name], steps=8, replays=None, verify=verify)
    assert done.status().mode == "replay"
    assert not done.status().refusals
    assert counted.count("compared") == verify * (1 if form == "train_step" else 2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each comparison."""
    from kitsune.loop import comparison, loop_comparison

    seen: list[str] = []
    for module in (comparison, loop_comparison):
        original = module.compare

        def count(*args: Any, original: Any = original) -> Any:
            found = original(*args)
            seen.append("compared" if found is not None else "not replayed")
            return found

        monkeypatch.setattr(module, "compare", count)
    return seen


def off(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] += 0.01 + tensor.abs().max()


def spoil(monkeypatch: pytest.MonkeyPatch, place: str, model: nn.Module) -> None:
    """Lets replays go wrong at a place: what they leave behind, or give."""
    if place == "parameter":
        for kind, name in ((WholeStep, "replay_apart"), (UpdateStep, "replay")):
            replay = getattr(kind, name)

            def wrong(step: Any, *args: Any, replay: Any = replay) -> Any:
                result = replay(step, *args)
                if result:
                    off(model.last.weight)
                return result

            monkeypatch.setattr(kind, name, wrong)
        return
    call = InOrder.__call__

    def wrong_result(run: InOrder, inputs: Any) -> Any:
        outputs = list(call(run, inputs))
        if outputs:
            outputs[0 if place == "first result" else -1] = outputs[0 if place == "first result" else -1] * 1.01 + 1
        return outputs

    monkeypatch.setattr(InOrder, "__call__", wrong_result)


@pytest.mark.support("Failure", "verify: a replay that differs is found and not used", "plain PyTorch, with a reason")
@pytest.mark.parametrize("place", ["parameter", "first result"])
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_replay_is_found_told_and_not_used(form: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrong = Training("eager", *BUILDS["adam"]()), Training(form, *BUILDS["adam"](), verify=2)
    spoil(monkeypatch, place, wrong.model)
    losses = [one.run(8) for one in (plain, wrong)]
    assert losses[0] == losses[1]
    expected, found = plain.observe(), wrong.observe()
    for name, value in expected.items():
        kept = value if form == "drop_in" or not name.endswith(".grad") else None
        assert kept is None or torch.equal(kept, found[name]), name
    (refusal,) = [one for one in wrong.status().refusals if "differed from plain PyTorch" in one]
    if place == "parameter":
        assert "last.weight" in refusal
    if form == "train_step":
        assert wrong.status().mode == "eager"
        assert ("adam" if place == "parameter" else "nll_loss") in refusal
        assert wrong.status().graphs == 0


def test_a_wrong_gradient_of_a_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_backward = BackwardGraph.__call__

    def wrong(graph: Any, *args: Any, **options: Any) -> Any:
        grads = run_backward(graph, *args, **options)
        return [*grads[:-1], grads[-1] * 1.01]

    monkeypatch.setattr(BackwardGraph, "__call__", wrong)
    plain, spoilt = Training("eager", *BUILDS["adam"]()), Training("drop_in", *BUILDS["adam"](), verify=1)
    assert plain.run(6) == spoilt.run(6)
    (refusal,) = [one for one in spoilt.status().refusals if "differed" in one]
    assert ".grad" in refusal


class Halves(Net):
    """Gives two views of one tensor, as what encodes a mean and a variance does, and one of a parameter."""

    def forward(self, x: Tensor) -> Any:
        return *super().forward(x).chunk(2, 1), self.last.weight.t()


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_views_that_the_model_returns_are_compared(is_spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the replayed graph gives is what they are views of."""

    def loss_fn(outputs: Sequence[Tensor], y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.cat(outputs[:2], 1), y) + outputs[2].pow(2).mean()

    def run(form: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        model = Halves()
        done = Training(form, model, adam(model), loss_fn=loss_fn, verify=2)
        return done.run(6), done

    losses, _ = run("eager")
    if is_spoilt:
        spoil(monkeypatch, "first result", Halves())
    found, done = run("drop_in")
    assert found == losses
    assert any("differed" in refusal for refusal in done.status().refusals) == is_spoilt


@pytest.mark.parametrize("form", FORMS)
def test_without_it_nothing_is_compared(form: str, counted: list[str]) -> None:
    training(form).run(5)
    assert counted == []


def test_each_plan_is_compared(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one to be tried may come with any call."""
    monkeypatch.setattr(Contest, "changes_next", True)
    training("train_step", verify=1).run(6)
    assert counted.count("compared") == 5


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"clip_grad_norm": 0.5, "keep_grads": True}])
def test_steps_with_options(options: dict[str, Any], counted: list[str]) -> None:
    plain, verified = (
        Training("train_step", *BUILDS["adam"](), step=options, mode=mode, verify=3) for mode in ("eager", "replay")
    )
    assert verified.run(12) == pytest.approx(plain.run(12), rel=1e-6)
    assert counted.count("compared") >= 3
    assert not [one for one in verified.status().refusals if "differed" in one]


def test_with_a_gradient_scaler(counted: list[str]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    verified = Training("train_step", *BUILDS["adam"](), step={"grad_scaler": scaler}, verify=2)
    verified.run(6)
    assert counted.count("compared") == 2
    assert not verified.status().refusals


@pytest.mark.parametrize("form", FORMS)
def test_what_overflows_in_both_is_no_difference(form: str, counted: list[str]) -> None:
    """Nor does rounding explain anything then."""
    verified = training(form, verify=2)
    (x, y), _ = batch(0)
    for _ in range(5):
        verified.step(x * float("inf"), y)
    assert counted.count("compared") >= 2
    assert not verified.status().refusals


def verification(training: Training, index: int) -> kitsune.Verification:
    (x, y), _ = batch(index)
    if training.train_step is not None:
        return kitsune.verify(training.train_step, x, y)
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    return kitsune.verify(plain_loop, training, x, y, optimizer=training.optimizer)


@pytest.mark.parametrize("form", FORMS)
def test_verifying_trains_nothing(form: str) -> None:
    torch.manual_seed(1)
    expected = training(form).run(8)
    torch.manual_seed(1)
    one = training(form)
    losses = one.run(5)
    before = one.observe()
    found = verification(one, 5)
    assert found.agrees, found
    assert str(found) == "the replay does what plain PyTorch does"
    after = one.observe()
    for name, value in before.items():
        assert value is None or torch.equal(value, after[name]), name
    assert losses + one.run(3, start=5) == expected


@pytest.mark.parametrize("place", ["parameter", "first result"])
@pytest.mark.parametrize("form", FORMS)
def test_verifying_finds_what_is_wrong(form: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Training(form, *BUILDS["adam"]())
    one.run(4)
    spoil(monkeypatch, place, one.model)
    found = verification(one, 4)
    assert found.replayed
    assert not found.agrees
    assert found.differences[0].error > found.differences[0].allowed
    assert found.differences[0].name in str(found)


@pytest.mark.parametrize("form", FORMS)
def test_where_nothing_is_replayed_it_says_why(form: str) -> None:
    one = training(form, mode="eager")
    one.run(3)
    found = verification(one, 3)
    assert not found.replayed
    assert not found.agrees
    assert "mode='eager' was asked for" in str(found)


@pytest.mark.parametrize(
    ("name", "eps", "is_alike"), [("loss", 2**-7, True), ("loss", 0.0, False), ("w.grad", 2**-7, False)]
)
def test_a_loss_may_be_rounded_on_the_way(name: str, eps: float, is_alike: bool) -> None:
    """To one side, where outputs are all alike, as no draw of the state shows: by as much as the step rounds."""
    found, expected = torch.tensor(6.9077), torch.tensor(6.90625)
    differences = verifying.compare(
        verifying.State({}, torch.device("cpu")),
        lambda: {name: found},
        lambda: {name: expected},
        lambda: eps,
        dict,
    )
    assert differences is not None
    assert [one.name for one in differences] == ([] if is_alike else [name])


def test_before_the_first_step_there_is_nothing_to_compare() -> None:
    found = verification(training("train_step"), 0)
    assert str(found) == "nothing was compared: the optimizer has no state yet"


def test_in_autocast() -> None:
    one = training("train_step", enable_amp=True)
    one.run(4)
    assert verification(one, 4).agrees


def test_what_it_takes() -> None:
    model, optimizer = BUILDS["adam"]()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer)
    with pytest.raises(TypeError, match="leave optimizer out"):
        kitsune.verify(step, optimizer=kitsune.KitsuneOptimizer(optimizer))
    with pytest.raises(TypeError, match="or a function with optimizer=<KitsuneOptimizer>; got an object of type int "):
        kitsune.verify(3, optimizer=kitsune.KitsuneOptimizer(optimizer))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer=<KitsuneOptimizer>"):
        kitsune.verify(lambda: None)
    with pytest.raises(kitsune.ConfigError, match="verify"):
        kitsune.Config(verify=-1)


def inside_of_autocast(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = training.model(x)
    loss = training.loss_fn(output.float(), y)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def two_calls(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(x), y) + training.loss_fn(training.model(-x), y)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@pytest.mark.support("Failure", "verify: autocast around the call, and two calls before `backward()`", "replayed")
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("loop", [inside_of_autocast, two_calls])
def test_loops_in_which_a_comparison_must_not_write_to_parameters(
    loop: Callable[..., Tensor], batch_norm: bool, counted: list[str]
) -> None:
    """Autocast keeps casts of them, and what is to go back has saved them."""
    done = compare(
        "drop_in",
        lambda: with_optimizer(adam, batch_norm=batch_norm),
        loop=loop,
        steps=8,
        verify=3,
        rtol=1e-6 if batch_norm else 0.0,
    )
    assert counted.count("compared") == 6
    assert not done.status().refusals


class Noticing(nn.Module):
    """Has effects on Python objects, forward and backward: each of them must come once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.calls += 1
        self.seen.append(self.calls)
        self.mean = self.mean * 0.9 + output.detach().mean(0) * 0.1
        return output + self.mean


class Hooked(Noticing):
    """The same without new buffers, so that replays go on."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.seen.append(len(self.seen))
        self.mean.mul_(0.9).add_(output.detach().mean(0) * 0.1)
        return output + self.mean


@pytest.mark.support("Failure", "verify: the model's effects on Python objects, and hooks, come once", "replayed")
@pytest.mark.parametrize("kind", [Noticing, Hooked])
@pytest.mark.parametrize("form", FORMS)
def test_what_the_model_does_to_python_objects_is_done_once(
    form: str, kind: type[Noticing], counted: list[str]
) -> None:
    def run(form: str, **options: Any) -> tuple[list[float], Noticing, list[str]]:
        torch.manual_seed(0)
        model, gradients = kind(), list[str]()
        if form != "train_step":  # which would not replay
            model.layer.weight.register_hook(lambda grad: gradients.append("came"))
        training = Training(form, model, adam(model), **options)
        return training.run(8), model, gradients

    losses, model, gradients = run("eager")
    found_losses, found, found_gradients = run(form, verify=2)
    assert found_losses == losses
    assert found.seen == model.seen
    assert found.calls == model.calls
    assert torch.equal(found.mean, model.mean)
    assert found_gradients == (gradients if form == "drop_in" else [])
    if kind is Hooked:
        assert "compared" in counted


def test_what_went_before_the_graph_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module itself is the measure of outputs and gradients, where Dynamo's graph is not what it does."""
    through = GuardedFunction.through

    def wrong(guarded: GuardedFunction, run: Any, args: Any, kwargs: Any) -> Any:
        (x,) = args
        return through(guarded, run, (x * 1.5,), kwargs)

    monkeypatch.setattr(GuardedFunction, "through", wrong)
    plain, spoilt = Training("eager", *BUILDS["adam"]()), Training("drop_in", *BUILDS["adam"](), verify=1)
    assert plain.run(6) == spoilt.run(6)
    (refusal,) = [one for one in spoilt.status().refusals if "differed" in one]
    assert "first.bias.grad: off by" in refusal


def test_the_first_replay_of_an_iteration_may_be_the_one_that_is_compared() -> None:
    done = training("drop_in")
    done.run(2)
    found = verification(done, 2)
    assert found.agrees, found


class RecentlyUsed(Net):
    """Scales its output by what was used least recently of two."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = OrderedDict([("a", 0.9), ("b", 1.2)])

    def forward(self, x: Tensor) -> Tensor:
        name = next(iter(self.recent))
        self.recent.move_to_end(name)
        return super().forward(x) * self.recent[name]


@pytest.mark.parametrize("form", FORMS)
def test_dictionaries_in_another_order_are_put_back_so_that_guards_hold(form: str, counted: list[str]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = RecentlyUsed()
        return model, adam(model)

    done = compare(form, build, steps=8, replays=5, verify=8)
    assert counted.count("compared") >= 5
    assert not [one for one in done.status().refusals if "differed" in one]


@pytest.mark.parametrize("verified", ["generator", "critic"])
def test_verifying_an_iteration_leaves_other_optimizers_alone(verified: str) -> None:
    torch.manual_seed(0)
    models = {
        "generator": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4)),
        "critic": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
    }
    plain = {name: adam(model) for name, model in models.items()}
    optimizers = {name: kitsune.KitsuneOptimizer(one, mode="replay") for name, one in plain.items()}

    def iteration(x: Tensor) -> Tensor:
        optimizers["critic"].zero_grad()
        fake = models["generator"](x)
        loss = functional.softplus(-models["critic"](x)).mean()
        loss = loss + functional.softplus(models["critic"](fake.detach())).mean()
        loss.backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        functional.softplus(-models["critic"](fake)).mean().backward()
        optimizers["generator"].step()
        return loss.detach()

    def observed() -> list[Tensor | None]:
        values: list[Tensor | None] = [torch.get_rng_state()]
        for name, model in models.items():
            values += model.state_dict().values()
            values += [param.grad for param in model.parameters()]
            values += [value for state in plain[name].state.values() for value in state.values()]
        return [None if value is None else value.clone() for value in values]

    for index in range(6):
        iteration(batch(index)[0][0])
    before = observed()
    found = kitsune.verify(iteration, batch(6)[0][0], optimizer=optimizers[verified])
    assert found.agrees, found
    for value, wanted in zip(observed(), before, strict=True):
        assert value is wanted is None or torch.equal(value, wanted)


def test_verifying_an_iteration_puts_back_buffers_that_the_model_replaces() -> None:
    model = Noticing()
    training = Training("drop_in", model, adam(model))
    training.run(4)
    mean = model.mean
    verification(training, 4)
    assert model.mean is mean
