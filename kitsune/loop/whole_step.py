"""Replays whole training steps of one signature."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.state import CONSTANTS, Binding, refuse_hooks
from kitsune.capture.step_program import Phase, StepProgram, StepSpec, trace_step
from kitsune.capture.watch import refuse_parameter_hooks, refuse_surroundings
from kitsune.config import Config
from kitsune.errors import Refusal, RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.fallback import CaptureBudget, Chooser, RefusalLog
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.recording import Recording


class WholeStep:
    """Replays steps of one signature and one phase of accumulation.

    Args:
        spec: the step.
        phase: see `trace_step`.
        accumulators: the sums of gradients; unused in the phase `"whole"`.
        chooser: decides whether steps of this signature are replayed.
    """

    def __init__(
        self,
        spec: StepSpec,
        phase: Phase,
        accumulators: Accumulators,
        *,
        config: Config,
        pool: GraphPool,
        chooser: Chooser,
        log: RefusalLog,
    ) -> None:
        self.chooser = chooser
        self.setup_seconds = 0.0
        self.replays = 0
        self.declined: Refusal | None = None
        self._spec, self._phase, self._accumulators = spec, phase, accumulators
        self._config, self._pool, self._log = config, pool, log
        self._budget = CaptureBudget()
        self._composed = config.compile  # Inductor fuses composed updates; fused ones are opaque to it
        self._guarded: GuardedFunction | None = None
        self._program: StepProgram | None = None
        self._recording: Recording | None = None
        self._trained: list[torch.nn.Parameter] = []
        self._trained_ids: list[int] = []

    @property
    def executor(self) -> str | None:
        """What runs the captured graph; None while there is none."""
        return None if self._recording is None else self._recording.executor.name

    def replay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Runs the step and returns its loss, the caller's to keep; None if it has to run eagerly."""
        try:
            self._check_hooks()
            loss = self._capture(args, kwargs) if self._guarded is None else self._guarded(args, kwargs)
        except RefusedError as refused:
            self._log.add(refused)
            self.declined = refused.refusal
            if self._recording is None or (self._guarded is not None and self._guarded.stale):
                self.release()
            if not refused.passing:
                self.chooser.refuse(refused.refusal)
            return None
        self.replays += 1
        self.declined = None
        return loss

    def release(self) -> None:
        """Gives the graph and its memory back."""
        if self._recording is not None:
            self._recording.release()
        self._recording = self._program = self._guarded = None
        self._trained = []

    def _capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        spec = self._spec
        if not any(Binding.is_initialised(spec.optimizer, param) for param in spec.params()):
            raise RefusedError(Refusal("the optimizer has no state yet"), passing=True)
        self._budget.spend(self.replays)
        started = time.perf_counter()
        self._guarded = GuardedFunction(self._spec.loss, self._run)
        loss: torch.Tensor = self._guarded(args, kwargs)
        self.setup_seconds += time.perf_counter() - started
        return loss

    def _check_hooks(self) -> None:
        params = self._trained or self._spec.params()
        refusal = refuse_surroundings() or refuse_parameter_hooks(params) or refuse_hooks(self._spec.optimizer)
        if refusal is not None:
            raise RefusedError(refusal, passing=True)

    def _run(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._recording is None:
            self._record(graph, flat)
        else:
            self._check_state(flat)
        recording, program = self._recording, self._program
        assert recording is not None and program is not None
        if not self._accumulators.covered_by(program.params):
            raise RefusedError(
                Refusal("other parameters had gradients in the earlier calls of this update"), passing=True
            )
        outputs = recording([*flat, *program.state])
        if recording.executor.keeps_outputs:
            outputs = [output.clone() for output in outputs]
        self._account(program)
        if self._phase == "accumulate":
            self._accumulators.added(program.params)
        for param in self._trained:
            if param.grad is not None:
                param.grad = None
        for param, grad in zip(program.params, outputs[1:], strict=False):
            param.grad = grad
        return outputs[:1]

    def _record(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> None:
        program = trace_step(self._spec, self._phase, graph, flat, self._accumulators.sums, composed=self._composed)
        self._recording = Recording(
            program.module,
            [*flat, *program.state],
            stable=program.stable,
            config=self._config,
            pool=self._pool,
            log=self._log,
        )
        self._program = program
        self._trained = self._spec.params()
        self._trained_ids = list(map(id, self._trained))

    def _check_state(self, flat: Sequence[torch.Tensor]) -> None:
        assert self._recording is not None and self._program is not None
        changed = None if self._recording.fits([*flat, *self._program.state]) else "a parameter or a buffer"
        if changed is None and self._program.binding is not None:
            changed = self._program.binding.refresh()
        elif changed is None and self._trained_ids != list(map(id, self._spec.params())):
            changed = "the parameters to be trained"
        if changed is None:
            return
        self._composed |= changed == CONSTANTS
        self.release()
        raise RefusedError(Refusal(f"{changed} changed since the capture"), passing=True)

    def _account(self, program: StepProgram) -> None:
        if program.binding is None:
            return
        skipped = program.found_inf is not None and program.binding.needs_skip() and bool(program.found_inf.item())
        program.binding.advance(skipped)
