"""More shapes than graphs are kept, and captures that leave the choice alone: counted, not timed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kitsune import budget
from kitsune.budget import FIRST_CAPTURES, CaptureBudget
from kitsune.fallback import Choice, Chooser
from kitsune.loop.cache import StepCache
from kitsune.loop.guarded_step import GuardedStep
from kitsune.loop.room import USES_BEFORE_OTHERS_GIVE_WAY
from tests.kitsune.clock import Clock
from tests.kitsune.training import Batch, Training, batch, compare, net_and_adam

FORMS = {"train_step": {}, "drop_in": {}, "deferred": {"defer_loss": True}}


def train(form: str, size: Callable[[int], int], *, steps: int, **options: Any) -> Training:
    """Compares with plain PyTorch, with batches of the sizes given."""

    def batches(index: int) -> Batch:
        return batch(index, size=size(index))

    kind = form if form == "train_step" else "drop_in"
    return compare(kind, steps=steps, replays=0, batches=batches, **FORMS[form], **options)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[GuardedStep]:
    """The steps that were captured, in order."""
    steps: list[GuardedStep] = []
    enter = StepCache.enter

    def entered(cache: StepCache[Any], step: GuardedStep) -> None:
        steps.append(step)
        enter(cache, step)

    monkeypatch.setattr(StepCache, "enter", entered)
    return steps


@pytest.mark.support("Shapes and modes", "more shapes than graphs are kept, in turn: the first ones stay", "replayed")
@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_shapes_in_turn_keep_the_graphs_that_there_are(form: str, more: int, captured: list[GuardedStep]) -> None:
    steps = 60
    status = train(form, lambda index: 2 + index % (2 + more), steps=steps, max_graphs=2).status()
    assert (len(captured), status.graphs) == (2, 2)
    assert status.replays >= steps * 2 // (2 + more) - 4
    (refusal,) = status.refusals
    assert "there is room for the graphs of 2" in refusal
    assert "max_graphs" in refusal


@pytest.mark.parametrize("form", FORMS)
def test_shapes_at_random(form: str, captured: list[GuardedStep]) -> None:
    draw = random.Random(1)
    sizes = [draw.randrange(2, 6) for _ in range(80)]
    status = train(form, lambda index: sizes[index], steps=80, max_graphs=2).status()
    assert (len(captured), status.graphs) == (2, 2)


@pytest.mark.support("Shapes and modes", "shapes of which none comes back after a while, and others do", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_a_shape_that_is_used_no_more_gives_way(form: str, captured: list[GuardedStep]) -> None:
    """As where a training goes on with larger images."""
    steps = 12 + USES_BEFORE_OTHERS_GIVE_WAY + 10
    status = train(form, lambda index: 2 + index % 2 if index < 12 else 7, steps=steps, max_graphs=2).status()
    assert (len(captured), status.graphs, status.mode) == (3, 2, "replay")


@pytest.mark.parametrize("form", FORMS)
def test_of_one_graph(form: str, captured: list[GuardedStep]) -> None:
    """A smaller batch at the end of each epoch leaves it alone."""
    status = train(form, lambda index: 3 if index % 6 == 5 else 6, steps=40, max_graphs=1).status()
    assert (len(captured), status.graphs) == (1, 1)
    assert status.replays >= 40 * 5 // 6 - 3


@pytest.fixture
def costs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of the test's clock: of an eager step, a replayed one and a capture."""
    costs = {"eager": 1.0, "replay": 0.5, "capture": 100.0}
    finish, enter = Chooser.finish, StepCache.enter

    def finished(chooser: Chooser, choice: Choice, steps: int = 1) -> None:
        clock.cost = costs[choice]
        finish(chooser, choice, steps)

    def entered(cache: StepCache[Any], step: GuardedStep) -> None:
        enter(cache, step)
        clock.now += costs["capture"]

    monkeypatch.setattr(Chooser, "finish", finished)
    monkeypatch.setattr(StepCache, "enter", entered)
    monkeypatch.setattr(budget, "time", clock)
    return costs


def choosers(captured: list[GuardedStep]) -> list[Chooser]:
    return [step.chooser for step in dict.fromkeys(captured)]


@pytest.mark.parametrize("form", FORMS)
def test_captures_are_no_part_of_what_replays_take(
    form: str, captured: list[GuardedStep], costs: dict[str, float], clock: Clock
) -> None:
    """Nor of what eager steps take, beside which another shape is captured."""
    training = Training(
        form if form == "train_step" else "drop_in", *net_and_adam(), mode="auto", max_graphs=3, **FORMS[form]
    )
    for index in range(60):
        (x, y), _ = batch(index, size=2 + index % 3)
        training.step(x, y)
    assert training.status().graphs == 3
    for chooser in choosers(captured):
        assert chooser.refusal is None
        assert (chooser.eager_seconds, chooser.replay_seconds) == (1.0, 0.5)


def test_two_captures_in_an_iteration_are_no_part_of_either(
    captured: list[GuardedStep], costs: dict[str, float], clock: Clock
) -> None:
    """Calls of two shapes: while those of one are captured, the others are timed, eagerly."""

    def loop(training: Training, x: Any, y: Any) -> Any:
        training.optimizer.zero_grad()
        for part in (x, x[:4]):
            training.loss_fn(training.model(part), y[: len(part)]).backward()
            training.memo["calls"] = training.memo.get("calls", 0) + 1
            if training.memo["calls"] < 4:
                break
        training.optimizer.step()
        return x.sum()

    training = Training("drop_in", *net_and_adam(), mode="auto", loop=loop)
    training.run(60)
    assert training.status().graphs == 2
    for chooser in choosers(captured):
        assert chooser.eager_seconds is not None
        assert chooser.replay_seconds is not None
        assert max(chooser.eager_seconds, chooser.replay_seconds) < 3.0, "a capture takes 100"


@pytest.mark.parametrize("form", ["train_step", "drop_in"])
def test_shapes_that_take_turns_for_a_while_are_captured_a_tenth_of_the_time(
    form: str, captured: list[GuardedStep], costs: dict[str, float], clock: Clock
) -> None:
    """Each is used often enough to be captured, and gives way to the next one."""
    costs["capture"] = 20.0
    training = Training(form, *net_and_adam(), mode="auto", max_graphs=1)
    period, num_periods = 2 * USES_BEFORE_OTHERS_GIVE_WAY, 12
    for index in range(period * num_periods):
        (x, y), _ = batch(index, size=2 + index // period)
        began = clock.now
        training.step(x, y)
        clock.now = max(clock.now, began + 0.5)
    trained = period * num_periods * 1.0
    assert FIRST_CAPTURES < len(captured) < num_periods
    assert len(captured) <= FIRST_CAPTURES + 2 + trained / (9.0 * costs["capture"])


def test_an_update_that_is_captured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[float] = []
    charge = CaptureBudget.charge

    def noted(budget: CaptureBudget, seconds: float) -> None:
        charged.append(seconds)
        charge(budget, seconds)

    monkeypatch.setattr(CaptureBudget, "charge", noted)
    training = Training("drop_in", *net_and_adam())
    training.run(3)
    assert training.status().covered == ("forward", "backward", "update")
    assert len(charged) >= 2
    assert training.status().setup_seconds == pytest.approx(sum(charged))
