"""Replays whole training steps of one signature."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kitsune.budget import CaptureBudget
from kitsune.capture.state import Binding, Difference, refuse_hooks
from kitsune.capture.step_program import Phase, StepProgram, StepSpec, scaler_tensors, scaling, trace_step
from kitsune.capture.watch import refuse_parameter_hooks
from kitsune.config import Config
from kitsune.engine.recording import names_in
from kitsune.engine.region import Choice, Means, Region
from kitsune.engine.rounding import change, rounding
from kitsune.errors import Refusal, RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import Handout, handout
from kitsune.execution.in_order import InOrder
from kitsune.fallback import Chooser, RefusalLog
from kitsune.graph import dataflow
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.guarded_step import Admission, GuardedStep
from kitsune.loop.shortcut import Shortcut, may_try_shortcut, same_tensors
from kitsune.memory.pool import MemoryPool
from kitsune.plan import Plan
from kitsune.plan.plan import Span
from kitsune.status import ScheduleTime

# Where the choice is to be reviewed, the chooser is asked for that so often.
_REPLAYS_PER_REVIEW = 64


@dataclass
class UpdateForm:
    """How the steps of one loop capture the update.

    Attributes:
        composed: of operators that take all numbers as inputs, since one has changed that fused ones hold.
    """

    composed: bool


class WholeStep(GuardedStep):
    """Replays steps of one signature and one phase of accumulation.

    Args:
        spec: the step.
        phase: see `trace_step`.
        accumulators: the sums of gradients; unused in the phase `"whole"`.
        form: shared by the steps of a loop, which one of them may change.
        pool: for the graphs.
        memory: for the arenas of planned values; of steps that never run at the same time.
        chooser: decides whether steps of this signature are replayed.
        admission: asked before anything is captured.
        budget: told of the time that captures take.
    """

    def __init__(
        self,
        spec: StepSpec,
        phase: Phase,
        accumulators: Accumulators,
        form: UpdateForm,
        *,
        config: Config,
        pool: GraphPool,
        memory: MemoryPool,
        chooser: Chooser,
        admission: Admission,
        budget: CaptureBudget,
        log: RefusalLog,
    ) -> None:
        super().__init__(
            spec.module, spec.loss, config=config, chooser=chooser, admission=admission, budget=budget, log=log
        )
        self._spec, self._phase, self._accumulators = spec, phase, accumulators
        self._means = Means(config, pool, memory, budget, log)
        self._form = form
        self._program: StepProgram | None = None
        self._input_ids: list[int] = []
        self._region: Region | None = None
        self._handout: Handout | None = None
        self._choice: Choice | None = None  # the latest plan that was chosen
        self._trained: list[torch.nn.Parameter] = []
        self._trained_ids: list[int] = []
        self._flat: Sequence[torch.Tensor] = ()  # of the call that is being answered in the long way
        self._shortcut: Shortcut | None = None
        self._num_shortcuts = 0  # so far
        self._verified: Counter[int] = Counter()  # replays that were compared with plain PyTorch, by the plan's place
        self._thread = threading.local()  # its `spans` are filled by the next run of the thread, which does no more

    @property
    def executor(self) -> str | None:
        """What runs the captured graph; None while there is none."""
        return None if self._region is None else self._region.winner.executor.name

    @property
    def plan(self) -> Plan | None:
        """The plan by which steps are replayed at present, with its measured time; None where nothing is captured."""
        return None if self._region is None else self._region.plan

    def measured_plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan | None:
        """`plan`, with times of its tasks in a step with these arguments, which trains nothing.

        Raises:
            RefusedError: such a step cannot be replayed at present, or there is too little memory to time it.
        """
        plan = self.plan
        if plan is None or self._guarded is None:
            return None
        spans: list[Span] = []
        self._thread.spans = spans
        try:
            self._guarded(args, kwargs)
        finally:
            del self._thread.spans
        return dataclasses.replace(plan, measured_spans=tuple(spans))

    def is_unverified(self, count: int) -> bool:
        """Whether fewer than `count` replays by the plan that comes next are known to do what plain PyTorch does."""
        region = self._region
        return region is None or region.changes_next or self._verified[region.place] < count

    def note_verified(self) -> None:
        """The latest replay does what plain PyTorch does."""
        assert self._region is not None
        self._verified[self._region.place] += 1

    def rounding(self) -> float:
        """The coarsest rounding of a value of the captured step."""
        return 0.0 if self._program is None else rounding(self._program.module.graph)

    def run_on_copies(
        self, flat: Sequence[torch.Tensor], copy: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Runs the captured step operator by operator on copies of its inputs, and leaves these alone.

        Args:
            flat: of the present call.
            copy: makes the copies.

        Returns:
            The loss, the gradients that the step keeps, by `id` of the parameter, and what is changed of each tensor,
            by its `id`.
        """
        program = self._program
        assert program is not None
        inputs = [*flat, *program.state]
        copies = copy(inputs)
        before = [tensor.clone() for tensor in copies]
        loss, *grads = InOrder(program.module)(copies)
        changes = map(change, before, copies)
        kept = {id(param): grad for param, grad in zip(program.params, grads, strict=False)}
        return loss, kept, {id(tensor): changed for tensor, changed in zip(inputs, changes, strict=True)}

    def operators(self) -> Mapping[int, str]:
        """What of the captured step writes a tensor, by its `id`; what makes the loss, by 0."""
        if self._program is None:
            return {}
        graph = self._program.module.graph
        loss, written = dataflow.outputs(graph)[0], dataflow.written_inputs(graph)
        assert loss is not None
        while loss.target in (torch.ops.aten.detach.default, operator.getitem):
            (loss,) = loss.all_input_nodes
        return {0: str(loss.target)} | {self._input_ids[place]: str(node.target) for place, node in written.items()}

    def schedules(self) -> tuple[ScheduleTime, ...]:
        """All plans that were tried, and their times."""
        return () if self._region is None else self._region.schedules()

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return super().fits(args, kwargs) and self._suits_optimizer()

    def misfit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Refusal | None:
        binding = None if self._program is None else self._program.binding
        option = None if binding is None else binding.misfit()
        return super().misfit(args, kwargs) or (None if option is None else option.refusal())

    def replay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        try:
            done, loss = super().replay(args, kwargs)
            if done:
                self._shortcut = self._find_shortcut(args, kwargs)
            return done, loss
        finally:
            self._flat = ()

    def repeat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Answers a call as `replay` would, in a shorter way; None, with nothing done, where that cannot be.

        To be called for the loop's latest step only.
        """
        shortcut = self._shortcut
        if shortcut is None or self._is_reviewed():
            return None
        if self._spec.keep_grads:
            self._begin_call()
        inputs = shortcut.inputs(args, kwargs)
        if inputs is None:
            return None
        try:
            outputs = self._answer(inputs)
        except RefusedError as error:
            self._decline(error)
            return None
        if self._spec.keep_grads:
            self._leave_gradients(outputs)
        if self._region is not None and self._region.is_reopened:
            self._shortcut = None
        self.replays += 1
        self.declined = None
        return outputs[0]

    def _is_reviewed(self) -> bool:
        """Whether the chooser is to decide how the step runs."""
        chooser = self.chooser
        return not chooser.settled or (chooser.is_undecided and not self.replays % _REPLAYS_PER_REVIEW)

    def describe(self) -> tuple[str, str]:
        mode, reason = super().describe()
        under_way = None if mode != "replay" or self._region is None else self._region.describe()
        return (mode, reason) if under_way is None else ("measuring", under_way)

    def _drop(self) -> None:
        if self._region is not None:
            self._choice = self._region.choice
            self._region.release()
        self._region = self._program = None
        self._shortcut = None
        self._trained = []

    def _begin_call(self) -> None:
        self._accumulators.begin(self._phase)

    def _refuse_call(self) -> Refusal | None:
        hooks = refuse_parameter_hooks(self._trained or self._spec.params()) or refuse_hooks(self._spec.optimizer)
        return hooks or super()._refuse_call()

    def _refuse_capture(self) -> Refusal | None:
        spec = self._spec
        if not spec.params():
            return Refusal("no parameter of the optimizer requires a gradient")
        if not any(Binding.is_initialised(spec.optimizer, param) for param in spec.params()):
            return Refusal("the optimizer has no state yet")
        return super()._refuse_capture()

    def _run(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._region is None:
            self._record(graph, flat)
        else:
            self._check_state(flat)
        region, program = self._region, self._program
        assert region is not None and program is not None
        if not self._accumulators.covered_by(program.params):
            raise RefusedError(
                Refusal("other parameters had gradients in the earlier calls of this update"), passing=True
            )
        inputs = [*flat, *program.state]
        region.winner.refuse_written(inputs)
        spans = getattr(self._thread, "spans", None)
        if spans is not None:
            spans += region.measure_spans(inputs)
            return [torch.empty((), device=inputs[0].device)]
        self._flat = flat
        outputs = self._answer(inputs)
        if self._phase == "accumulate":
            self._accumulators.added(program.params)
        self._leave_gradients(outputs)
        return outputs[:1]

    def _answer(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Replays the step; its outputs are the caller's."""
        region, program = self._region, self._program
        assert region is not None and program is not None
        try:
            outputs = region(inputs)
        except RefusedError:
            self._drop()
            raise
        except BaseException:  # an interrupt, perhaps in the midst of a recording
            self.release()
            raise
        given = 0 if self._handout is None else self._handout.count  # are the caller's already
        if len(outputs) > given and region.winner.executor.keeps_outputs:
            outputs = [*outputs[:given], *(output.clone() for output in outputs[given:])]
        if program.binding is not None:
            program.binding.advance(_is_skipped(program))
        return outputs

    def _leave_gradients(self, outputs: Sequence[torch.Tensor]) -> None:
        """Leaves in `.grad` what the step is to leave there; most often nothing."""
        assert self._program is not None
        for param in self._spec.owned():
            if param.grad is not None:
                param.grad = None
        for param, grad in zip(self._program.params, outputs[1:], strict=False):
            param.grad = grad
        if self._spec.keep_grads and self._program.binding is not None:
            self._program.binding.write_gradients()

    def _find_shortcut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shortcut | None:
        """A shorter way to repeat the call that was just replayed, if there is one.

        Making one takes as long as some replays in the long way do, so that it must not happen at each of them.
        """
        region, program, shortcut = self._region, self._program, self._shortcut
        assert self._guarded is not None and region is not None and program is not None
        chosen = self.chooser.settled and self.chooser.refusal is None and not region.is_reopened
        if not chosen or self._spec.accumulate > 1:
            return None
        if shortcut is not None and shortcut.inputs(args, kwargs) is not None:  # the loop has been at other steps
            return shortcut
        if not may_try_shortcut(self._num_shortcuts, self.replays):
            return None
        self._num_shortcuts += 1
        with self._budget.spending():
            shortcut = Shortcut.of(self._guarded, self._spec, program, region.winner, args, kwargs)
        if shortcut is None or self._refuse_call() is not None or self._changed(self._flat) is not None:
            return None
        inputs = shortcut.inputs(args, kwargs)
        return shortcut if inputs is not None and same_tensors(inputs, [*self._flat, *program.state]) else None

    def _record(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> None:
        sums, composed = self._accumulators.sums, self._form.composed
        program = trace_step(self._spec, self._phase, graph, flat, sums, composed=composed)
        inputs = [*flat, *program.state]
        device = inputs[0].device
        self._handout = handout(device) if device.type == "cuda" and self._config.cuda_graphs else None
        self._trained = self._spec.params()
        self._region = Region(
            program.module,
            inputs,
            stable=program.stable,
            trained=self._trained,
            handout=self._handout,
            means=self._means,
            chooser=self.chooser,
            wanted=self._choice,
            is_first=self.is_first,
        )
        self._program = program
        self._input_ids = list(map(id, inputs))
        self._verified.clear()
        self._trained_ids = list(map(id, self._trained))

    def _check_state(self, flat: Sequence[torch.Tensor]) -> None:
        difference = self._changed(flat)
        if difference is None:
            return
        self._form.composed |= difference.is_constant
        if difference.is_option:
            self.misfits = True
        else:
            self.release()
        raise RefusedError(difference.refusal(), passing=True)

    def _suits_optimizer(self) -> bool:
        """Whether the optimizer does what was captured, whatever its numbers are."""
        return self._program is None or self._program.binding is None or self._program.binding.suits()

    def _changed(self, flat: Sequence[torch.Tensor]) -> Difference | None:
        """What is no longer as it was captured; None if nothing is."""
        program, region, scaler = self._program, self._region, self._spec.scaler
        assert region is not None and program is not None
        # The optimizer's tensors, the most of `program.state`, are looked at below.
        inputs = flat if scaler is None else [*flat, *program.state]
        if not region.winner.fits(inputs):
            return Difference(region.winner.misfit(inputs, names_in(self.module)))
        if scaler is not None and (
            program.scaling != scaling(scaler) or not same_tensors(program.scale, scaler_tensors(scaler))
        ):
            return Difference("the gradient scaler")
        sums = self._accumulators.sums
        if program.sums and not same_tensors(program.sums, [sums[id(param)] for param in program.params]):
            return Difference("the memory of accumulated gradients")
        if program.binding is not None:
            return program.binding.refresh()
        trained = list(map(id, self._spec.params()))
        return None if trained == self._trained_ids else Difference("which parameters are to be trained")


def _is_skipped(program: StepProgram) -> bool:
    """Whether the latest replay left everything as it was for an overflow, as far as the host has to know."""
    if program.found_inf is None or program.binding is None or not program.binding.needs_skip():
        return False
    return bool(program.found_inf.item())
