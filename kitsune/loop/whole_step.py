"""Replays whole training steps of one signature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from kitsune.capture.state import CONSTANTS, Binding, refuse_hooks
from kitsune.capture.step_program import Phase, StepProgram, StepSpec, scaler_tensors, scaling, trace_step
from kitsune.capture.watch import refuse_parameter_hooks
from kitsune.config import Config
from kitsune.errors import Refusal, RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.guarded_step import GuardedStep
from kitsune.loop.recording import Recording


class WholeStep(GuardedStep):
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
        super().__init__(spec.module, spec.loss, config=config, chooser=chooser, log=log)
        self._spec, self._phase, self._accumulators, self._pool = spec, phase, accumulators, pool
        self._composed = config.compile  # Inductor fuses composed updates; fused ones are opaque to it
        self._program: StepProgram | None = None
        self._recording: Recording | None = None
        self._trained: list[torch.nn.Parameter] = []
        self._trained_ids: list[int] = []

    @property
    def executor(self) -> str | None:
        """What runs the captured graph; None while there is none."""
        return None if self._recording is None else self._recording.executor.name

    def _drop(self) -> None:
        if self._recording is not None:
            self._recording.release()
        self._recording = self._program = None
        self._trained = []

    def _refuse_call(self) -> Refusal | None:
        hooks = refuse_parameter_hooks(self._trained or self._spec.params()) or refuse_hooks(self._spec.optimizer)
        return hooks or super()._refuse_call()

    def _refuse_capture(self) -> Refusal | None:
        spec = self._spec
        if not any(Binding.is_initialised(spec.optimizer, param) for param in spec.params()):
            return Refusal("the optimizer has no state yet")
        return super()._refuse_capture()

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
        changed = self._changed(flat)
        if changed is None:
            return
        self._composed |= changed == CONSTANTS
        self.release()
        raise RefusedError(Refusal(f"{changed} changed since the capture"), passing=True)

    def _changed(self, flat: Sequence[torch.Tensor]) -> str | None:
        """What is no longer as it was captured; None if nothing is."""
        program, recording, scaler = self._program, self._recording, self._spec.scaler
        assert recording is not None and program is not None
        if not recording.fits([*flat, *program.state]):
            return "a parameter or a buffer"
        if scaler is not None and (
            program.scaling != scaling(scaler) or not _same(program.scale, scaler_tensors(scaler))
        ):
            return "the gradient scaler"
        sums = self._accumulators.sums
        if program.sums and not _same(program.sums, [sums[id(param)] for param in program.params]):
            return "the accumulated gradients"
        if program.binding is not None:
            return program.binding.refresh()
        trained = list(map(id, self._spec.params()))
        return None if trained == self._trained_ids else "the parameters to be trained"

    def _account(self, program: StepProgram) -> None:
        if program.binding is None:
            return
        skipped = program.found_inf is not None and program.binding.needs_skip() and bool(program.found_inf.item())
        program.binding.advance(skipped)


def _same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))
