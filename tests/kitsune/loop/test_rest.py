"""Modules whose calls run eagerly anyway are called as if there were no Kitsune, but for a look now and then."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kitsune
from kitsune.budget import CaptureBudget
from kitsune.capture.watch import interceptor_in
from kitsune.errors import Refusal
from kitsune.fallback import Chooser
from kitsune.loop import drop_in, rest
from kitsune.loop.rest import LOOK_EVERY
from tests.kitsune.clock import Clock
from tests.kitsune.training import Training, adam, assert_same

NUM_CALLS = 4
SETTLED = 40
"""Iterations after which it is decided how the calls of a loop run."""


class Cell(nn.Module):
    """A cell of a recurrent network, which a loop calls several times in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(self.input(x) + self.hidden(hidden))


def unrolled(training: Training, x: Tensor, hidden: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    for _ in range(NUM_CALLS):
        hidden = training.model(x, hidden)
    loss = training.loss_fn(hidden)
    loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    return loss.detach()


def small(index: int, rows: int = 3) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(index)
    x, hidden = torch.randn(rows, 4, generator=generator), torch.randn(rows, 8, generator=generator)
    return (x, hidden.requires_grad_()), {}


def training_of(form: str, **options: Any) -> Training:
    torch.manual_seed(3)
    model = Cell()
    options = {"mode": "auto", **options}
    return Training(form, model, adam(model), loss_fn=lambda h: h.square().mean(), loop=unrolled, **options)


def is_intercepted(module: nn.Module) -> bool:
    return interceptor_in(module._compiled_call_impl) is not None


def num_calls(part: Callable[[], object]) -> int:
    """How many functions are called."""
    count = 0

    def note(_frame: object, event: str, _function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        part()
    finally:
        sys.setprofile(None)
    return count


class Verdicts:
    """Which signatures lose, whatever they take."""

    def __init__(self) -> None:
        self.loses: Callable[[], bool] = lambda: True

    def settle(self, chooser: Chooser) -> None:
        chooser.settled = True
        if self.loses():
            chooser.refusal = Refusal("it was measured no faster")
            chooser._lost_to, chooser._since = 1e-3, 0


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    verdicts = Verdicts()
    monkeypatch.setattr(Chooser, "_settle", lambda chooser: verdicts.settle(chooser))
    monkeypatch.setattr(Chooser, "_is_clear", lambda _: True)
    monkeypatch.setattr(Chooser, "eager_seconds", 1e-4)
    return verdicts


@pytest.mark.usefixtures("verdicts")
@pytest.mark.parametrize("defer_loss", [False, True])
def test_calls_that_are_settled_on_eager_are_those_of_plain_pytorch(defer_loss: bool) -> None:
    plain, training = training_of("eager"), training_of("drop_in", defer_loss=defer_loss)
    plain.run(SETTLED, small)
    training.run(SETTLED, small)
    assert not is_intercepted(training.model)
    assert training.status().mode == "eager"
    assert "no faster" in training.status().reason
    (x, hidden), _ = small(0)
    assert type(training.model(x, hidden)) is Tensor
    assert num_calls(lambda: training.model(x, hidden)) == num_calls(lambda: plain.model(x, hidden))
    assert num_calls(lambda: training.run(1, small)) < 1.1 * num_calls(lambda: plain.run(1, small))
    assert_same(training.observe(), plain.observe(), "after looks")


@pytest.mark.usefixtures("verdicts")
def test_a_look_lasts_an_iteration() -> None:
    plain, training = training_of("eager"), training_of("drop_in")
    seen = []
    for index in range(SETTLED + 3 * LOOK_EVERY):
        seen.append(is_intercepted(training.model))
        assert training.run(1, small, start=index) == plain.run(1, small, start=index)
    looks = [index for index, was in enumerate(seen) if was and index > SETTLED]
    assert len(looks) == 3
    assert {later - earlier for earlier, later in itertools.pairwise(looks)} == {LOOK_EVERY}
    assert_same(training.observe(), plain.observe(), "after looks")


def test_a_shape_that_comes_meanwhile_is_replayed(verdicts: Verdicts) -> None:
    training = training_of("drop_in")
    training.run(SETTLED, small)
    assert training.status().mode == "eager"
    replays = training.status().replays
    verdicts.loses = lambda: False
    training.run(LOOK_EVERY + 20, lambda index: small(index, rows=5), start=SETTLED)
    assert training.status().mode == "replay"
    assert training.status().replays > replays + 5
    assert is_intercepted(training.model)


def test_what_is_replayed_now_and_then_is_not_missed(verdicts: Verdicts) -> None:
    """Most iterations are of a shape that has lost: none of the others is to run eagerly for that."""
    training = training_of("drop_in")
    verdicts.loses = lambda: False
    training.run(SETTLED, lambda index: small(index, rows=5))
    verdicts.loses = lambda: True
    for index in range(SETTLED, SETTLED + 3 * rest.RECENT, 20):
        training.run(19, small, start=index)
        assert "no faster" in training.status().reason
        training.run(1, lambda index: small(index, rows=5), start=index + 19)
        assert training.status().mode == "replay"
    training.run(rest.RECENT + 1, small)
    assert not is_intercepted(training.model)


def test_one_module_rests_beside_another_that_is_replayed(verdicts: Verdicts) -> None:
    def trained(form: str) -> tuple[list[nn.Module], Training]:
        torch.manual_seed(3)
        parts: list[nn.Module] = [nn.Linear(4, 4), Cell()]
        optimizer = torch.optim.Adam([param for part in parts for param in part.parameters()], fused=True)

        def loop(training: Training, x: Tensor, hidden: Tensor) -> Tensor:
            training.optimizer.zero_grad()
            verdicts.loses = lambda: False
            x = parts[0](x)
            for _ in range(NUM_CALLS):
                hidden = parts[1](x, hidden)
            loss = hidden.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
            return loss.detach()

        return parts, Training(form, nn.ModuleList(parts), optimizer, loop=loop, mode="auto")

    settle = Chooser._settle

    def settle_by_module(chooser: Chooser) -> None:
        settle(chooser)
        if chooser in cells():
            chooser.refusal = Refusal("it was measured no faster")

    parts, training = trained("drop_in")

    def cells() -> list[Chooser]:
        assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
        loop = training.optimizer._loop
        assert loop is not None
        return [step.chooser for step in loop._steps.of(parts[1])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chooser, "_settle", settle_by_module)
        losses = training.run(3 * SETTLED, small)
    assert (is_intercepted(parts[0]), is_intercepted(parts[1])) == (True, False)
    assert training.status().replays > SETTLED
    _, plain = trained("eager")
    assert losses == plain.run(3 * SETTLED, small)
    assert_same(training.observe(), plain.observe(), "at the end")


def test_another_optimizer_that_takes_the_model_keeps_it(verdicts: Verdicts) -> None:
    training = training_of("drop_in")
    training.run(SETTLED, small)
    verdicts.loses = lambda: False
    other = Training(
        "drop_in", training.model, adam(training.model), loss_fn=training.loss_fn, loop=unrolled, mode="auto"
    )
    other.run(2, small)
    kept = training.model._compiled_call_impl
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    assert training.optimizer._loop is not None
    training.optimizer._loop._rest.look()
    assert training.model._compiled_call_impl is kept
    other.run(SETTLED, small)
    assert other.status().mode == "replay"


@pytest.mark.usefixtures("verdicts")
def test_closed_at_rest_nothing_comes_back() -> None:
    training = training_of("drop_in")
    training.run(SETTLED, small)
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    loop = training.optimizer._loop
    assert loop is not None
    training.optimizer.hand_over()
    loop._rest.look()
    assert training.model._compiled_call_impl is None


@pytest.mark.usefixtures("verdicts")
def test_calls_under_autocast_stay_so() -> None:
    training = training_of("drop_in", enable_amp=True)
    training.run(SETTLED, small)
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    assert training.optimizer._loop is not None
    assert training.optimizer._loop._rest
    (x, hidden), _ = small(0)
    output = training.model(x, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(output, training.model._call_impl(x, hidden).float())
    assert output.dtype is torch.float32


def test_with_mode_eager_nothing_is_in_the_way() -> None:
    plain, training = training_of("eager"), training_of("drop_in", mode="eager")
    assert training.run(3, small) == plain.run(3, small)
    assert training.model._compiled_call_impl is None
    assert training.status().reason == "mode='eager' was asked for"


@pytest.mark.usefixtures("verdicts")
def test_long_calls_are_looked_at_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes nothing, beside what they take themselves."""
    monkeypatch.setattr(Chooser, "eager_seconds", 0.1)
    training = training_of("drop_in")
    training.run(SETTLED, small)
    assert is_intercepted(training.model)


@pytest.mark.usefixtures("verdicts")
def test_what_was_measured_under_disturbance_is_looked_at_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rest, "time", clock)
    training = training_of("drop_in")
    training.run(SETTLED, small)
    assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
    loop = training.optimizer._loop
    assert loop is not None
    loop._rest.look()
    for step in loop._steps.of(training.model):
        step.chooser._review_at = time.perf_counter() + 3600.0
    monkeypatch.setattr(Chooser, "review_at", clock.now + 5.0)
    training.run(2, small)
    assert not is_intercepted(training.model)
    clock.now += 6.0
    training.run(1, small)
    assert is_intercepted(training.model)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Captures may begin after 10 s."""
    clock = Clock()
    begins = clock.now + 10.0
    monkeypatch.setattr(rest, "time", clock)
    monkeypatch.setattr(drop_in, "time", clock)
    monkeypatch.setattr(CaptureBudget, "put_off_until", lambda *_: begins if clock.now < begins else None)
    monkeypatch.setattr(CaptureBudget, "put_off", lambda *_: Refusal("captures begin later"))
    return clock


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("form", ["drop_in", "train_step"])
def test_calls_rest_until_captures_may_begin(form: str, waiting: Clock) -> None:
    def forward(model: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
        for _ in range(NUM_CALLS):
            hidden = model(x, hidden)
        return hidden.square().mean()

    def batch(index: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        (x, hidden), _ = small(index)
        return (x, hidden.detach()), {}

    plain = training_of("eager")
    training = training_of(form, **({"step": {"forward": forward}} if form == "train_step" else {}))
    losses = training.run(5, batch)
    status = training.status()
    assert (status.mode, status.reason, status.replays) == ("measuring", "captures begin later", 0)
    assert status.refusals == ()
    assert not is_intercepted(training.model)
    waiting.now += 11.0
    losses += training.run(SETTLED, batch, start=5)
    assert training.status().mode == "replay"
    assert training.status().replays > 5
    assert losses == pytest.approx(plain.run(5 + SETTLED, batch))


def test_few_replays_beside_eager_calls_have_to_gain_something() -> None:
    class Step:
        def __init__(self, replay_seconds: float) -> None:
            self.module = module
            self.chooser = Chooser("auto", lambda: None)
            self.chooser.settled = True
            self.chooser._rounds = [(1e-3, replay_seconds)]

    module = nn.Linear(1, 1)
    for replay_seconds, count, is_refused in ((0.95e-3, 1, True), (0.5e-3, 1, False), (0.95e-3, 40, False)):
        lost, few = Step(2e-3), Step(replay_seconds)
        lost.chooser.refuse(Refusal("it was measured no faster"))
        iteration: Any = {lost: ("eager", 29), few: ("replay", count)}
        rest.refuse_slight_gains(iteration)
        assert (few.chooser.refusal is not None) == is_refused


def test_calls_beside_some_that_lose_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were timed while the others were replayed by turns, which may have been all that made a difference."""
    reopened = []
    monkeypatch.setattr(Chooser, "_is_clear", lambda _: True)
    reopen = Chooser.reopen

    def noted(chooser: Chooser, rival: float | None = None) -> None:
        reopened.append(chooser)
        reopen(chooser, rival)

    def settle(chooser: Chooser) -> None:
        chooser.settled = True
        if not settled:
            chooser.refusal = Refusal("it was measured no faster")
        settled.append(chooser)

    settled: list[Chooser] = []
    monkeypatch.setattr(Chooser, "reopen", noted)
    monkeypatch.setattr(Chooser, "_settle", settle)
    training = training_of("drop_in")
    training.run(SETTLED, lambda index: ((small(index)[0][0], torch.zeros(3, 8)), {}))
    assert len(set(map(id, settled))) == 2
    assert settled[0] not in reopened
    assert settled[1] in reopened
