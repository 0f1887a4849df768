"""Backward passes of which some outputs get no gradient: each such case has a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitsune.errors import Refusal, RefusedError
from kitsune.loop import backward_graph, backward_recorder
from kitsune.loop.backward_graph import BackwardGraph
from kitsune.loop.backward_recorder import BackwardRecorder
from kitsune.loop.update_step import UpdateStep
from tests.kitsune.loops import zeroing_in_place
from tests.kitsune.training import Net, Nothing, Training, adam, batch, compare, plain_loop, sgd

STEPS = 8


class Heads(nn.Module):
    """Three heads on a trunk; a gradient through the second is transposed, the derivative of the last is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.trunk(x).tanh()
        second = (self.heads[1].weight @ hidden.t()).t() + self.heads[1].bias
        return self.heads[0](hidden), second, (self.heads[2](hidden) * 0).sqrt()


def same(device: str, used: Sequence[tuple[int, ...]], *, keep: bool = False) -> Training:
    """Trains as plain PyTorch does, with the loss of these heads in turn.

    Args:
        keep: hold the gradients of each step until the next one is over.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Heads().to(device, torch.float64)
        return model, adam(model)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        index = training.memo["index"] = training.memo.get("index", -1) + 1
        outputs = training.model(x)
        loss = torch.stack([functional.cross_entropy(outputs[head], y) for head in used[index % len(used)]]).sum()
        loss.backward()
        if keep:
            training.memo["kept"] = [param.grad for param in training.model.parameters()]
        training.optimizer.step()
        return loss.detach()

    batches = partial(batch, dtype=torch.float64, device=device)
    return compare("drop_in", build, loop=loop, steps=STEPS, batches=batches, rtol=1e-9, atol=1e-11)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward pass whether it was replayed."""
    found: list[bool] = []
    run = BackwardGraph.__call__

    def noted(self: BackwardGraph, *args: object, **options: object) -> list[Tensor | None]:
        before = self.num_partial + self.num_copied
        grads = run(self, *args, **options)  # type: ignore[arg-type]
        found.append(self._records and before == self.num_partial + self.num_copied)
        return grads

    monkeypatch.setattr(BackwardGraph, "__call__", noted)
    return found


def is_recorded(training: Training) -> bool:
    return training.status().executor == "cuda graph"


@pytest.mark.support("Models", "an output that the loss leaves out", "replayed")
def test_an_output_without_a_gradient(place: str, ran: list[bool]) -> None:
    """NaN of a head that is not used reaches nothing."""
    training = same(place, [(0,)])
    if is_recorded(training):
        assert ran == [False, *[True] * (len(ran) - 1)]
        (told,) = training.status().refusals
        assert "not all outputs had a gradient" in told
        assert training.status().fallbacks == 1
    assert all(torch.isfinite(param).all() for param in training.model.parameters())


def test_each_case_is_recorded_once(place: str, ran: list[bool]) -> None:
    training = same(place, [(0,), (1,), (0, 1)])
    if is_recorded(training):
        assert ran.count(False) == 3
        assert all(ran[-3:])
    assert "update" in training.status().covered
    assert len(training.status().refusals) == is_recorded(training)


def test_only_so_many_are_recorded(place: str, ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_graph, "_MOST_CASES", 2)
    training = same(place, [(0,), (1,)])
    if is_recorded(training):
        assert sorted({*ran[-2:]}) == [False, True]


def test_gradients_that_are_kept_stay(place: str, ran: list[bool]) -> None:
    """They are compared after the step that follows, too. A second graph has gradients of its own."""
    training = same(place, [(0,)], keep=True)
    if is_recorded(training):
        assert ran == [False, True, False, True, True, False], "neither is replayed while those of the second are kept"
        assert any("are kept" in refusal for refusal in training.status().refusals)


def test_gradients_that_are_kept_forever(place: str, ran: list[bool]) -> None:
    """There is no third graph, whatever becomes of the two."""
    kept: list[tuple[Tensor, Tensor]] = []

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        loss = plain_loop(training, x, y)
        grads = [param.grad for param in training.model.parameters() if param.grad is not None]
        kept.extend((grad, grad.clone()) for grad in grads)
        return loss

    training = adding(place, loop)
    assert all(torch.equal(*pair) for pair in kept)
    if is_recorded(training):
        assert ran == [True, False, True, *[False] * (len(ran) - 3)]


@pytest.mark.support("Gradients", "accumulation over 2, 4 and 8 micro-batches", "replayed")
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_gradients_that_add_up_are_replayed(place: str, ran: list[bool], micro_batches: int) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = training.loss_fn(training.model(part_x), part_y) / micro_batches
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = adding(place, loop)
    if is_recorded(training):
        assert all(ran[micro_batches:]), "after a step there are two graphs"
        assert training.status().fallbacks == ran.count(False)


def test_gradients_that_are_zeroed_in_place(place: str, ran: list[bool]) -> None:
    training = adding(place, zeroing_in_place)
    if is_recorded(training):
        assert all(ran[2:])


def test_a_second_graph_that_cannot_be_recorded(place: str, ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def record(self: BackwardRecorder, *args: Any) -> None:
        tried.append(args)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(BackwardRecorder, "_case", record)
    training = same(place, [(0, 1, 2)], keep=True)
    if is_recorded(training):
        assert len(tried) == 1
        assert any("too little device memory" in refusal for refusal in training.status().refusals)


def test_each_case_has_a_second_graph(place: str, ran: list[bool]) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        for head in range(3):
            for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = functional.cross_entropy(training.model(part_x)[head], part_y)
                loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = adding(place, loop, Heads)
    if is_recorded(training):
        assert all(ran[12:]), "each case was met for the first time in the first step, and in the second while in use"
        assert training.status().fallbacks == ran.count(False)


def test_a_second_graph_that_has_to_wait_keeps_no_update_waiting(
    place: str, ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are others than those that updates read."""
    updates: list[bool] = []
    replay = UpdateStep.replay

    def noted(self: UpdateStep) -> bool:
        updates.append(replay(self))
        return updates[-1]

    monkeypatch.setattr(UpdateStep, "replay", noted)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = training.loss_fn(training.model(part_x), part_y)
            loss.backward()
        with torch.autograd.detect_anomaly(check_nan=False):
            training.optimizer.step()
        return loss.detach()

    training = adding(place, loop)
    if is_recorded(training):
        assert ran.count(False) == len(ran) / 2
    assert updates[-3:] == [True, True, True]


def adding(device: str, loop: Callable[..., Tensor], model: Callable[[], nn.Module] = Net, **options: Any) -> Training:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = model().to(device, torch.float64)
        return module, adam(module)

    batches = partial(batch, size=8, dtype=torch.float64, device=device)
    return compare(
        "drop_in", build, loop=loop, steps=STEPS, batches=batches, replays=3, rtol=1e-9, atol=1e-11, **options
    )


class Overlapping(nn.Module):
    """A policy's mean and its spread, which is the same for all items, and windows of three means."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.spread.exp().expand_as(mean), (mean * 2).unfold(0, 3, 1)


@pytest.mark.support("Models", "an output whose elements share memory (expanded, windows)", "replayed")
@pytest.mark.parametrize("defer_loss", [False, True])
def test_outputs_whose_elements_share_memory(place: str, ran: list[bool], defer_loss: bool) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        mean, spread, windows = training.model(x)
        weights = torch.arange(windows.numel(), dtype=x.dtype, device=x.device).view(windows.shape)
        loss = ((mean - y[:, None]) / spread).square().mean() + spread.log().sum() + (windows * weights).tanh().mean()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    adding(place, loop, Overlapping, defer_loss=defer_loss)
    if not defer_loss:
        assert len(ran) >= 3 * (STEPS - 2), "each output has a backward pass of its own"


class Bias(nn.Module):
    """Its outputs have nothing in common, and nothing is saved for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.shift, x * self.scale


def test_no_gradient_at_all(place: str) -> None:
    """Autograd asks a node for its gradients even if it has none for it."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        shifted, scaled = training.model(x)
        loss = Nothing.apply(shifted).sum() + scaled.square().sum()
        loss.backward()
        assert training.model.shift.grad is None
        training.optimizer.step()
        return loss.detach()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Bias().to(place, torch.float64)
        return model, adam(model)

    batches = partial(batch, dtype=torch.float64, device=place)
    compare("drop_in", build, loop=loop, batches=batches, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("inside", [torch.inference_mode, partial(torch.autocast, dtype=torch.bfloat16)])
def test_what_surrounds_the_update_is_nothing_to_a_recording(place: str, inside: Any, ran: list[bool]) -> None:
    surroundings = partial(inside, place) if isinstance(inside, partial) else inside

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Heads().to(place, torch.float64)
        return model, sgd(model, lr=0.05)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x)[0], y)
        loss.backward()
        with surroundings():
            training.optimizer.step()
        return loss.detach()

    batches = partial(batch, dtype=torch.float64, device=place)
    training = compare("drop_in", build, loop=loop, steps=STEPS, batches=batches, rtol=1e-9, atol=1e-11)
    if is_recorded(training):
        assert ran == [False, *[True] * (len(ran) - 1)]


@pytest.mark.parametrize("error", [RefusedError(Refusal("no memory for it")), torch.OutOfMemoryError(), KeyError()])
def test_what_cannot_be_recorded_runs_operator_by_operator(
    place: str, error: Exception, ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(backward_recorder.BackwardRecorder, "_case", refuse)
    training = same(place, [(0,)])
    if is_recorded(training):
        assert not any(ran)
        assert len(training.status().refusals) == 2
