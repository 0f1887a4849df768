"""Replays whole training steps of one signature."""

from __future__ import annotations

import dataclasses
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.background import is_quiet
from kitsune.budget import CaptureBudget
from kitsune.capture.state import Binding, Difference, refuse_hooks
from kitsune.capture.step_program import Phase, StepProgram, StepSpec, scaler_tensors, scaling, trace_step
from kitsune.capture.watch import refuse_parameter_hooks
from kitsune.config import Config
from kitsune.device import refuse_fusion, refuse_streams
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import Handout, handout
from kitsune.execution.in_order import InOrder, Outputs
from kitsune.execution.timed import measure_spans
from kitsune.fallback import Chooser, RefusalLog
from kitsune.graph import dataflow
from kitsune.loop import planning
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.by_address import ByAddress, Places
from kitsune.loop.contest import Contest
from kitsune.loop.fusing import Fusing
from kitsune.loop.guarded_step import Admission, GuardedStep
from kitsune.loop.planned_recording import clear, most_on_streams, record_planned, room_on_streams
from kitsune.loop.planning import Planned
from kitsune.loop.recording import Recording, most_live_bytes, names_in
from kitsune.loop.rounding import change, rounding
from kitsune.loop.shortcut import Shortcut, may_try_shortcut, same_tensors
from kitsune.memory.pool import MemoryPool
from kitsune.plan import Plan
from kitsune.plan.plan import Span
from kitsune.schedule.cost import copies_us
from kitsune.status import ScheduleTime
from kitsune.timing.stopwatch import stopwatch

# What copies must take of a step before others are recorded that do without them.
_WORTHWHILE = 0.003

# Where the choice is to be reviewed, the chooser is asked for that so often.
_REPLAYS_PER_REVIEW = 64

# A step that has to be captured again and again is not tried again and again.
_REPLAYS_BEFORE_MORE_TRIALS = 1000


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
        self._pool, self._memory = pool, memory
        self._form = form
        self._program: StepProgram | None = None
        self._input_ids: list[int] = []
        self._contest: Contest[ByAddress] | None = None
        self._by_address: Callable[..., ByAddress]
        self._handout: Handout | None = None
        self._in_order: Planned | None = None
        self._others: tuple[Planned, ...] = ()
        self._is_improving = False  # other plans may still be found
        self._fusing: Fusing | None = None  # of the captured step, under way
        self._choice: _Choice | None = None  # the latest
        self._wanted: _Choice | None = None  # that of an earlier capture of the same step: others are not tried again
        self._most_bytes: int | None = None  # that a graph on several streams may take
        self._in_order_bytes: int | None = None  # that its graph takes, if that is known
        self._since_capture = 0  # replays
        self._is_reopened = False  # the chooser, until it has settled again
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
        return None if self._contest is None else self._contest.winner.executor.name

    @property
    def plan(self) -> Plan | None:
        """The plan by which steps are replayed at present, with its measured time; None where nothing is captured."""
        if self._contest is None:
            return None
        measured = self._contest.times_us[self._contest.place]
        return dataclasses.replace(self._plans()[self._contest.place].plan, measured_us=measured)

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
        contest = self._contest
        return contest is None or contest.changes_next or self._verified[contest.place] < count

    def note_verified(self) -> None:
        """The latest replay does what plain PyTorch does."""
        assert self._contest is not None
        self._verified[self._contest.place] += 1

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
        if self._contest is None:
            return ()
        timed = zip(self._plans(), self._contest.times_us, strict=True)
        return tuple(
            ScheduleTime(
                strategy=planned.plan.schedule.strategy,
                num_streams=planned.plan.schedule.num_streams,
                fused=planned.plan.is_fused,
                roomy=planned.is_roomy,
                predicted_us=planned.plan.predicted_us,
                measured_us=measured,
                chosen=place == self._contest.place,
            )
            for place, (planned, measured) in enumerate(timed)
        )

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
        if self._is_reopened:
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
        if mode != "replay" or self._contest is None:
            return mode, reason
        if self._fusing is not None:
            return "measuring", self._fusing.describe()
        if self._contest.trying or self._may_try_others():
            return "measuring", "schedules of the captured step are being timed"
        if self._is_reopened:
            return "measuring", "the memory of the timed steps is given back with the next one"
        return mode, reason

    def _drop(self) -> None:
        if self._contest is not None:
            self._contest.release()
        self._contest = self._program = None
        self._in_order, self._others, self._is_improving = None, (), False
        if self._fusing is not None:
            self._fusing.close()
            self._fusing = None
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
        if self._contest is None:
            self._record(graph, flat)
        else:
            self._check_state(flat)
        contest, program = self._contest, self._program
        assert contest is not None and program is not None
        if not self._accumulators.covered_by(program.params):
            raise RefusedError(
                Refusal("other parameters had gradients in the earlier calls of this update"), passing=True
            )
        inputs = [*flat, *program.state]
        contest.winner.refuse_written(inputs)
        spans = getattr(self._thread, "spans", None)
        if spans is not None:
            spans += self._measure_spans(contest.place, inputs)
            return [torch.empty((), device=inputs[0].device)]
        self._flat = flat
        outputs = self._answer(inputs)
        if self._phase == "accumulate":
            self._accumulators.added(program.params)
        self._leave_gradients(outputs)
        return outputs[:1]

    def _answer(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Replays the step; its outputs are the caller's."""
        contest, program = self._contest, self._program
        assert contest is not None and program is not None
        outputs = self._replay_fastest(contest, inputs)
        self._since_capture += 1
        given = 0 if self._handout is None else self._handout.count  # are the caller's already
        if len(outputs) > given and contest.winner.executor.keeps_outputs:
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
        contest, program, shortcut = self._contest, self._program, self._shortcut
        chosen = self.chooser.settled and self.chooser.refusal is None and not self._is_reopened
        if not chosen or self._spec.accumulate > 1:
            return None
        assert self._guarded is not None and contest is not None and program is not None
        if shortcut is not None and shortcut.inputs(args, kwargs) is not None:  # the loop has been at other steps
            return shortcut
        if not may_try_shortcut(self._num_shortcuts, self.replays):
            return None
        self._num_shortcuts += 1
        with self._budget.spending():
            shortcut = Shortcut.of(self._guarded, self._spec, program, contest.winner, args, kwargs)
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
        before = self._pool.num_bytes()
        copied = [position for position in range(len(inputs)) if position not in program.stable]
        copies = copies_us([inputs[position] for position in copied])
        self._by_address = partial(
            ByAddress, copied=copied, places=Places(partial(_copies_matter, self.chooser, copies))
        )
        self._contest = Contest(
            partial(self._by_address, partial(Recording, program.module, **self._conditions(program))),
            inputs,
            stopwatch(device),
            self._log.do_without,
            partial(clear, self._memory, device),
            partial(_eager_us, self.chooser),
        )
        self._in_order_bytes = None if before else self._pool.num_bytes() or None
        self._program = program
        self._input_ids = list(map(id, inputs))
        self._verified.clear()
        self._since_capture = 0
        self._trained = self._spec.params()
        self._trained_ids = list(map(id, self._trained))
        self._others, self._wanted = (), self._choice
        self._is_improving = self.chooser.may_improve = self._num_streams() > 1 or self._fuses()

    def _conditions(self, program: StepProgram) -> dict[str, Any]:
        conditions = {"stable": program.stable, "config": self._config, "pool": self._pool, "log": self._log}
        return {**conditions, "handout": self._handout}

    def _plans(self) -> tuple[Planned, ...]:
        assert self._program is not None
        if self._in_order is None:
            self._in_order = planning.in_order(self._program.module, self._trained[0].device)
        return self._in_order, *self._others

    def _replay_fastest(self, contest: Contest[ByAddress], inputs: Sequence[torch.Tensor]) -> Outputs:
        if self._may_try_others() and contest.winner.has_looked:
            self._consider_others(contest, inputs)
        if self._is_reopened and self.chooser.settled and is_quiet():
            self._is_reopened = False
            clear(self._memory, inputs[0].device)  # the eager steps have left some
        settled = contest.settled
        try:
            outputs = contest(inputs)
        except RefusedError:
            self._drop()
            raise
        except BaseException:  # an interrupt, perhaps in the midst of a recording
            self.release()
            raise
        if contest.trying or contest.settled != settled:
            self._budget.charge(contest.take_making_seconds())
        self._budget.charge(contest.winner.take_recording_seconds())
        if contest.settled != settled:
            self._choice = _choice(self._plans()[contest.place])
            self.chooser.may_improve = self._is_improving
            self.chooser.reopen()
            self._is_reopened = True
        return outputs

    def _measure_spans(self, place: int, inputs: Sequence[torch.Tensor]) -> Sequence[Span]:
        planned = self._plans()[place]
        try:
            arena = self._memory.take(planned.plan.memory.arena_bytes, inputs[0].device)
        except torch.OutOfMemoryError as error:
            raise RefusedError(Refusal("there is too little device memory to time the tasks of the plan")) from error
        try:
            lowered = planned.lowered(arena, timed=True)
            return measure_spans(planned.module, lowered, inputs, GraphPool(self._pool.streams))
        finally:
            self._memory.give(arena)
            clear(self._memory, inputs[0].device)

    def _may_try_others(self) -> bool:
        """Whether replay has not lost to eager, and other plans have yet to be tried."""
        if not self._is_improving or not self.chooser.settled or self._contest is None or self._contest.trying:
            return False
        return self.is_first or self._since_capture >= _REPLAYS_BEFORE_MORE_TRIALS

    def _num_streams(self) -> int:
        return 1 if refuse_streams(self._trained[0].device) is not None else self._config.max_streams()

    def _fuses(self) -> bool:
        return self._config.fuses() and refuse_fusion(self._trained[0].device) is None

    def _consider_others(self, contest: Contest[ByAddress], inputs: Sequence[torch.Tensor]) -> None:
        """Lets other plans, fused or on several streams, try to be faster than the one in order, as they are found.

        While kernels are compiled and tried for them, nothing is done.
        """
        program = self._program
        assert program is not None
        if self._fusing is None and self._fuses():
            with self._budget.spending():
                self._fusing = Fusing(program.module, inputs, self._log.do_without, is_whole=True)
        if not (is_quiet() if self._fusing is None else self._fusing.may_go_on()):
            return
        try:
            with self._budget.spending():
                is_over = self._fusing is None or self._fusing.advance()
                new = () if self._fusing is None else self._fusing.new()
                found = planning.rewritten(program.module, new, inputs, self._log.do_without)
                self._is_improving = not is_over
                if is_over:
                    self._end_fusing()
                    found = [*found, *self._on_streams(program, found, inputs)]
                self._add(found, inputs)
        except RefusedError:
            self._drop()
            raise
        except Exception as error:  # noqa: BLE001 - operators that cannot be timed, compilers, too little memory
            self._is_improving, self._fusing = False, None
            kind = type(error).__name__
            reason = f"planning failed ({kind}: {first_line(error)}); the step is replayed by what was found before"
            self._log.do_without(Refusal(reason))
        if not self._is_improving and not self._others:
            self.chooser.will_not_improve()

    def _end_fusing(self) -> None:
        fusing, self._fusing = self._fusing, None
        try:
            if fusing is not None:
                fusing.result()
        except Exception as error:  # noqa: BLE001 - compilers, drivers and too little memory fail in many ways
            self._log.do_without(Refusal(f"fusing failed ({type(error).__name__}: {first_line(error)})"))

    def _on_streams(
        self, program: StepProgram, found: Sequence[Planned], inputs: Sequence[torch.Tensor]
    ) -> Sequence[Planned]:
        """Plans on several streams."""
        if self._num_streams() == 1:
            return ()
        self._in_order = planning.in_order(program.module, inputs[0].device, inputs)
        most_bytes, room_bytes = self._most_and_room(self._in_order.plan, inputs)
        self._most_bytes = most_bytes
        every = planning.others(
            program.module,
            inputs,
            num_streams=self._num_streams(),
            found=[*self._others, *found],
            max_bytes=most_live_bytes(program.module, inputs, program.stable, self._config),
            room_bytes=room_bytes,
        )
        return [planned for planned in every if planned.plan.schedule.num_streams > 1]

    def _add(self, found: Sequence[Planned], inputs: Sequence[torch.Tensor]) -> None:
        """Lets plans replay some steps, beside those that were tried before."""
        program, contest = self._program, self._contest
        assert program is not None and contest is not None
        if self._wanted is not None:
            found = [planned for planned in found if _choice(planned) == self._wanted]
        if not found:
            return
        self._others = (*self._others, *found)
        conditions = {**self._conditions(program), "most_bytes": self._most_bytes}
        records = [partial(record_planned, self._memory, planned, **conditions) for planned in self._others]
        contest.open([partial(self._by_address, record) for record in records], inputs)

    def _most_and_room(self, in_order: Plan, inputs: Sequence[torch.Tensor]) -> tuple[int | None, int | None]:
        """What a graph on several streams may take, and its values of that; None where that cannot be told."""
        if self._in_order_bytes is None:
            return None, None
        most_bytes = most_on_streams(self._in_order_bytes, inputs, self._trained)
        return most_bytes, room_on_streams(most_bytes, self._in_order_bytes, in_order.memory.live_bytes)

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
        program, contest, scaler = self._program, self._contest, self._spec.scaler
        assert contest is not None and program is not None
        # The optimizer's tensors, the most of `program.state`, are looked at below.
        inputs = flat if scaler is None else [*flat, *program.state]
        if not contest.winner.fits(inputs):
            return Difference(contest.winner.misfit(inputs, names_in(self.module)))
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


def _eager_us(chooser: Chooser) -> float:
    return math.inf if chooser.eager_seconds is None else chooser.eager_seconds * 1e6


class _Choice(NamedTuple):
    """What tells a plan from others of the same step."""

    is_generated: bool
    is_fused: bool
    strategy: str
    num_streams: int


def _choice(planned: Planned) -> _Choice:
    plan = planned.plan
    return _Choice(planned.is_generated, plan.is_fused, plan.schedule.strategy, plan.schedule.num_streams)


def _copies_matter(chooser: Chooser, us: float) -> bool:
    """Whether `us` microseconds of copies are worth more recordings, which take as long to make as many steps."""
    seconds = chooser.replay_seconds
    return seconds is not None and us * 1e-6 >= _WORTHWHILE * seconds
