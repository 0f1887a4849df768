"""`verify`: whether replays do what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kitsune.optimizer import KitsuneOptimizer
from kitsune.step import TrainStep
from kitsune.verification import Verification


def verify(
    step_or_loop: TrainStep | Callable[..., Any],
    *args: Any,
    optimizer: KitsuneOptimizer | None = None,
    **kwargs: Any,
) -> Verification:
    """Compares a replay with plain PyTorch, from the present state, and trains nothing.

        kitsune.verify(step, x, y)
        kitsune.verify(iteration, x, y, optimizer=optimizer)

    Args:
        step_or_loop: a `TrainStep`, or a function that does what the body of the loop around `optimizer` does with
            one batch, `optimizer.step()` included.
        *args, **kwargs: for either.
        optimizer: that of the loop.

    Returns:
        What differs by more than rounding explains; or that nothing was replayed, and why.

    Raises:
        TypeError: neither a `TrainStep` nor a function with a `KitsuneOptimizer`.
        KitsuneError: the step runs already.
    """
    if isinstance(step_or_loop, TrainStep):
        if optimizer is not None:
            raise TypeError("a TrainStep has an optimizer of its own: leave optimizer out")
        return step_or_loop.verify(*args, **kwargs)
    if not isinstance(optimizer, KitsuneOptimizer) or not callable(step_or_loop):
        given = f"an object of type {type(step_or_loop).__name__} with an optimizer of type {type(optimizer).__name__}"
        raise TypeError(f"expected a TrainStep, or a function with optimizer=<KitsuneOptimizer>; got {given}")
    return optimizer.verify(partial(step_or_loop, *args, **kwargs))
