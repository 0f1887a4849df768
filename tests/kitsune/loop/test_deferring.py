"""Calls that are put off until `backward()`, with `defer_loss`: nothing of that shows, but that they run later."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from kitsune.capture.following import PendingTensor
from kitsune.errors import Refusal, RefusedError
from kitsune.loop import tail_step
from kitsune.loop.backward_recorder import BackwardRecorder
from kitsune.loop.call_graphs import CallGraphs
from kitsune.loop.following import Tails
from kitsune.loop.tail_step import TailStep
from tests.kitsune import static_memory
from tests.kitsune.followed_loops import STEPS, Loop, alike, plain, run, stepped
from tests.kitsune.training import Net, adam, batch

PLACES = ["in order", "static memory", pytest.param("cuda", marks=pytest.mark.gpu)]

FIRST = 3
"""The steps before calls are put off: two are eager, and the third shows what the loop does."""


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "static memory":
        static_memory.install(monkeypatch)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


class Counts:
    """Of captured calls: how many ran by themselves, and how many were replayed with their backward pass."""

    def __init__(self) -> None:
        self.alone = self.whole = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts, call_now, replay = Counts(), CallGraphs.call_now, TailStep.replay

    def counted_call(self: CallGraphs, *args: Any) -> Any:
        counts.alone += 1
        return call_now(self, *args)

    def counted_replay(self: TailStep, *args: Any, whole: bool = False) -> Any:
        results = replay(self, *args, whole=whole)
        counts.whole += whole and results is not None
        return results

    monkeypatch.setattr(CallGraphs, "call_now", counted_call)
    monkeypatch.setattr(TailStep, "replay", counted_replay)
    return counts


def test_calls_run_with_their_backward_pass(device: torch.device, counts: Counts) -> None:
    loop = alike(plain, device)
    assert (counts.alone, counts.whole) == (1, STEPS - FIRST)
    assert loop.optimizer.status().covered == ("forward", "loss", "backward", "update")


def test_outputs_and_losses_that_are_kept(device: torch.device, counts: Counts) -> None:
    """Read once training is over, they are what they were."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = stepped(loop, functional.cross_entropy(out, y))
        loop.memo.setdefault("kept", []).append((out, loss))
        if loop.index < STEPS - 1:
            return None
        return [(one.detach().clone(), other.item(), one.grad_fn is None) for one, other in loop.memo["kept"]]

    alike(body, device)
    assert counts.whole == STEPS - FIRST


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "accuracy": lambda out: out.argmax(1),
    "a view": lambda out: out[0].detach().clone(),
    "text": lambda out: str(out.detach()),
    "metadata": lambda out: (out.shape, out.dtype, out.requires_grad, out.is_leaf, out.grad_fn is None),
    "its own gradient": lambda out: torch.autograd.grad(out.sum(), out, retain_graph=True)[0],
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_output_is_looked_at_before_backward(name: str, device: torch.device, counts: Counts) -> None:
    """Where a loop does so always, calls are put off no more after a few."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        seen = LOOKS[name](out)
        stepped(loop, functional.cross_entropy(out, y))
        return seen

    alike(body, device)
    assert counts.whole == 0


def test_an_output_that_is_looked_at_now_and_then(device: torch.device, counts: Counts) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        seen = out.detach().sum().item() if loop.index % 2 else None
        return seen, stepped(loop, functional.cross_entropy(out, y)).item()

    alike(body, device, steps=12)
    assert counts.whole == sum(index % 2 == 0 for index in range(FIRST, 12))


def test_an_argument_that_is_used_again(device: torch.device) -> None:
    """By a loader with one buffer, before the output is looked at."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        if loop.index == STEPS - 1:
            out = loop.model(x)
            x.zero_()
            return out.detach().clone()
        return plain(loop, x, y)

    alike(body, device)


class Detached(Net):
    """Its input gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def test_an_argument_that_requires_a_gradient_and_gets_none(device: torch.device, counts: Counts) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        x.requires_grad_()
        return plain(loop, x, y), x.grad

    alike(body, device, Detached)
    assert counts.whole == STEPS - FIRST


def test_the_gradients_are_as_after_any_backward_pass(device: torch.device, counts: Counts) -> None:
    """Each is a tensor of its own, which nobody has written to."""

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
        grads = [param.grad for param in loop.model.parameters()]
        seen = [(grad._version, grad.is_leaf, grad.requires_grad, grad._is_view()) for grad in grads]
        for grad in grads:
            grad.mul_(0.5)
        loop.optimizer.step()
        return (seen, [grad._version for grad in grads]) if loop.index >= FIRST else None

    alike(body, device)
    assert counts.whole == STEPS - FIRST


def test_an_update_between_a_call_and_a_look_at_its_output(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loss = functional.cross_entropy(loop.model(x), y)
        loop.optimizer.zero_grad()
        loss.backward()
        extra = loop.model(x + 1)
        loop.optimizer.step()
        return extra.detach().clone()

    alike(body, device)


def test_two_calls_before_a_backward_pass(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        first, second = loop.model(x), loop.model(2 * x)
        return stepped(loop, functional.cross_entropy(first, y) + functional.mse_loss(first, second)).item()

    alike(body, device)


def test_a_call_whose_output_is_dropped_does_not_run(device: torch.device, counts: Counts) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        if loop.index > FIRST:
            loop.model(2 * x)
        return plain(loop, x, y)

    alike(body, device)
    assert (counts.alone, counts.whole) == (1, STEPS - FIRST)


def forgetting(loop: Loop, part: int) -> None:
    """The gradient of one parameter goes, in the midst of a step."""
    if part == 1:
        loop.model.first.weight.grad = None


def holding(loop: Loop, part: int) -> None:
    """Gradients of the step before are still referred to, as for a log."""
    if part == 3:
        loop.memo["grads"] = [param.grad for param in loop.model.parameters()]


ADDING: dict[str, Callable[[Loop, int], None]] = {
    "alone": lambda loop, part: None,
    "some forgotten": forgetting,
    "some kept": holding,
    "no second graph": lambda loop, part: None,
}


@pytest.mark.parametrize("name", ADDING)
def test_calls_whose_gradients_are_added_up_run_with_their_backward_pass(
    name: str, device: torch.device, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "no second graph":
        record = BackwardRecorder.record_tail

        def record_first(self: BackwardRecorder, *args: Any, beside: Any, **options: Any) -> Any:
            if beside is not None:
                raise RefusedError(Refusal("there is too little memory"))
            return record(self, *args, beside=beside, **options)

        monkeypatch.setattr(BackwardRecorder, "record_tail", record_first)

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loop.optimizer.zero_grad()
        for part in range(4):
            loss = functional.cross_entropy(loop.model(x), y) / 4
            loss.backward()
            ADDING[name](loop, part)
        loop.optimizer.step()
        return loss.item()

    alike(body, device)
    replayed = 4 * STEPS - FIRST - 1  # two steps are eager by design, of which the second's calls are looked at
    assert counts.whole >= replayed - 5


@pytest.mark.parametrize("has_second", [True, False])
def test_a_view_of_a_gradient_sees_what_is_added(
    has_second: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever graphs are in use: gradients get no memory of their own while somebody looks at a part of one."""
    if not has_second:
        monkeypatch.setattr(tail_step, "MOST_ALIKE", 1)

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        loop.optimizer.zero_grad()
        views: list[Tensor] = []
        for part in range(4):
            loss = functional.cross_entropy(loop.model(x * (part + 1) / 4), y) / 4
            loss.backward()
            views = views or [param.grad.view(-1) for param in loop.model.parameters()]
        loop.optimizer.step()
        held = loop.memo.setdefault("held", [])
        held.append(views if loop.index % 3 == 0 else None)
        return [view.clone() for view in views]

    alike(body, device)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.gpu
@pytest.mark.parametrize(("classes", "num_copied"), [(3, 0), (100, 0), (1000, STEPS - FIRST)])
def test_small_outputs_are_given_away_by_the_replays_themselves(
    classes: int, num_copied: int, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[Any]()
    copies = tail_step._copies

    def counted(values: Any) -> Any:
        copied.append(values)
        return copies(values)

    monkeypatch.setattr(tail_step, "_copies", counted)

    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = stepped(loop, functional.cross_entropy(out, y))
        loop.memo.setdefault("kept", []).append((out, loss))
        return [(one.detach().clone(), other.item()) for one, other in loop.memo["kept"]]

    # In float64: of so many elements some have gradients that are little but rounding, of which Adam makes much.
    alike(body, torch.device("cuda"), lambda: nn.Sequential(Double(), nn.Linear(4, classes).double()))
    assert counts.whole == STEPS - FIRST
    assert len(copied) == num_copied


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
    ],
    ids=["buffers", "random numbers"],
)
def test_calls_of_which_it_shows_when_they_run_are_not_put_off(
    build: Callable[[], nn.Module], device: torch.device, counts: Counts
) -> None:
    if device.type == "cpu":
        alike(plain, device, build)
    else:  # a GPU draws other numbers in a graph
        run(plain, device, True, build, STEPS)
    assert (counts.alone, counts.whole) == (STEPS - 2, 0)


def test_a_parameter_written_to_after_the_call_is_an_error(device: torch.device) -> None:
    """Plain PyTorch says the same of most parameters, for which autograd needs their values."""
    model = Net().to(device)
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay", defer_loss=True)
    loop = Loop(model, optimizer, device)
    for loop.index in range(STEPS):
        plain(loop, *loop.batch())
    before = [param.detach().clone() for param in model.parameters()]
    x, y = loop.batch()
    loss = functional.cross_entropy(model(x), y)
    with torch.no_grad():
        model.last.bias.add_(1)
        before[-1].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation: a parameter or a buffer"):
        loss.backward()
    for param, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.detach(), value)
    plain(loop, x, y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_a_function_of_an_output_that_torch_does_not_tell_of(device: torch.device) -> None:
    """Beside the known loss, in a loop that has begun without it: the gradients of both ways are added."""
    model, reference = Net().to(device), Net().to(device)
    reference.load_state_dict(model.state_dict())
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay", defer_loss=True)
    loops = [Loop(model, optimizer, device), Loop(reference, adam(reference), device)]
    for index in range(STEPS):
        for loop in loops:
            loop.index = index
            x, y = loop.batch()
            out = loop.model(x)
            loss = functional.cross_entropy(out, y)
            if index > FIRST:
                loss = loss + Doubled.apply(out).pow(2).mean()  # type: ignore[no-untyped-call]
            stepped(loop, loss)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, other)


def test_hooks_around_the_loss_do_not_see_the_call(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        if loop.index < STEPS - 1:
            return stepped(loop, functional.cross_entropy(out, y)).item()
        packed: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor.shape), lambda _: None):
            functional.cross_entropy(out, y)
        return len(packed)

    alike(body, device)


def test_all_that_was_trained_is_frozen_after_the_call(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loop.model.requires_grad_(loop.index < STEPS - 2)
        seen = functional.cross_entropy(out, y).requires_grad
        loop.model.requires_grad_(True)
        return seen, plain(loop, x, y)

    alike(body, device)


def test_the_arguments_of_another_call_are_not_taken_for_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a call could not run when another one came."""
    model = Net().to(device)
    loop = Loop(model, kitsune.KitsuneOptimizer(adam(model), mode="replay", defer_loss=True), device)
    for loop.index in range(STEPS):
        plain(loop, *loop.batch())
    x, _ = loop.batch()
    out = model(x)
    monkeypatch.setattr(CallGraphs, "settle", lambda _: None)
    monkeypatch.setattr(CallGraphs, "is_pending", lambda _: False)
    monkeypatch.setattr(Tails, "lend", lambda *_: None)
    later = model(2 * x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().item()
    assert later.shape == out.shape


def test_an_output_outlives_its_optimizer(device: torch.device) -> None:
    model = Net().to(device)
    plain_optimizer = adam(model)
    optimizer = kitsune.KitsuneOptimizer(plain_optimizer, mode="replay", defer_loss=True)
    loop = Loop(model, optimizer, device)
    for loop.index in range(STEPS):
        plain(loop, *loop.batch())
    (x, y), _ = batch(99, device=str(device))
    out = model(x)
    assert type(out) is PendingTensor
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay")
    expected = model(x).detach().clone()
    step(x, y)
    del loop, optimizer
    gc.collect()
    torch.testing.assert_close(out.detach(), expected)


def test_a_second_backward_pass_is_an_error_as_ever(device: torch.device) -> None:
    def body(loop: Loop, x: Tensor, y: Tensor) -> Any:
        out = loop.model(x)
        loss = functional.cross_entropy(out, y)
        stepped(loop, loss)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.sum().backward()
        return loss.item()

    alike(body, device)
