"""Loops that hold on to gradients and outputs, or use them in ways of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.kitsune.training import Training, plain_loop


def accumulating(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = training.loss_fn(training.model(part_x), part_y)
        loss.backward()
    training.optimizer.step()
    return loss.detach()


def zeroing_in_place(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad(set_to_none=False)
    loss = training.loss_fn(training.model(x), y)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def holding_gradients(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_loop(training, x, y)
    held = training.memo.setdefault("held", [])
    for param in training.model.parameters():
        assert param.grad is not None
        held.append((param.grad, param.grad.clone()))
    return loss


def holding_views(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_loop(training, x, y)
    held = training.memo.setdefault("held", [])
    for param in training.model.parameters():
        assert param.grad is not None
        view = param.grad.detach().view(-1)[1:]
        held.append((view, view.clone()))
        param.grad = None
    return loss


def two_losses(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(x), y) + training.loss_fn(training.model(-x), y)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def two_backwards(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def unused_forward(training: Training, x: Tensor, y: Tensor) -> Tensor:
    kept = training.model(-x)
    loss = plain_loop(training, x, y)
    return loss + kept.detach().sum() * 0


def clipping(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
    training.optimizer.step()
    return loss.detach()


def replacing_gradients(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss_fn(training.model(x), y)
    loss.backward()
    weight = training.model.first.weight
    assert weight.grad is not None
    weight.grad = weight.grad * 0.5
    training.optimizer.step()
    return loss.detach()


LOOPS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "accumulating": (accumulating, 6),
    "zeroing in place": (zeroing_in_place, 6),
    "holding gradients": (holding_gradients, 6),
    "holding views": (holding_views, 6),
    "two losses": (two_losses, 0),
    "two backward passes": (two_backwards, 6),
    "an unused forward pass": (unused_forward, 0),
    "clipping": (clipping, 6),
    "replacing gradients": (replacing_gradients, 6),
}
