"""Loops by hand and with `defer_loss`, and the demand that they see the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from tests.kitsune.training import Net, adam, batch

STEPS = 8

REPLAYED = 5
"""Steps whose backward pass is replayed from the loss on, where every step is alike: the first two are eager, and the
third shows what the loop does."""


@dataclass
class Loop:
    """A training loop, by hand or with Kitsune, that remembers what its body says it has seen."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    seen: list[Any] = field(default_factory=list)
    memo: dict[str, Any] = field(default_factory=dict)
    index: int = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        (x, y), _ = batch(self.index, device=str(self.device))
        return x, y


Body = Callable[[Loop, Tensor, Tensor], Any]


def run(
    body: Body, device: torch.device, accelerated: bool, build: Callable[[], nn.Module], steps: int, **options: Any
) -> Loop:
    torch.manual_seed(3)
    model = build().to(device)
    plain = adam(model)
    optimizer = kitsune.KitsuneOptimizer(plain, mode="replay", defer_loss=True, **options) if accelerated else plain
    loop = Loop(model, optimizer, device)
    for loop.index in range(steps):
        x, y = loop.batch()
        loop.seen.append(body(loop, x, y))
        for name, tensor in model.state_dict(keep_vars=True).items():
            loop.seen.append((name, tensor.detach().clone()))
            loop.seen.append((name, None if tensor.grad is None else tensor.grad.clone()))
    loop.seen.append(torch.get_rng_state())
    return loop


def alike(
    body: Body, device: torch.device, build: Callable[[], nn.Module] = Net, steps: int = STEPS, **options: Any
) -> Loop:
    """Demands that both loops see the same; returns that with Kitsune."""
    wanted = run(body, device, False, build, steps)
    found = run(body, device, True, build, steps, **options)
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if device.type == "cuda" else {"rtol": 0.0, "atol": 0.0}
    for place, (one, other) in enumerate(zip(found.seen, wanted.seen, strict=True)):
        check(one, other, f"at {place} of {len(wanted.seen)}", tolerance)
    return found


def check(found: Any, wanted: Any, place: str, tolerance: dict[str, float]) -> None:
    if isinstance(wanted, Tensor):
        assert found.requires_grad == wanted.requires_grad, place
        torch.testing.assert_close(found.detach(), wanted.detach(), msg=lambda text: f"{place}: {text}", **tolerance)
    elif isinstance(wanted, (list, tuple)):
        for one, other in zip(found, wanted, strict=True):
            check(one, other, place, tolerance)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=tolerance["rtol"] or None, abs=tolerance["atol"] or None), place
    else:
        assert found == wanted, place


def plain(loop: Loop, x: Tensor, y: Tensor) -> Any:
    loop.optimizer.zero_grad()
    loss = functional.cross_entropy(loop.model(x), y)
    loss.backward()
    loop.optimizer.step()
    return loss.item()


def stepped(loop: Loop, loss: Tensor) -> Tensor:
    """The rest of a step whose gradients were zero."""
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss
