"""Backward passes of a replayed call: in several parts, and inside of autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kitsune.training import Nothing, Training, batch, compare, sgd

Losses = tuple[Tensor, ...]


@pytest.fixture
def device(place: str) -> str:
    return place


class Apart(nn.Module):
    """Outputs of which each can have a backward pass of its own; two of them share parameters, but no node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied = nn.Linear(4, 3), nn.Linear(4, 3)
        self.deep = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).tanh(), self.deep(x), self.tied(x).exp(), self.tied(x * 2).exp()


def each(losses: Losses) -> None:
    for loss in losses:
        loss.backward()


def backwards(losses: Losses) -> None:
    each(losses[::-1])


def in_pairs(losses: Losses) -> None:
    (losses[0] + losses[2]).backward()
    (losses[1] + losses[3]).backward()


def at_once(losses: Losses) -> None:
    torch.stack(losses).sum().backward()


def some(losses: Losses) -> None:
    (losses[0] + losses[1]).backward()


def kept_and_again(losses: Losses) -> None:
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()


def one_twice(losses: Losses) -> None:
    losses[0].backward()
    losses[1].backward()
    with pytest.raises(RuntimeError, match="second time"):
        losses[1].backward()
    losses[2].backward()


PARTS = [each, backwards, in_pairs, at_once, some, kept_and_again, one_twice]


def on(device: str, model: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    built = model().to(device)
    return built, sgd(built)


def trained(training: Training, backward: Callable[[Losses], None], x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    losses = tuple(training.loss_fn(output, y) for output in training.model(x))
    backward(losses)
    training.optimizer.step()
    return torch.stack(losses).detach()


def same(device: str, model: Callable[[], nn.Module], loop: Callable[..., Tensor], **options: Any) -> Training:
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if device == "cuda" else {}
    return compare(
        "drop_in",
        partial(on, device, model),
        loop=loop,
        batches=partial(batch, device=device),
        **{"steps": 8, **tolerance, **options},
    )


@pytest.mark.support("Gradients", "backward passes of a call in parts", "replayed")
@pytest.mark.parametrize("backward", PARTS)
def test_outputs_that_have_nothing_in_common(backward: Callable[[Losses], None], device: str) -> None:
    same(device, Apart, lambda training, x, y: trained(training, backward, x, y))


def test_a_call_between_two_backward_passes(device: str) -> None:
    """The second one reads what the first call has saved."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        first = [functional.cross_entropy(output, y) for output in training.model(x)]
        first[0].backward()
        second = [functional.cross_entropy(output, y) for output in training.model(x + 1)]
        second[1].backward()
        first[1].backward()
        training.optimizer.step()
        return torch.stack([*first, *second]).detach()

    same(device, Apart, loop)


def test_what_was_saved_is_edited_between_two_backward_passes(device: str) -> None:
    """As autograd raises, so does a replay."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = [functional.cross_entropy(output, y) for output in training.model(x)]
        losses[0].backward()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[2].backward()
        training.optimizer.step()
        return losses[0].detach()

    same(device, Apart, loop)


def test_hooks_run_where_a_gradient_comes(device: str) -> None:
    """Of outputs that have a layer in common, one is left alone, or edited in place."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.trunk(x).tanh()
            return self.left(hidden), self.right(hidden).exp()

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        training.memo["count"] = training.memo.get("count", 0) + 1
        left, right = training.model(x)
        calls: list[Tensor] = []
        left.register_hook(lambda grad: calls.append(grad))
        if training.memo["count"] % 2:
            left.mul_(2)
            loss = functional.cross_entropy(left + right, y)
        else:
            right.register_hook(lambda grad: pytest.fail("called"))
            loss = functional.cross_entropy(left, y)
        loss.backward()
        assert len(calls) == 1
        training.optimizer.step()
        return loss.detach()

    same(device, Pair, loop)


def test_outputs_that_share_a_trunk(device: str) -> None:
    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.trunk(x).tanh()
            return self.left(hidden), self.right(hidden)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = [functional.cross_entropy(output, y) for output in training.model(x)]
        losses[0].backward()
        training.optimizer.step()
        with pytest.raises(RuntimeError, match="second time"):
            losses[1].backward()
        training.optimizer.zero_grad()
        return losses[0].detach()

    same(device, Together, loop)


def autocast(device: str, enabled: bool) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)


def small(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


@pytest.mark.support("Precision", "backward() inside of autocast", "replayed")
@pytest.mark.parametrize("outside", [True, False], ids=["forward outside", "forward inside"])
def test_backward_inside_of_autocast(outside: bool, device: str) -> None:
    """It rounds what is not rounded outside."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with autocast(device, not outside):
            loss = functional.cross_entropy(training.model(x), y)
        with autocast(device, True):
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    same(device, small, loop)


@pytest.mark.parametrize("first", [True, False], ids=["inside first", "outside first"])
def test_backward_is_moved_into_autocast_or_out_of_it(first: bool, device: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        with autocast(device, first == (training.memo["count"] <= 4)):
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = same(device, small, loop, replays=4)
    assert "autocast" in "".join(map(str, training.status().refusals))


def test_a_call_that_cannot_run_again_keeps_the_precision_of_its_capture_once(device: str) -> None:
    """And the status says so."""
    torch.manual_seed(0)
    training = Training("drop_in", *on(device, partial(small, 0.5)))
    modes = []
    for index in range(10):
        (x, y), _ = batch(index, device=device)
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        with autocast(device, index >= 5):
            loss.backward()
        training.optimizer.step()
        modes.append(training.status().mode)
    assert modes[4:] == ["replay", "replay", "eager", "replay", "replay", "replay"]
    assert "autocast" in "".join(map(str, training.status().refusals))


@pytest.mark.parametrize("steps", [range(1), range(4, 8)], ids=["eager", "replayed"])
def test_no_gradient_reaches_the_model(steps: range, device: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.memo["count"] = training.memo.get("count", -1) + 1
        training.optimizer.zero_grad()
        output = training.model(x)
        loss = functional.cross_entropy(Nothing.apply(output) if training.memo["count"] in steps else output, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    same(device, small, loop, replays=0)


def test_verified_inside_of_autocast(device: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        with autocast(device, True):
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = same(device, partial(small, 0.5 if device == "cpu" else 0.0), loop, verify=2, replays=4)
    assert training.status().refusals == ()


@pytest.mark.parametrize("first", [True, False])
def test_inside_of_autocast_at_times(first: bool, device: str) -> None:
    """Then nothing is replayed: each replay would have the precision of another."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = [functional.cross_entropy(output, y) for output in training.model(x)]
        with autocast(device, first):
            losses[0].backward()
        with autocast(device, not first):
            losses[1].backward()
        training.optimizer.step()
        return torch.stack(losses).detach()

    training = same(device, Apart, loop, replays=0)
    assert training.status().mode == "eager"
    assert "autocast" in training.status().reason


def test_a_backward_pass_inside_of_autocast_after_an_edit(device: str) -> None:
    """The call cannot run again for it: its gradients are those of the captured precision."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.register_buffer("shift", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x) + self.shift))

    found = []
    for form in ("eager", "drop_in"):
        torch.manual_seed(0)
        training = Training(form, *on(device, Shifted))
        for index in range(8):
            (x, y), _ = batch(index, device=device)
            training.optimizer.zero_grad()
            loss = functional.cross_entropy(training.model(x), y)
            with torch.no_grad():
                training.model.shift.add_(0.5)
            with autocast(device, index == 6):
                loss.backward()
            training.optimizer.step()
        found.append([param.detach() for param in training.model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_an_update_of_one_part_before_the_backward_pass_of_another(device: str) -> None:
    """As of actor and critic: what the second backward pass reads is as it was."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = [functional.cross_entropy(output, y) for output in training.model(x)[:2]]
        losses[1].backward()
        with torch.no_grad():
            for param in training.model.deep.parameters():
                param.sub_(0.1 * param.grad)
        losses[0].backward()
        training.optimizer.step()
        return torch.stack(losses).detach()

    same(device, Apart, loop)


def test_a_part_that_was_retained(device: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = [functional.cross_entropy(output, y) for output in training.model(x)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        with pytest.raises(RuntimeError, match="second time"):
            losses[1].backward()
        training.optimizer.step()
        return torch.stack(losses).detach()

    same(device, Apart, loop)


def test_parts_that_share_nodes_without_values(device: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shifted, turned = x + self.bias, self.weight.t()
            return shifted @ turned, torch.exp(shifted @ turned)

    def backward(losses: Losses) -> None:
        losses[0].backward()
        losses[1].backward()

    same(device, Shared, lambda training, x, y: trained(training, backward, x, y))


def test_backward_is_moved_again_and_again(device: str) -> None:
    """Of two moves one may meet a capture of another precision; then nothing is replayed any more."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        with autocast(device, count // 4 % 2 == 1):
            loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = same(device, small, loop, steps=20, replays=4)
    assert training.status().mode == "eager"
    assert "inside of autocast at times" in training.status().reason
