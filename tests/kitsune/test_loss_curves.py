"""Long trainings: losses and accuracies of replayed steps are those of plain PyTorch, as far as rounding lets them be.

Trainings are chaotic: weights that differ in the last place lead to other losses after a while. So plain PyTorch trains
twice, the second time from weights that differ so, and replays may be little farther from the first than the second is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import kitsune
import models
from kitsune.fallback import Chooser

NUM_BATCHES = 50
NUM_HELD_OUT = 20
NUM_WINDOWS = 20
ROUNDING = 1e-6

TIMES = 3.0
"""How much farther from the first training replays may be than the second is, for chance;"""
OF_FIRST_LOSS = 0.001
"""and beside that, where rounding has not grown yet."""

Step = Callable[[Tensor, Tensor], Tensor]


class Training(NamedTuple):
    """What came of one.

    Attributes:
        curve: means of the losses in windows of as many steps each, float64.
        first_loss: of the first step.
        right: of examples that were not trained on, the share classified rightly; NaN where there are no classes.
    """

    curve: Tensor
    first_loss: float
    right: float


class Setting(NamedTuple):
    """A training of a model of `models`, on batches of `size`."""

    name: str
    size: int
    device: torch.device
    steps: int
    amp: bool
    seed: int

    def run(self, step_of: Callable[[models.Workload, torch.optim.Optimizer], Step], change: float = 0.0) -> Training:
        """Trains by the step that `step_of` makes, from weights that are changed by `change` of what they are."""
        workload = models.build(self.name, seed=self.seed)
        module = workload.module.to(self.device)
        layout = torch.channels_last if workload.channels_last else torch.preserve_format
        module.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs omit this overload
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(1 + change * torch.randn(param.shape, generator=generator).to(self.device))
        batches = [self._batch(workload, index, layout) for index in range(NUM_BATCHES)]
        step = step_of(workload, torch.optim.Adam(module.parameters(), lr=workload.learning_rate))
        losses = torch.stack([step(*batches[index % NUM_BATCHES]).detach().clone() for index in range(self.steps)])
        windows = losses.double().cpu().chunk(NUM_WINDOWS)
        held_out = [self._batch(workload, 1000 + index, layout) for index in range(NUM_HELD_OUT)]
        return Training(torch.stack([window.mean() for window in windows]), float(losses[0]), _right(module, held_out))

    def _batch(self, workload: models.Workload, index: int, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        x, y = workload.batch(self.size, index=index, device=self.device)
        return x.contiguous(memory_format=layout) if layout is torch.channels_last else x, y

    def plainly(self, workload: models.Workload, optimizer: torch.optim.Optimizer) -> Step:
        """As people write it."""

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.amp):
                loss = workload.loss_fn(workload.module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        return step


def _right(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    module.eval()
    with torch.no_grad():
        found = [(module(x), y) for x, y in batches]
    if any(y.dim() != 1 for _, y in found):
        return math.nan
    return float(torch.cat([logits.argmax(1) == y for logits, y in found]).double().mean())


def small(name: str, size: int) -> list[object]:
    return [
        pytest.param(name, size, amp, seed, marks=[pytest.mark.gpu, pytest.mark.slow], id=f"{name}-{precision}-{seed}")
        for amp, precision in ((True, "amp"), (False, "fp32"))
        for seed in range(3)
    ]


def large(name: str, size: int) -> list[object]:
    """They take minutes each."""
    marks = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200)]
    return [pytest.param(name, size, True, seed, marks=marks, id=f"{name}-amp-{seed}") for seed in range(2)]


@pytest.mark.parametrize(
    ("name", "size", "amp", "seed"),
    [
        *small("mlp", 64),
        *small("lenet", 64),
        *small("resnet18", 128),
        *large("resnet50", 32),
        *large("vit_b_16", 32),
        *large("bert_base", 16),
        *large("gpt2_small", 4),
    ],
)
def test_a_thousand_steps_on_a_gpu(name: str, size: int, amp: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = models.missing(name)
    if missing is not None:
        pytest.skip(missing)
    monkeypatch.delenv("KITSUNE_ENABLE_FUSION")  # it is the default
    # Which is faster depends on what else the machine does.
    monkeypatch.setattr(Chooser, "_settle", lambda chooser: setattr(chooser, "settled", True))
    status = compare(Setting(name, size, torch.device("cuda"), 1000, amp, seed))
    assert status.fused, status


@pytest.mark.parametrize("amp", [False, True])
def test_some_steps_on_a_cpu(amp: bool) -> None:
    compare(Setting("mlp", 32, torch.device("cpu"), 200, amp, seed=0))


def test_another_learning_rate_is_told_apart() -> None:
    setting = Setting("mlp", 32, torch.device("cpu"), 200, amp=True, seed=0)

    def faster(workload: models.Workload, optimizer: torch.optim.Optimizer) -> Step:
        optimizer.param_groups[0]["lr"] *= 1.1
        return setting.plainly(workload, optimizer)

    plain, changed = setting.run(setting.plainly), setting.run(setting.plainly, change=ROUNDING)
    assert _distance(plain, setting.run(faster)) > _allowed(plain, changed)


def compare(setting: Setting) -> kitsune.Status:
    """Trains three times; returns what Kitsune says of its training."""
    steps: list[kitsune.TrainStep] = []

    def replayed(workload: models.Workload, optimizer: torch.optim.Optimizer) -> Step:
        # By itself it fuses; on a CPU it might not replay.
        mode = "auto" if setting.device.type == "cuda" else "replay"
        step = kitsune.TrainStep(workload.module, workload.loss_fn, optimizer, enable_amp=setting.amp, mode=mode)
        steps.append(step)
        return step

    plain, changed = setting.run(setting.plainly), setting.run(setting.plainly, change=ROUNDING)
    found = setting.run(replayed)
    status = steps[0].status()
    assert status.mode == "replay", status
    assert status.replays > setting.steps / 2, status
    assert _distance(plain, found) <= _allowed(plain, changed), (
        f"{plain.curve.tolist()}\n{found.curve.tolist()}\n{status}"
    )
    assert plain.curve[-1] < plain.curve[0], "nothing was learned"
    if not math.isnan(plain.right):
        chance = math.sqrt(2 * max(plain.right * (1 - plain.right), 0.01) / (NUM_HELD_OUT * setting.size))
        assert abs(found.right - plain.right) <= TIMES * (abs(changed.right - plain.right) + chance)
    return status


def _allowed(plain: Training, changed: Training) -> float:
    return TIMES * _distance(plain, changed) + OF_FIRST_LOSS * plain.first_loss


def _distance(one: Training, other: Training) -> float:
    """Of the curves: the root of the mean square."""
    return float((one.curve - other.curve).square().mean().sqrt())
