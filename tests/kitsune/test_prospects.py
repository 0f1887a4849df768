"""Replays that lose narrowly, and may yet become faster. On the CPU, under a clock that the test sets."""

from __future__ import annotations

from pathlib import Path

import pytest

import kitsune
from kitsune import fallback
from kitsune.background import wait_until_quiet
from kitsune.engine import fusing
from kitsune.fallback import Chooser
from tests.kitsune.clock import Clock
from tests.kitsune.test_compiling import build, fuse_on_a_cpu
from tests.kitsune.test_fallback import drive
from tests.kitsune.training import FORMS, Training

STEPS = 160
EAGER = 1.0


@pytest.fixture
def _a_device_that_fuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fuse_on_a_cpu(monkeypatch, tmp_path)


def statuses(
    form: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, replay: float, fused: float
) -> list[kitsune.Status]:
    """Those after each step of a training whose eager steps take `EAGER` seconds."""
    finish = Chooser.finish
    training = Training(form, *build(), mode="auto")
    found = list[kitsune.Status]()

    def finished(chooser: Chooser, choice: fallback.Choice, steps: int = 1) -> None:
        clock.cost = EAGER if choice == "eager" else fused if training.status().fused else replay
        finish(chooser, choice, steps)

    monkeypatch.setattr(Chooser, "finish", finished)
    for index in range(STEPS):
        training.run(1, start=index)
        wait_until_quiet()
        found.append(training.status())
    return found


@pytest.mark.usefixtures("_a_device_that_fuses")
@pytest.mark.parametrize(("fused", "mode"), [(0.5, "replay"), (1.03125, "eager")])
@pytest.mark.parametrize("form", FORMS)
def test_what_loses_narrowly_is_fused_before_that_is_judged(
    form: str, fused: float, mode: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device sets the pace, the captured operators take as long as they did before."""
    found = statuses(form, clock, monkeypatch, 1.0625, fused)
    assert any(status.fused for status in found)
    status = found[-1]
    assert (status.mode, status.fused) == (mode, mode == "replay")
    assert status.replay_seconds == fused
    assert ("no faster" in status.reason) == (mode == "eager")


@pytest.mark.usefixtures("_a_device_that_fuses")
@pytest.mark.parametrize("form", FORMS)
def test_what_loses_clearly_is_given_up(form: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    found = statuses(form, clock, monkeypatch, 1.25, 0.1)
    assert not any(status.fused for status in found)
    assert found[-1].mode == "eager"


@pytest.mark.usefixtures("_a_device_that_fuses")
@pytest.mark.parametrize("form", FORMS)
def test_where_fusing_fails_what_lost_has_lost(form: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fusing.Fusing, "advance", fail)
    status = statuses(form, clock, monkeypatch, 1.0625, 0.1)[-1]
    assert status.mode == "eager"
    assert any("no compiler" in refusal for refusal in status.refusals)


@pytest.mark.parametrize(
    ("may_improve", "replay", "kept"),
    [(True, 1.0625, True), (True, 1.0, True), (True, 1.125, False), (False, 1.0625, False), (False, 1.0, False)],
)
def test_the_chooser_keeps_what_may_improve(may_improve: bool, replay: float, kept: bool, clock: Clock) -> None:
    def cost(choice: str) -> float:
        return EAGER if choice == "eager" else replay

    chooser = Chooser("auto", clock.synchronize)
    chooser.may_improve = may_improve
    drive(chooser, clock, cost)
    assert chooser.settled
    assert (chooser.refusal is None) == kept
    assert chooser.describe()[0] == ("replay" if kept else "eager")
    assert ("is to become faster" in chooser.describe()[1]) == kept
    chooser.will_not_improve()
    assert chooser.settled != kept
    drive(chooser, clock, cost)
    assert chooser.describe()[0] == "eager"


def test_what_has_won_is_not_timed_again_because_it_stays_as_it_is(clock: Clock) -> None:
    def cost(choice: str) -> float:
        return EAGER if choice == "eager" else 0.5

    chooser = Chooser("auto", clock.synchronize)
    chooser.may_improve = True
    drive(chooser, clock, cost)
    waits = clock.waits
    chooser.will_not_improve()
    drive(chooser, clock, cost)
    assert clock.waits == waits
    assert chooser.describe() == ("replay", "replay was measured faster than eager")
