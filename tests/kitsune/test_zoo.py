"""Models that were not known when Kitsune was made: they train as without it, accelerated or with a reason why not."""

from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kitsune
from kitsune.background import wait_until_quiet
from kitsune.engine import contest, rewriting
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.test_fusion import Judge, always
from tests.kitsune.zoo import ZOO

LONG = ("mobilenet_v2", "densenet121", "efficientnet_b0")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in ZOO]
REASONS_ON_A_GPU = {"lstm": "a recurrent layer of torch is called on a GPU"}
STEPS = 6
NUM_BATCHES = 3
LEARNING_RATE = 1e-3  # with larger ones rounding decides what becomes of some of them


class Run:
    """A model of the zoo, trained with SGD."""

    def __init__(self, name: str, form: str, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.kind, self.device = ZOO[name], device
        self.model: nn.Module = self.kind.build().to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.step: kitsune.TrainStep | None = None
        if form == "train_step":
            self.step = kitsune.TrainStep(self.model, self.kind.loss_fn, self.optimizer, **options)
        elif form == "drop_in":
            self.optimizer = kitsune.KitsuneOptimizer(self.optimizer, **options)
        self.losses: list[Tensor] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x, y = self.kind.batch(torch.Generator().manual_seed(len(self.losses)))
            self.losses.append(self._train(x.to(self.device), y.to(self.device)))

    def _train(self, x: Tensor, y: Tensor) -> Tensor:
        if self.step is not None:
            return self.step(x, y)
        self.optimizer.zero_grad()
        loss = self.kind.loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def status(self) -> kitsune.Status:
        source = self.optimizer if self.step is None else self.step
        assert isinstance(source, (kitsune.TrainStep, kitsune.KitsuneOptimizer))
        return source.status()

    def result(self) -> list[Tensor]:
        return [torch.stack(self.losses), *self.model.state_dict().values()]


def assert_alike(found: Run, wanted: Run) -> None:
    for one, other in zip(found.result(), wanted.result(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def assert_one_step_alike(run: Run, eager: Run) -> None:
    """From where `run` has come to, as after many steps rounding makes a difference of its own.

    What a step changes must be what eager's changes, but for some times what rounding makes of that: what becomes
    of it where every parameter is off by about as much as rounding takes away. With most batches, that is: where an
    activation is next to a bend of its function, rounding decides on which side, and for the gradients of all layers
    before.
    """
    state = copy.deepcopy(run.model.state_dict())
    excesses = [excess(run, eager, state, index) for index in range(NUM_BATCHES)]
    middle = {name: statistics.median(one[name] for one in excesses) for name in excesses[0]}
    assert max(middle.values()) <= 1, f"{middle}\n{run.status()}\n{run.status().plan}"


def excess(run: Run, eager: Run, state: dict[str, Tensor], index: int) -> dict[str, float]:
    """By name, what a step with that batch changes otherwise than eager's, relative to what is allowed."""
    found, wanted = (one_step(one, state, index) for one in (run, eager))
    generator = torch.Generator(run.device).manual_seed(0)
    rounded = [one_step(eager, off_by_rounding(state, generator), index) for _ in range(3)]
    result = {}
    for name in wanted:
        allowed = 10 * max(distance(other[name], wanted[name]) for other in rounded)
        unit = torch.finfo(torch.float32).eps * state[name].double().norm().item() if name in state else 1e-6
        relative = distance(found[name], wanted[name]) / max(allowed + unit, 1e-30)
        result[name] = math.inf if math.isnan(relative) else relative  # which no median or maximum would tell
    return result


def one_step(run: Run, state: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """What a step with that batch changes of `state`, by name, and its loss."""
    run.model.load_state_dict(state)
    run.losses = [torch.zeros(())] * index
    torch.manual_seed(1)
    run.train(1)
    after = run.model.state_dict()
    return {"loss": run.losses[-1], **{name: after[name].detach() - state[name] for name in state}}


def off_by_rounding(state: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    def off(tensor: Tensor) -> Tensor:
        noise = torch.empty_like(tensor).uniform_(-1, 1, generator=generator)
        return tensor * (1 + noise * torch.finfo(torch.float32).eps)

    return {name: off(tensor) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).norm().item()


@pytest.mark.support(
    "Models",
    "MobileNetV2, DenseNet-121, EfficientNet-B0, a U-Net, a graph network, a denoiser, an LSTM",
    "replayed",
)
@pytest.mark.parametrize("form", ["train_step", "drop_in"])
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_without_kitsune(name: str, form: str) -> None:
    eager, run = Run(name, "eager", "cpu"), Run(name, form, "cpu", mode="replay")
    for one in (eager, run):
        torch.manual_seed(1)
        one.train(STEPS)
    assert_alike(run, eager)
    assert run.status().replays >= STEPS - 2


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("name", NAMES)
def test_fused_it_trains_as_without_kitsune(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what computes on the CPU as the fused operators do on a GPU, with all replacements that agree."""
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    for module in ("engine.region", "loop.step_loop"):
        monkeypatch.setattr(f"kitsune.{module}.refuse_fusion", lambda device: None)
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Judge(always))
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
    monkeypatch.setattr(rewriting, "channels_last", lambda module: module)
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: len(contest._makers) - 1)
    for constant, value in (("_SAMPLES", 1), ("_TURN", 2), ("_RUNOFF_TURNS", 1), ("_RUNOFF_TURN", 2)):
        monkeypatch.setattr(contest, constant, value)
    eager, run = Run(name, "eager", "cpu"), Run(name, "train_step", "cpu", enable_fusion=True, num_streams=1)
    run.train(4 * STEPS)
    assert run.step is not None
    plan = run.step.plan()
    assert plan is not None
    assert plan.is_fused, run.status()
    assert_one_step_alike(run, eager)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(ZOO))
def test_on_a_gpu_it_trains_or_steps_aside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has been chosen how, fusion included, a step does what eager's does."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, run = Run(name, "eager", "cuda"), Run(name, "train_step", "cuda", enable_fusion=True)
    for _ in range(30):
        run.train(20)
        wait_until_quiet()
    status = run.status()
    reason = REASONS_ON_A_GPU.get(name)
    assert status.mode == "replay" or (reason is not None and reason in status.refusals[0]), status
    assert_one_step_alike(run, eager)
