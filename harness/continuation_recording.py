"""Whether steps in the steady state train as eager PyTorch's do: both go on from the same state, on the same batches.

The first losses of a training say less of Kitsune, which replays none of its first steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch

from harness.continuation import Continuation, Losses
from harness.failures import describe
from harness.variants.training import Ingredients, LoopTraining, Training


def continuation(training: Training, twins: Sequence[Ingredients], steps: int) -> Continuation | str:
    """Lets a training in its steady state and eager PyTorch, twice, take so many steps from the same state.

    That state has the weights with which the training began, so that the loss is at its largest, and the optimizer's
    moments of now. The weights are written in place, where a captured step reads them.

    Args:
        training: is left where these steps lead.
        twins: the same model, batches, layout and precision twice, untrained.

    Returns:
        The losses; or what was raised meanwhile: nothing that was measured before depends on it.
    """
    try:
        return _continuation(training, twins, steps)
    except Exception as error:  # noqa: BLE001  # a variant may raise anything
        return f"it could not go on from a given state: {describe(error).splitlines()[0]}"


def _continuation(training: Training, twins: Sequence[Ingredients], steps: int) -> Continuation:
    first, second = (_eager_twin(training, ingredients) for ingredients in twins)
    with torch.no_grad():
        for value, initial in zip(training.weights(), first.weights(), strict=True):
            value.copy_(initial)
    before = training.num_replays
    own = _losses(training, steps)
    num_replays = training.num_replays - before
    return Continuation(own, _losses(first, steps), _losses(second, steps), num_replays)


def _eager_twin(training: Training, ingredients: Ingredients) -> LoopTraining:
    twin = LoopTraining(ingredients, ingredients.model, ingredients.adam())
    twin.take_over(copy.deepcopy(training.optimizer.state_dict()), training)
    return twin


def _losses(training: Training, steps: int) -> Losses:
    kept = [training.run(1).clone() for _ in range(steps)]
    return tuple(loss if math.isfinite(loss) else None for loss in (entry.item() for entry in kept))
