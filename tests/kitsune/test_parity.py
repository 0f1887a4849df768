"""The numerical promise: a replayed step is as accurate as an eager one, and training ends where eager's does."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kitsune
import models
from kitsune.engine import planning, rewriting
from kitsune.plan import Plan
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.plans import fuse_all_that_agrees, let_win
from tests.kitsune.test_streams import costs_of_a_gpu

FORMS = ("train_step", "drop_in")
PLANS: dict[str, dict[str, Any]] = {
    "train_step": {"mode": "replay"},
    "streams": {"num_streams": 4, "enable_fusion": False},
    "fused": {"num_streams": 1, "enable_fusion": True},
    "fused streams": {"num_streams": 4, "enable_fusion": True},
}
"""Forms of `TrainStep`: its options, with which it is replayed by a plan of that kind."""
ACCURATE_FORMS = (*PLANS, "drop_in")
PRECISIONS = ("fp32", "amp")
BATCH_SIZES = {
    "cpu": {"mlp": 16, "lenet": 16, "resnet18": 2},
    "cuda": {"mlp": 64, "lenet": 64, "resnet18": 32},
}
WARM_UP_STEPS = 3
MOST_TRIALS = 400
"""On a GPU a loop is watched for 160 replays first, if its batches might come back to few places."""
NUM_DRAWS = {"cpu": 7, "cuda": 15}  # batches over which medians of errors are taken


@dataclass(frozen=True)
class State:
    """Everything that a step reads and writes, apart from its batch: copies, by name."""

    tensors: dict[str, Tensor]
    random: Tensor


class Trainee:
    """One workload in training: eagerly, or in one of Kitsune's forms.

    Its optimizer state exists from the start, as zeros, which is what Adam's first step would make.
    """

    def __init__(self, name: str, form: str, precision: str, device: torch.device, *, seed: int = 0) -> None:
        self.workload = models.build(name, seed=seed)
        self.device, self.form, self.amp = device, form, precision == "amp"
        self.batch_size = BATCH_SIZES[device.type][name]
        self.model = self.workload.module.to(device, torch.float64 if precision == "fp64" else torch.float32)
        self.plain = torch.optim.Adam(self.model.parameters(), lr=self.workload.learning_rate)
        self.optimizer: torch.optim.Optimizer = self.plain
        self.train_step: kitsune.TrainStep | None = None
        if form in PLANS:
            self.train_step = kitsune.TrainStep(
                self.model, self.workload.loss_fn, self.plain, enable_amp=self.amp, **PLANS[form]
            )
        elif form == "drop_in":
            self.optimizer = kitsune.KitsuneOptimizer(self.plain, mode="replay")

    def step(self, index: int) -> Tensor:
        """Trains on batch number `index`; returns the loss."""
        x, y = self.workload.batch(self.batch_size, index=index, device=self.device)
        x = x.to(next(self.model.parameters()).dtype)
        if self.train_step is not None:
            return self.train_step(x, y)
        self.optimizer.zero_grad()
        context = torch.autocast(self.device.type, torch.bfloat16) if self.amp else contextlib.nullcontext()
        with context:
            loss = self.workload.loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Steps until replays go on as they will: by a plan of the form's kind."""
        for index in range(WARM_UP_STEPS):
            self.step(index)
        if self.train_step is None:
            return
        for _ in range(MOST_TRIALS):
            plan = self.train_step.plan()
            if self.train_step.status().mode == "replay" and plan is not None and is_of_form(plan, self.form):
                break
            self.step(0)
        else:
            pytest.fail(f"no plan for {self.form} came to be used:\n{self.train_step.status()}\n{plan}")
        operators = {task.operator for task in plan.graph.tasks if task.operator.startswith("kitsune.")}
        assert (len(operators - {"kitsune.adam_.default"}) > 1) == plan.is_fused, plan.fusions

    def replays(self) -> int:
        source = self.train_step if self.train_step is not None else self.optimizer
        assert isinstance(source, (kitsune.TrainStep, kitsune.KitsuneOptimizer))
        return source.status().replays

    def save(self) -> State:
        tensors = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        return State(tensors, torch.get_rng_state())

    def load(self, state: State) -> None:
        """Puts `state` into the same tensors, so that graphs that were captured stay valid."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(state.tensors[name])
        torch.set_rng_state(state.random)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
        for name, param in self.model.named_parameters():
            state = self.plain.state[param]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            yield from ((f"{name}.{key}", value) for key, value in state.items())


def is_of_form(plan: Plan, form: str) -> bool:
    return (plan.schedule.num_streams > 1, plan.is_fused) == ("streams" in form, "fused" in form)


@functools.lru_cache(maxsize=8)
def states_of_a_run(name: str, device: torch.device, steps: tuple[int, ...]) -> dict[int, State]:
    """What an eager run in fp32 holds before each of `steps`."""
    trainee = Trainee(name, "eager", "fp32", device)
    states = {}
    for index in range(max(steps) + 1):
        if index in steps:
            states[index] = trainee.save()
        if index < max(steps):
            trainee.step(index)
    return states


def after_step(trainee: Trainee, state: State, index: int) -> dict[str, Tensor]:
    """What one step from `state` leaves behind."""
    trainee.load(state)
    trainee.step(index)
    return trainee.save().tensors


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each floating-point tensor; the others must be exact."""
    result = {}
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, exact[name]), name
            continue
        result[name] = (tensor.double() - exact[name]).abs().max().item()
    return result


def check_accuracy(name: str, precision: str, form: str, device: torch.device, steps: tuple[int, ...]) -> None:
    states = states_of_a_run(name, device, steps)
    reference, eager = Trainee(name, "eager", "fp64", device), Trainee(name, "eager", precision, device)
    trainee = Trainee(name, form, precision, device)
    trainee.save()
    trainee.warm_up()
    sums_differ = "fused" in form
    for index in steps:
        before, state = trainee.replays(), states[index]
        draws = []
        for batch in range(index, index + (NUM_DRAWS[device.type] if sums_differ else 1)):
            exact, expected, found = (after_step(one, state, batch) for one in (reference, eager, trainee))
            moved = [key for key in expected if not torch.equal(state.tensors[key].double(), exact[key])]
            assert len(moved) > len(expected) / 2
            if sums_differ:
                draws.append(errors_of_a_draw(found, expected, exact, eager, state))
            else:
                seen = violations(errors(found, exact), errors(expected, exact), exact)
        if sums_differ:
            seen = violations_where_sums_differ(draws)
        assert trainee.replays() == before + max(len(draws), 1), f"step {index} was not replayed"
        assert not seen, f"step {index}"


def violations(found: dict[str, float], expected: dict[str, float], exact: dict[str, Tensor]) -> list[str]:
    """The tensors that are less accurate than promised: twice eager's error plus one unit in the last place."""
    result = []
    for name, error in found.items():
        unit = torch.finfo(torch.float32).eps * exact[name].abs().max().item()
        if not error <= 2 * expected[name] + unit:
            result.append(f"{name}: {error:.3g}, eager {expected[name]:.3g}")
    return result


Draw = tuple[dict[str, float], dict[str, float]]
"""The errors that a step has made of each tensor, and those that eager's has."""


def violations_where_sums_differ(draws: Sequence[Draw]) -> list[str]:
    """The same for operators that add up in another order than eager's, which draws the errors anew.

    So medians are compared, of steps with several batches: where rounding takes an activation to the other side of
    zero, an error is many times as large as where it does not. Eager's error is taken to be no less than its usual one
    of such tensors: one of few elements may be right by chance.
    """
    of_found, of_expected = (
        {name: statistics.median(draw[place][name] for draw in draws) for name in draws[0][place]} for place in (0, 1)
    )
    result = []
    for name, error in of_found.items():
        usual = statistics.median(of_expected[other] for other in of_expected if _kind(other) == _kind(name))
        allowed = 2 * max(of_expected[name], usual) + torch.finfo(torch.float32).eps
        if not error <= allowed:
            result.append(f"{name}: {error:.3g}, eager {of_expected[name]:.3g}, usually {usual:.3g}")
    return result


def errors_of_a_draw(
    found: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor], eager: Trainee, state: State
) -> Draw:
    """Adam makes much of the gradients that are all rounding, so that no parameter can be compared: it has to be what
    Adam makes, in float64, of the moments that were found."""
    of_found, of_expected = (
        relative_errors(tensors, exact | adam_of_moments(eager, state, tensors)) for tensors in (found, expected)
    )
    return of_found, of_expected


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the error of each floating-point tensor, relative to its own; the others must be exact."""
    result = {}
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, exact[name]), name
            continue
        norm = torch.linalg.vector_norm(exact[name]).item()
        result[name] = torch.linalg.vector_norm(tensor.double() - exact[name]).item() / max(norm, 1e-30)
    return result


def adam_of_moments(trainee: Trainee, state: State, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that a step from `state` should lead to which has left the moments that were `found`."""
    beta1, beta2 = trainee.plain.defaults["betas"]
    result = {}
    for name, _ in trainee.model.named_parameters():
        count, mean, square = (found[f"{name}.{key}"].double() for key in ("step", "exp_avg", "exp_avg_sq"))
        scale = (square / (1 - beta2**count)).sqrt() + trainee.plain.defaults["eps"]
        step = trainee.workload.learning_rate * mean / (1 - beta1**count) / scale
        result[name] = state.tensors[name].double() - step
    return result


@pytest.fixture(autouse=True, scope="module")
def _drop_states() -> Iterator[None]:
    yield
    states_of_a_run.cache_clear()


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else cuDNN's sums in changing order would make eager steps several times less accurate than one another."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def the_form_wins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets a plan of the form's kind win, the one that is predicted to be the fastest. Nothing depends on times."""
    form = request.node.callspec.params["form"]
    if form in FORMS:
        return
    request.getfixturevalue("replay_is_faster")
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    let_win(monkeypatch, functools.partial(is_of_form, form=form))
    fuse_all_that_agrees(monkeypatch)
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)
    if request.node.callspec.params["device"] == "cpu":
        for module in ("engine.region", "loop.step_loop"):
            for refuse in ("refuse_streams", "refuse_fusion"):
                monkeypatch.setattr(f"kitsune.{module}.{refuse}", lambda device: None)
        monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
        monkeypatch.setattr(
            rewriting, "channels_last", lambda module: module
        )  # operators of the CPU lose precision by it


@pytest.mark.support("Precision", "errors against float64 at most twice those of plain PyTorch", "replayed")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("deterministic", "the_form_wins")
@pytest.mark.parametrize("form", ACCURATE_FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", models.names())
def test_a_replayed_step_is_as_accurate_as_an_eager_one(
    name: str, precision: str, form: str, device: torch.device
) -> None:
    """Late in a run, too, on a GPU, where 300 steps take less time than a fused step takes to be made."""
    check_accuracy(name, precision, form, device, (0, 1, 10) if device.type == "cpu" else (0, 1, 10, 100, 300))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("deterministic", "the_form_wins")
@pytest.mark.parametrize("form", ACCURATE_FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("device", ["cpu"])
def test_a_replayed_step_is_as_accurate_late_in_a_run(name: str, precision: str, form: str, device: str) -> None:
    check_accuracy(name, precision, form, torch.device(device), (100, 300))


@functools.cache
def final_losses(name: str, precision: str, device: torch.device, steps: int) -> dict[int, float]:
    """By seed, the mean loss of the last ten of `steps` eager steps."""
    return {seed: _final_loss(Trainee(name, "eager", precision, device, seed=seed), steps) for seed in (0, 1, 2)}


def _final_loss(trainee: Trainee, steps: int) -> float:
    losses = [trainee.step(index) for index in range(steps)]
    return torch.stack(losses[-10:]).mean().item()


def check_final_loss(name: str, precision: str, form: str, device: torch.device, steps: int) -> None:
    eager = final_losses(name, precision, device, steps)
    median = sorted(eager, key=lambda seed: eager[seed])[1]
    trainee = Trainee(name, form, precision, device, seed=median)
    loss = _final_loss(trainee, steps)
    assert trainee.replays() >= steps - 2
    assert min(eager.values()) <= loss <= max(eager.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_the_final_loss_lies_within_the_spread_of_eager_seeds(
    name: str, precision: str, form: str, device: torch.device
) -> None:
    check_final_loss(name, precision, form, device, 40)


T_4_DEGREES_99_PERCENT = 4.604


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", models.names())
def test_the_loss_after_300_steps_lies_within_the_spread_of_seeds(
    name: str, precision: str, form: str, device: torch.device
) -> None:
    """Both over three seeds: runs that round differently part in the end, and are then as far apart as two seeds.

    (Of one such run, half the outcomes lie outside of the range of three others.)
    """
    eager = torch.tensor(list(final_losses(name, precision, device, 300).values()), dtype=torch.float64)
    found = torch.tensor(
        [_final_loss(Trainee(name, form, precision, device, seed=seed), 300) for seed in (0, 1, 2)], dtype=torch.float64
    )
    error = ((eager.var() + found.var()) / 3).sqrt()
    assert (found.mean() - eager.mean()).abs() <= T_4_DEGREES_99_PERCENT * error, (found.tolist(), eager.tolist())


def test_the_accuracy_check_notices_a_wrong_learning_rate(device: torch.device) -> None:
    """The check itself: a step that is one part in ten thousand too long must fail it."""
    state, exact = _tenth_step(device)
    eager, wrong = (Trainee("mlp", "eager", "fp32", device) for _ in range(2))
    wrong.plain.param_groups[0]["lr"] *= 1 + 1e-4
    expected, found = (after_step(trainee, state, 10) for trainee in (eager, wrong))
    parameters = dict(wrong.model.named_parameters()).keys()
    seen = violations(errors(found, exact), errors(expected, exact), exact)
    assert {line.split(":")[0] for line in seen} == parameters
    seen = violations_where_sums_differ([errors_of_a_draw(found, expected, exact, eager, state)])
    assert {line.split(":")[0] for line in seen} == parameters


def test_the_accuracy_check_notices_wrong_gradients(device: torch.device) -> None:
    """All of them, if they are one part in ten thousand too large."""
    state, exact = _tenth_step(device)
    eager, wrong = (Trainee("mlp", "eager", "fp32", device) for _ in range(2))
    for param in wrong.model.parameters():
        param.register_hook(lambda grad: grad * (1 + 1e-4))
    expected, found = (after_step(trainee, state, 10) for trainee in (eager, wrong))
    seen = violations_where_sums_differ([errors_of_a_draw(found, expected, exact, eager, state)])
    moments = {name for name in found if _kind(name) in ("exp_avg", "exp_avg_sq")}
    assert {line.split(":")[0] for line in seen} == moments


def _tenth_step(device: torch.device) -> tuple[State, dict[str, Tensor]]:
    """Of a multilayer perceptron: what there is before, and exactly what is left behind."""
    state = states_of_a_run("mlp", device, (0, 1, 10))[10]
    return state, after_step(Trainee("mlp", "eager", "fp64", device), state, 10)
