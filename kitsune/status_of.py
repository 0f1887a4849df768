"""`status`: what Kitsune does with a training, found by whatever of it is at hand."""

from __future__ import annotations

import torch

from kitsune.errors import KitsuneError
from kitsune.optimizer import KitsuneOptimizer
from kitsune.status import Status
from kitsune.step import TrainStep

_INSIDE = ("optimizer", "_optimizer", "wrapped", "_wrapped")
"""Where libraries keep the optimizer that they were given."""

_MOST_WRAPPERS = 8


def status(training: object) -> Status:
    """What Kitsune does with a training at this moment, and why.

        kitsune.status(optimizer)  # also after accelerator.prepare(), or in Lightning
        kitsune.status(model)

    Args:
        training: a `TrainStep` or a `KitsuneOptimizer`; an optimizer of another library around one; the `torch.optim`
            optimizer inside of one; or a model. Of several that train parts of a model, the one that was made last
            is meant.

    Raises:
        KitsuneError: Kitsune does not train it.
        TypeError: it is none of these.
    """
    for one in _unwrapped(training):
        if isinstance(one, (KitsuneOptimizer, TrainStep)):
            return one.status()
        found = _trained_by(one) if isinstance(one, torch.optim.Optimizer) else None
        if found is not None:
            return found.status()
    if isinstance(training, torch.nn.Module):
        params = set(map(id, training.parameters()))
        found = next((one for one in _all() if not params.isdisjoint(map(id, _params(_plain(one))))), None)
        if found is not None:
            return found.status()
    elif not isinstance(training, torch.optim.Optimizer) and not any(hasattr(training, name) for name in _INSIDE):
        raise TypeError(
            f"expected a TrainStep, an optimizer or a model, got an object of type {type(training).__name__}"
        )
    raise KitsuneError(
        f"nothing of Kitsune's trains this {type(training).__name__}: wrap its optimizer first, "
        "optimizer = kitsune.KitsuneOptimizer(optimizer)"
    )


def _unwrapped(training: object) -> list[object]:
    """What is given, and the optimizers inside, one in another."""
    found = [training]
    while len(found) <= _MOST_WRAPPERS and not isinstance(found[-1], (KitsuneOptimizer, TrainStep, torch.nn.Module)):
        names = (name for name in _INSIDE if isinstance(_attributes(found[-1]).get(name), torch.optim.Optimizer))
        name = next(names, None)
        if name is None:
            break
        found.append(_attributes(found[-1])[name])
    return found


def _attributes(value: object) -> dict[str, object]:
    """The attributes of an object; none where it has no dictionary of them."""
    return getattr(value, "__dict__", {})


def _all() -> list[KitsuneOptimizer | TrainStep]:
    """All that are alive, the latest first."""
    return [*reversed([*TrainStep.alive()]), *reversed([*KitsuneOptimizer.alive()])]


def _trained_by(optimizer: torch.optim.Optimizer) -> KitsuneOptimizer | TrainStep | None:
    """What updates by an optimizer of torch's."""
    return next((one for one in _all() if _plain(one) is optimizer), None)


def _plain(one: KitsuneOptimizer | TrainStep) -> torch.optim.Optimizer:
    return one.wrapped if isinstance(one, KitsuneOptimizer) else one.optimizer


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
