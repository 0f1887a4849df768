"""Compares replays of a `TrainStep` with plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kitsune.capture.step_program import StepSpec, scaler_tensors
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.verifying import Results, State, compare, tensors_of
from kitsune.loop.whole_step import WholeStep
from kitsune.verification import Difference


class StepComparison:
    """One comparison, from the present state of a training.

    Attributes:
        loss: that of the latest step that ran.
    """

    def __init__(self, spec: StepSpec, accumulators: Accumulators, device: torch.device) -> None:
        self.loss: Tensor | None = None
        self._spec, self._accumulators = spec, accumulators
        self._tensors = _tensors(spec, accumulators)
        self._state, self._mark = State(self._tensors, device), accumulators.mark()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within, steps may be taken; afterwards all that they have written is as it was."""
        saved = self._state.save()
        try:
            yield
        finally:
            self._state.load(saved)
            self._accumulators.return_to(self._mark)

    def differences(
        self, step: WholeStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], eager: Callable[[], Tensor]
    ) -> list[Difference] | None:
        """See `compare`; None where `step` cannot be replayed at present."""

        def replay() -> Results | None:
            done, loss = step.replay(args, kwargs)
            return self._results(loss) if done else None

        def plain() -> Results:
            self._accumulators.return_to(self._mark)
            return self._results(eager())

        found = compare(self._state, replay, plain, step.rounding)
        if found is None:
            return None
        operators, ids = step.operators(), {name: id(tensor) for name, tensor in self._tensors.items()}
        return [dataclasses.replace(one, operator=operators.get(ids.get(one.name, 0))) for one in found]

    def _results(self, loss: Tensor) -> Results:
        self.loss = loss
        kept = self._spec.module.named_parameters() if self._spec.keep_grads else ()
        grads = {f"{name}.grad": param.grad for name, param in kept if param.grad is not None}
        return {"loss": loss, **grads}


def _tensors(spec: StepSpec, accumulators: Accumulators) -> dict[str, Tensor]:
    """All that a step may write, by name."""
    found = tensors_of([spec.module], spec.optimizer)
    sums = {id(found[name]): name for name in found if id(found[name]) in accumulators.sums}
    found |= {f"{name}.accumulated": accumulators.sums[key] for key, name in sums.items()}
    tensors = [] if spec.scaler is None else scaler_tensors(spec.scaler)
    return found | {f"gradient scaler {index}": tensor for index, tensor in enumerate(tensors)}
