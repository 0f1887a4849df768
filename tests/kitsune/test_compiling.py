"""Trainings go on while kernels for them are compiled. On the CPU, with compilers that end when the test lets them."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from kitsune.background import is_quiet, wait_until_quiet
from kitsune.engine import contest, planning, rewriting
from tests.kitsune.compiling import Compiling
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.test_fusion import Judge, always
from tests.kitsune.test_streams import costs_of_a_gpu
from tests.kitsune.training import FORMS, Net, Training, batch, compare, sgd

STEPS = 120
FIRST, SECOND = 40, 60  # the steps before which compilers end


def fuse_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever can be fused is, and replays after few steps."""
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KITSUNE_ENABLE_FUSION")
    for module in ("engine.region", "loop.step_loop", "loop.split_step", "loop.drop_in"):
        monkeypatch.setattr(f"kitsune.{module}.refuse_fusion", lambda device: None)
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Judge(always))
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)
    monkeypatch.setattr(contest.Contest, "_best", lambda contest: 1)
    for constant, value in (("_SAMPLES", 1), ("_TURN", 2), ("_RUNOFF_TURNS", 1), ("_RUNOFF_TURN", 2)):
        monkeypatch.setattr(contest, constant, value)


@pytest.fixture(autouse=True)
def _a_device_that_fuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replay_is_faster: None, compiling: Compiling
) -> None:
    fuse_on_a_cpu(monkeypatch, tmp_path)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net(batch_norm=True)
    return model, sgd(model)


def under_way(form: str, steps: int = 20) -> Training:
    """A training for which kernels are being compiled."""
    training = Training(form, *build(), mode="auto")
    training.run(steps)
    assert not is_quiet()
    return training


@pytest.mark.support("Speed", "the training goes on while kernels for it are compiled", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_the_training_goes_on_and_is_fused_then(form: str, compiling: Compiling) -> None:
    """With the same results, step by step."""
    modes = list[tuple[str, bool]]()

    def edit(training: Training, index: int) -> None:
        if training.form == "eager":
            return
        for place, number in enumerate((FIRST, SECOND)):
            if index == number:
                compiling.finish(place)
        status = training.status()
        modes.append((status.mode, status.fused))
        if index in (FIRST - 1, SECOND - 1):
            parts = 3 if index < FIRST else 2
            assert f"kernels of fused operators are being compiled (0 of {parts} parts)" in status.reason
            assert status.executor == "in order"
            assert status.replays >= index - 12
            assert status.setup_seconds < 30

    training = compare(form, build, mode="auto", steps=STEPS, edit=edit, rtol=1e-4, atol=1e-5, replays=STEPS - 20)
    status = training.status()
    assert (status.mode, status.fused) == ("replay", True)
    assert not any(fused for _, fused in modes[: SECOND + 1])


@pytest.mark.parametrize(("way", "form"), [*(("delete", form) for form in FORMS), ("release", "train_step")])
def test_what_is_given_up_is_not_compiled_any_more(way: str, form: str, compiling: Compiling) -> None:
    """What was captured in another state is not given up: that may come back."""
    before = set(threading.enumerate())
    training = under_way(form)
    if way == "release":
        assert training.train_step is not None
        training.train_step.release()
    else:
        del training
        gc.collect()
    assert compiling.ends[0].is_set()
    wait_until_quiet()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("form", FORMS)
def test_other_batches_run_as_plain_pytorch_meanwhile(form: str, compiling: Compiling) -> None:
    """They are captured, and fused, when nothing disturbs what is timed for that."""
    small = partial(batch, size=4)
    training = under_way(form)
    graphs = training.status().graphs
    replays = training.status().replays
    training.run(20, small, start=20)
    assert (training.status().graphs, training.status().replays) == (graphs, replays)
    assert training.status().mode == "measuring"
    training.run(5, start=40)
    assert training.status().replays == replays + 5
    for place in (0, 1):
        compiling.finish(place)
        training.run(5, start=45)
    training.run(60, start=50)
    assert training.status().fused
    training.run(60, small, start=110)
    assert training.status().graphs == graphs + 1
    assert training.status().fused


@pytest.mark.parametrize("form", FORMS)
def test_a_short_training_is_replayed_to_its_end(form: str) -> None:
    training = under_way(form, steps=30)
    assert training.status().replays >= 18
