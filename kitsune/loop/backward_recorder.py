"""Records the backward passes of a call, and of losses made of its outputs, over the memory of its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx

from kitsune.capture.partition import BackwardPart
from kitsune.capture.split_program import SplitProgram
from kitsune.config import Config
from kitsune.engine import backward_plans
from kitsune.engine.planned_recording import clear, record_planned
from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording, most_live_bytes
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import Handout
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import RefusalLog
from kitsune.graph import dataflow
from kitsune.graph.signature import graph_signature
from kitsune.graph.values import refresh
from kitsune.memory.pool import MemoryPool
from kitsune.status import ScheduleTime


class BackwardRecorder:
    """Records backward passes, in order or by the fastest of several plans.

    Attributes:
        schedules: the plans that were tried for the latest ones, those of each part after those of the part before.
    """

    def __init__(self, config: Config, streams: StreamPool, log: RefusalLog) -> None:
        self.schedules: tuple[ScheduleTime, ...] = ()
        self._config, self._streams, self._log = config, streams, log
        self._memory = MemoryPool()  # of passes that never run at the same time
        self._num_streams = 1  # the most that were tried for the latest program
        self._choices: WeakKeyDictionary[Recording, _Choice] = WeakKeyDictionary()

    def record(self, program: SplitProgram, forward: Recording, *, num_streams: int) -> list[Recording | None]:
        """One recording for each part of `program`; None where `forward` keeps no memory between calls.

        Args:
            num_streams: the most streams to try; with 1 nothing is tried.

        Raises:
            RefusedError, torch.OutOfMemoryError: a part cannot be recorded.
        """
        self.schedules, self._num_streams = (), num_streams
        executor = forward.executor
        if not isinstance(executor, CudaGraph):
            return [None for _ in program.parts]
        first = len(program.differentiable)
        saved, warm = executor.static_outputs()[first:], executor.warm_outputs()[first:]
        computed = backward_plans.computed(program.forward.graph)[first:]
        recordings: list[Recording] = []
        try:
            for part in program.parts:
                tangents = [torch.ones_like(program.tangents[root].empty()) for root in part.roots]
                inputs, values = ([*(given[index] for index in part.saved), *tangents] for given in (saved, warm))
                own = [place for place, index in enumerate(part.saved) if computed[index]]
                backward = _Backward(part.backward, inputs, values, len(part.saved), own)
                recordings.append(self._in_order(backward))
                if num_streams > 1:
                    recordings[-1] = self._fastest(backward, recordings[-1], num_streams, program.is_rewritten)
        except BaseException:
            for recording in recordings:
                recording.release()
            raise
        return list(recordings)

    def record_case(
        self,
        program: SplitProgram,
        forward: Recording,
        part: BackwardPart,
        missing: frozenset[int],
        beside: Recording | None,
    ) -> Recording | None:
        """A recording of `part.without(missing)`, of the latest program; None where that cannot be.

        To be called while the memory of `forward` holds values. As many streams are tried as for the program.

        Args:
            beside: another recording of the same, in whose memory it is to be; see `free_place`. Where plans were
                tried for that one, and its graph is the same, none is tried again: what loses a trial leaves memory
                behind that stays as long as that recording does.
        """
        try:
            return self._case(program, forward, part, missing, beside)
        except torch.OutOfMemoryError:
            refusal = Refusal("there is too little device memory to record the backward pass of some outputs")
        except RefusedError as error:
            refusal = error.refusal
        except Exception as error:  # noqa: BLE001 - drivers and compilers fail in many ways, and the loop does without
            kind = type(error).__name__
            refusal = Refusal(f"the backward pass of some outputs cannot be recorded ({kind}: {first_line(error)})")
        self._log.do_without(refusal)
        return None

    def record_tail(
        self,
        module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        handout: Handout | None,
        *,
        is_fused: bool,
        beside: Recording | None,
    ) -> Recording:
        """A recording of what follows a call of the latest program, or of both; as many streams are tried as for that.

        Args:
            inputs: what it reads, where it reads it, with values.
            handout: see `CudaGraph`.
            beside: as in `record_case`.

        Raises:
            RefusedError: it cannot be recorded.
        """
        tail = _Backward(module, inputs, inputs, len(inputs), [], handout, beside)
        again = self._again(tail)
        if again is not None:
            return again
        in_order = self._in_order(tail)
        may_repeat = isinstance(in_order.executor, CudaGraph) and not dataflow.written_inputs(module.graph)
        if self._num_streams == 1 or not may_repeat:
            return in_order
        self.schedules = ()
        try:
            return self._fastest(tail, in_order, self._num_streams, is_fused)
        except BaseException:
            in_order.release()
            raise

    def _case(
        self,
        program: SplitProgram,
        forward: Recording,
        part: BackwardPart,
        missing: frozenset[int],
        beside: Recording | None,
    ) -> Recording | None:
        module = part.without(missing)
        if not dataflow.outputs(module.graph):
            return None
        refresh(module.graph)
        static = forward.executor.static_outputs()[len(program.differentiable) :]
        roots = [root for index, root in enumerate(part.roots) if index not in missing]
        tangents = [torch.ones_like(program.tangents[root].empty()) for root in roots]
        inputs = [*(static[index] for index in part.saved), *tangents]
        backward = _Backward(module, inputs, inputs, len(part.saved), [], beside=beside)
        again = self._again(backward)
        if again is not None:
            return again
        in_order = self._in_order(backward)
        if self._num_streams == 1:
            return in_order
        try:
            return self._fastest(backward, in_order, self._num_streams, program.is_rewritten)
        except BaseException:
            in_order.release()
            raise

    def _again(self, backward: _Backward) -> Recording | None:
        """By the plan of what `backward` is to be beside, if that was chosen for the same graph; None if it was not.

        In order where it cannot be recorded by that once more, as where there is too little memory.
        """
        choice = None if backward.beside is None else self._choices.get(backward.beside)
        if choice is None or choice.graph != graph_signature(backward.module.graph):
            return None
        if choice.planned.plan.schedule.num_streams > 1:
            try:
                return self._by_plan(backward, choice.planned)
            except RefusedError as error:
                self._log.do_without(error)
            clear(self._memory, backward.inputs[0].device)
        return self._in_order(backward)

    def _in_order(self, backward: _Backward) -> Recording:
        return Recording(backward.module, backward.inputs, **self._conditions(backward))

    def _by_plan(self, backward: _Backward, planned: Planned) -> Recording:
        return record_planned(self._memory, planned, backward.inputs, **self._conditions(backward))

    def _fastest(self, backward: _Backward, in_order: Recording, num_streams: int, is_fused: bool) -> Recording:
        """By a plan on at most so many streams, or `in_order`, which is the caller's to release where this raises."""
        record, found = partial(self._by_plan, backward), None
        try:
            for place in backward.computed:
                backward_plans.fill(backward.inputs[place], backward.values[place])
            stable = range(backward.num_saved)
            bound = most_live_bytes(backward.module, backward.values, stable, self._config)
            planned = backward_plans.plans(backward.module, backward.values, num_streams, bound, self._log.do_without)
            found = backward_plans.fastest(in_order, planned[1:], record, backward.inputs, self._log.do_without)
        except Exception as error:  # noqa: BLE001 - operators that cannot be timed, drivers, too little memory
            kind = type(error).__name__
            reason = f"planning failed ({kind}: {first_line(error)}); the backward pass is replayed on one stream"
            self._log.do_without(Refusal(reason))
        # Out of the handler: an exception that is being handled would keep alive all that was allocated.
        clear(self._memory, backward.inputs[0].device)
        if found is None:
            return in_order
        self.schedules += found.schedules(planned, fused=is_fused)
        self._choices[found.recording] = _Choice(graph_signature(backward.module.graph), planned[found.place])
        return found.recording

    def _conditions(self, backward: _Backward) -> dict[str, Any]:
        return {
            "stable": range(backward.num_saved),
            "config": self._config,
            "pool": _pool_of(backward.beside) or GraphPool(self._streams),
            "log": self._log,
            "warm_up": backward.values,
            "handout": backward.handout,
        }


class _Backward(NamedTuple):
    """A part of a backward pass, the tensors that its graph reads, and values that these may have.

    The first `num_saved` ones are what the forward pass has saved, which it `computed` at some places; the others are
    gradients. `handout` gives the first results of each replay away. It is recorded into the memory of what it is
    `beside`, if there is such a recording.
    """

    module: fx.GraphModule
    inputs: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    num_saved: int
    computed: Sequence[int]
    handout: Handout | None = None
    beside: Recording | None = None


class _Choice(NamedTuple):
    """The fastest plan of a graph, which is known by its `graph_signature`."""

    graph: str
    planned: Planned


def _pool_of(recording: Recording | None) -> GraphPool | None:
    return recording.executor.pool if recording is not None and isinstance(recording.executor, CudaGraph) else None
