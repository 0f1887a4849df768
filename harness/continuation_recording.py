"""Whether steps in the steady state train as eager PyTorch's do: both go on from the same state, on the same batches.

The first losses of a training say less of Kitsune, which replays none of its first steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.continuation import Continuation, Losses
from harness.failures import describe
from harness.variants.training import Ingredients, LoopTraining, Training


def continuation(training: Training, untrained: Ingredients, steps: int) -> Continuation | str:
    """Lets a training in its steady state and eager PyTorch, twice, take so many steps from the same state.

    That state has the weights with which the training began, so that the loss is at its largest, and the optimizer's
    moments of now. The weights are written in place, where a captured step reads them.

    Args:
        training: is left where these steps lead.
        untrained: the same model, batches, layout and precision, for eager.

    Returns:
        The losses; or what was raised meanwhile: nothing that was measured before depends on it.
    """
    try:
        return _continuation(training, untrained, steps)
    except Exception as error:  # noqa: BLE001  # a variant may raise anything
        return f"it could not go on from a given state: {describe(error).splitlines()[0]}"


def _continuation(training: Training, untrained: Ingredients, steps: int) -> Continuation:
    eager = LoopTraining(untrained, untrained.model, untrained.adam())
    initial = [value.clone() for value in eager.weights()]
    losses = []
    for _ in range(2):
        _write(initial, eager)
        eager.take_over(copy.deepcopy(training.optimizer.state_dict()), training)
        losses.append(_losses(eager, steps))
    _write(initial, training)
    before = training.num_replays
    own = _losses(training, steps)
    return Continuation(own, losses[0], losses[1], training.num_replays - before)


def _write(values: Sequence[Tensor], training: Training) -> None:
    """Gives a training these weights, in the memory where it has its own."""
    with torch.no_grad():
        for weight, value in zip(training.weights(), values, strict=True):
            weight.copy_(value)


def _losses(training: Training, steps: int) -> Losses:
    kept = [training.run(1).clone() for _ in range(steps)]
    return tuple(loss if math.isfinite(loss) else None for loss in (entry.item() for entry in kept))
