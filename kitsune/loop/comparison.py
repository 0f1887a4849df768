"""Compares replays of a `TrainStep` with plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kitsune.capture.step_program import StepSpec, scaler_tensors
from kitsune.execution.in_order import with_copies
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.verifying import Results, State, compare, put_off, spread, tensors_of
from kitsune.loop.whole_step import WholeStep
from kitsune.verification import Difference


class StepComparison:
    """One comparison, from the present state of a training.

    Attributes:
        loss: that of the latest step that ran.
    """

    def __init__(self, spec: StepSpec, accumulators: Accumulators, device: torch.device) -> None:
        self.loss: Tensor | None = None
        self._spec, self._accumulators, self._device = spec, accumulators, device
        self._tensors = _tensors(spec, accumulators)
        roots = (("the model", spec.module), ("the loss", spec.loss))
        self._state, self._mark = State(self._tensors, device, roots), accumulators.mark()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within, steps may be taken; afterwards all that they have written is as it was."""
        with self._state.undone():
            try:
                yield
            finally:
                self._accumulators.return_to(self._mark)

    def differences(
        self, step: WholeStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], eager: Callable[[], Tensor]
    ) -> list[Difference] | None:
        """See `compare`; None where `step` cannot be replayed at present."""
        flat: Sequence[Tensor] = ()

        def replay() -> Results | None:
            nonlocal flat
            replayed = step.replay_apart(args, kwargs)
            if replayed is None:
                return None
            flat = replayed.flat
            return self._results(replayed.output)

        def plain() -> Results:
            self._accumulators.return_to(self._mark)
            self.loss = eager()
            return self._results(self.loss)

        found = compare(
            self._state, replay, plain, step.rounding, lambda: spread(partial(self._run_on_copies, step, flat))
        )
        if found is None:
            return None
        operators = step.operators()
        ids = {"loss": 0, **{name: id(tensor) for name, tensor in self._tensors.items()}}
        return [dataclasses.replace(one, operator=operators.get(ids.get(one.name, -1))) for one in found]

    def _run_on_copies(self, step: WholeStep, flat: Sequence[Tensor], seed: int | None) -> Results:
        """See `spread`."""

        def copied(inputs: Sequence[Tensor]) -> list[Tensor]:
            copies = with_copies([tensor.detach() for tensor in inputs], range(len(inputs)))
            if seed is not None:
                put_off(copies, step.rounding(), seed)
            return copies

        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            loss, grads, changes = step.run_on_copies(flat, copied)
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        left = {names[key]: changed for key, changed in changes.items() if key in names}
        return {"loss": loss, **left, **{f"{names[key]}.grad": grad for key, grad in grads.items()}}

    def _results(self, loss: Tensor) -> Results:
        kept = self._spec.module.named_parameters() if self._spec.keep_grads else ()
        grads = {f"{name}.grad": param.grad for name, param in kept if param.grad is not None}
        return {"loss": loss, **grads}


def _tensors(spec: StepSpec, accumulators: Accumulators) -> dict[str, Tensor]:
    """All that a step may write, by name."""
    found = tensors_of([spec.module], [spec.optimizer])
    sums = {id(found[name]): name for name in found if id(found[name]) in accumulators.sums}
    found |= {f"{name}.accumulated": accumulators.sums[key] for key, name in sums.items()}
    tensors = [] if spec.scaler is None else scaler_tensors(spec.scaler)
    return found | {f"gradient scaler {index}": tensor for index, tensor in enumerate(tensors)}
