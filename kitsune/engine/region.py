"""A captured program that is replayed, and made faster while it is."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.background import is_quiet
from kitsune.budget import CaptureBudget
from kitsune.config import Config
from kitsune.device import refuse_fusion, refuse_streams
from kitsune.engine import planning
from kitsune.engine.by_address import ByAddress, Places
from kitsune.engine.contest import Contest
from kitsune.engine.fusing import Fusing, Memory
from kitsune.engine.planned_recording import clear, most_on_streams, record_planned, room_on_streams
from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording, most_live_bytes
from kitsune.engine.rewriting import form_of
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.handout import Handout
from kitsune.execution.in_order import Outputs
from kitsune.execution.timed import measure_spans
from kitsune.fallback import Chooser, RefusalLog
from kitsune.memory.pool import MemoryPool
from kitsune.plan import Plan
from kitsune.plan.plan import Span
from kitsune.schedule.cost import copies_us
from kitsune.status import ScheduleTime
from kitsune.timing.stopwatch import stopwatch

# What copies must take of a step before others are recorded that do without them.
_WORTHWHILE = 0.003

# A program that has to be captured again and again is not tried again and again.
_REPLAYS_BEFORE_MORE_TRIALS = 1000


class Choice(NamedTuple):
    """What tells a plan from others of the same program.

    Attributes:
        form: see `rewriting.form_of`.
        strategy, num_streams: of its schedule.
    """

    form: str
    strategy: str
    num_streams: int

    @classmethod
    def of(cls, planned: Planned) -> Choice:
        schedule = planned.plan.schedule
        return cls(form_of(planned.plan.fusions), schedule.strategy, schedule.num_streams)


_AS_CAPTURED = Choice("as captured", "in order", 1)


@dataclass(frozen=True)
class Means:
    """What the regions of a loop share.

    Attributes:
        config: the options.
        pool: for their graphs.
        memory: for the arenas of planned values; of programs that never run at the same time.
        budget: told of the time that recordings and trials take.
        log: told of what is given up, and why.
    """

    config: Config
    pool: GraphPool
    memory: MemoryPool
    budget: CaptureBudget
    log: RefusalLog


class Region:
    """Replays one program, at first as it was captured.

    Once replays are known to beat eager steps, other plans are looked for: generated, fused, on several streams. Each
    replays some of the user's own calls, as soon as it is found, and the fastest stays.

    Args:
        module: the program, a graph of ATen operators over flat tensors.
        inputs: of the present call.
        stable: positions of inputs that stay the same tensors from call to call.
        trained: the parameters.
        handout: gives the first results away.
        means: see there.
        chooser: decides between replays and eager steps.
        wanted: the plan that was chosen for an earlier capture of the same program: others are not tried again.
        is_first: nothing of its signature was captured before.

    Raises:
        RefusedError: it cannot be recorded.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        *,
        stable: Collection[int],
        trained: Sequence[torch.Tensor],
        handout: Handout | None,
        means: Means,
        chooser: Chooser,
        wanted: Choice | None,
        is_first: bool,
    ) -> None:
        self.module, self._stable, self._trained = module, stable, trained
        self._means, self._chooser, self._handout = means, chooser, handout
        self._wanted, self._is_first = wanted, is_first
        self._device = inputs[0].device
        before = means.pool.num_bytes()
        copied = [position for position in range(len(inputs)) if position not in stable]
        copies = copies_us([inputs[position] for position in copied])
        self._by_address: Callable[..., ByAddress] = partial(
            ByAddress, copied=copied, places=Places(partial(_copies_matter, chooser, copies))
        )
        self._contest = Contest(
            partial(self._by_address, partial(Recording, module, **self._conditions())),
            inputs,
            stopwatch(self._device),
            means.log.do_without,
            partial(clear, means.memory, self._device),
            partial(_eager_us, chooser),
        )
        self._in_order_bytes = (
            None if before else means.pool.num_bytes() or None
        )  # that its graph takes, if it is known
        self._most_bytes: int | None = None  # that a graph on several streams may take
        self._in_order: Planned | None = None
        self._others: tuple[Planned, ...] = ()
        self._fusing: Fusing | None = None  # under way
        self._bases: list[Planned] = []  # rewritten, in order: what plans on several streams are made of
        self._vetted: deque[planning.Vetting] = deque()  # what was found, and may be of use
        self._memory: Memory | None = None
        self._replays = 0
        self._has_begun = self._is_reopened = False
        self._is_kept = False  # what is wanted: it was chosen in an earlier process
        self._is_improving = chooser.may_improve = self._num_streams() > 1 or self._fuses()
        self.choice: Choice | None = wanted

    @property
    def winner(self) -> ByAddress:
        """What replays at present."""
        return self._contest.winner

    @property
    def place(self) -> int:
        """Which of the plans it is."""
        return self._contest.place

    @property
    def changes_next(self) -> bool:
        """Whether the next call may be replayed by another plan."""
        return self._contest.changes_next

    @property
    def is_reopened(self) -> bool:
        """Whether the choice between replays and eager steps is made anew, as replays have become others."""
        return self._is_reopened

    @property
    def plan(self) -> Plan:
        """The plan of `winner`, with its measured time."""
        measured = self._contest.times_us[self._contest.place]
        return dataclasses.replace(self._plans()[self._contest.place].plan, measured_us=measured)

    def schedules(self) -> tuple[ScheduleTime, ...]:
        """All plans that were tried, and their times."""
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

    def describe(self) -> str | None:
        """What is being done to make it faster; None if nothing is."""
        if self._fusing is not None:
            return self._fusing.describe()
        if self._contest.trying or self._may_improve_now():
            return "schedules of the captured step are being timed"
        if self._is_reopened:
            return "the memory of the timed steps is given back with the next one"
        return None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Replays the program. The outputs are valid until the next call.

        Raises:
            RefusedError: no plan can be recorded any more; the region is of no further use.
        """
        contest, budget = self._contest, self._means.budget
        if self._may_improve_now() and contest.winner.has_looked:
            self._improve(inputs)
        if self._is_reopened and self._chooser.settled and is_quiet():
            self._is_reopened = False
            clear(self._means.memory, self._device)  # the eager steps have left some
        settled = contest.settled
        outputs = contest(inputs)
        self._replays += 1
        if contest.trying or contest.settled != settled:
            budget.charge(contest.take_making_seconds())
        budget.charge(contest.winner.take_recording_seconds())
        if contest.settled != settled:
            self.choice = Choice.of(self._plans()[contest.place])
            if not self._is_improving:
                self._keep_choice()
            self._chooser.may_improve = self._is_improving
            self._chooser.reopen()
            self._is_reopened = True
        return outputs

    def measure_spans(self, inputs: Sequence[torch.Tensor]) -> Sequence[Span]:
        """When the tasks of the plan run, in replays on copies of `inputs`.

        Raises:
            RefusedError: there is too little memory.
        """
        planned, memory = self._plans()[self._contest.place], self._means.memory
        try:
            arena = memory.take(planned.plan.memory.arena_bytes, self._device)
        except torch.OutOfMemoryError as error:
            raise RefusedError(Refusal("there is too little device memory to time the tasks of the plan")) from error
        try:
            lowered = planned.lowered(arena, timed=True)
            return measure_spans(planned.module, lowered, inputs, GraphPool(self._means.pool.streams))
        finally:
            memory.give(arena)
            clear(memory, self._device)

    def release(self) -> None:
        """Gives all graphs and their memory back, and ends what is under way."""
        self._contest.release()
        if self._fusing is not None:
            self._fusing.close()
            self._fusing = None

    def _conditions(self) -> Mapping[str, Any]:
        means = self._means
        shared = {"config": means.config, "pool": means.pool, "log": means.log}
        return {**shared, "stable": self._stable, "handout": self._handout}

    def _plans(self) -> tuple[Planned, ...]:
        if self._in_order is None:
            self._in_order = planning.in_order(self.module, self._device)
        return self._in_order, *self._others

    def _num_streams(self) -> int:
        return 1 if refuse_streams(self._device) is not None else self._means.config.max_streams()

    def _fuses(self) -> bool:
        return self._means.config.fuses() and refuse_fusion(self._device) is None

    def _may_improve_now(self) -> bool:
        """Whether replay has not lost to eager, and other plans may still be found."""
        if not self._is_improving or not self._chooser.settled or self._contest.trying:
            return False
        return self._is_first or self._replays >= _REPLAYS_BEFORE_MORE_TRIALS

    def _improve(self, inputs: Sequence[torch.Tensor]) -> None:
        """Lets other plans try to be faster than the one in order, as they are found; until then nothing is done."""
        means = self._means
        if not self._has_begun and self._fuses():
            with means.budget.spending():
                self._begin_fusing(inputs)
        if not self._vetted and not (is_quiet() if self._fusing is None else self._fusing.may_go_on()):
            return
        try:
            with means.budget.spending():
                found = self._vet(inputs) if self._vetted else self._look(inputs)
                self._add(found, inputs)
        except RefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - operators that cannot be timed, compilers, too little memory
            self._is_improving, self._fusing = False, None
            self._vetted.clear()
            kind = type(error).__name__
            reason = f"planning failed ({kind}: {first_line(error)}); the step is replayed by what was found before"
            means.log.do_without(Refusal(reason))
        if not self._is_improving and not self._contest.trying:
            self._keep_choice()
            self._chooser.will_not_improve()

    def _keep_choice(self) -> None:
        """For the next process."""
        if self._memory is not None and self.choice is not None:
            self._memory.write({"choice": self.choice._asdict(), "options": self._options()})

    def _look(self, inputs: Sequence[torch.Tensor]) -> Sequence[Planned]:
        """Takes what was found since; when that was all, there are plans on several streams."""
        if self._fusing is not None:
            is_over = self._fusing.advance()
            self._vetted.extend(planning.Vetting(self.module, one) for one in self._fusing.new())
            if not is_over:
                return ()
            self._end_fusing()
            if self._vetted:
                return ()
        found = self._on_streams(inputs)
        there = [_AS_CAPTURED, *map(Choice.of, (*self._others, *found))]
        if self._is_kept and self._wanted is not None and self._wanted not in there:
            self._wanted, self._is_kept = None, False  # it is not there any more: all are tried
            self._bases.clear()
            self._begin_fusing(inputs, asks=False)
            return ()
        self._is_improving = False
        return found

    def _vet(self, inputs: Sequence[torch.Tensor]) -> Sequence[Planned]:
        """Looks a little longer at what was found first."""
        vetting = self._vetted[0]
        if not vetting.advance(inputs):
            return ()
        self._vetted.popleft()
        if vetting.refusal is not None:
            self._means.log.do_without(vetting.refusal)
        if vetting.planned is None:
            return ()
        self._bases.append(vetting.planned)
        return (vetting.planned,)

    def _options(self) -> dict[str, Any]:
        """Those of the user's on which the choice depends."""
        config = self._means.config
        return {"num_streams": self._num_streams(), "max_memory": config.max_memory, "cuda_graphs": config.cuda_graphs}

    def _begin_fusing(self, inputs: Sequence[torch.Tensor], *, asks: bool = True) -> None:
        """`asks` whether something was chosen in an earlier process."""
        self._has_begun = True
        self._fusing = Fusing(self.module, inputs, self._means.log.do_without, is_whole=True)
        self._memory = self._fusing.memory
        kept = self._memory.read() if self._memory is not None and asks else None
        if self._wanted is None and kept is not None and kept.get("options") == self._options():
            with suppress(TypeError):  # of another version
                self._wanted, self._is_kept = Choice(**kept["choice"]), True
        if self._wanted is not None:
            self._fusing.want(self._wanted.form)

    def _end_fusing(self) -> None:
        fusing, self._fusing = self._fusing, None
        try:
            if fusing is not None:
                fusing.result()
        except Exception as error:  # noqa: BLE001 - compilers, drivers and too little memory fail in many ways
            self._means.log.do_without(Refusal(f"fusing failed ({type(error).__name__}: {first_line(error)})"))

    def _on_streams(self, inputs: Sequence[torch.Tensor]) -> Sequence[Planned]:
        """Plans on several streams."""
        if self._num_streams() == 1:
            return ()
        self._in_order = planning.in_order(self.module, self._device, inputs)
        self._most_bytes, room_bytes = self._most_and_room(self._in_order.plan, inputs)
        every = planning.others(
            self.module,
            inputs,
            num_streams=self._num_streams(),
            found=self._bases,
            max_bytes=most_live_bytes(self.module, inputs, self._stable, self._means.config),
            room_bytes=room_bytes,
        )
        return [planned for planned in every if planned.plan.schedule.num_streams > 1]

    def _add(self, found: Sequence[Planned], inputs: Sequence[torch.Tensor]) -> None:
        """Lets plans replay some calls, beside those that were tried before."""
        if self._wanted is not None:
            found = [planned for planned in found if Choice.of(planned) == self._wanted]
        if not found:
            return
        self._others = (*self._others, *found)
        conditions = {**self._conditions(), "most_bytes": self._most_bytes}
        records = [partial(record_planned, self._means.memory, planned, **conditions) for planned in self._others]
        self._contest.open([partial(self._by_address, record) for record in records], inputs)

    def _most_and_room(self, in_order: Plan, inputs: Sequence[torch.Tensor]) -> tuple[int | None, int | None]:
        """What a graph on several streams may take, and its values of that; None where that cannot be told."""
        if self._in_order_bytes is None:
            return None, None
        most_bytes = most_on_streams(self._in_order_bytes, inputs, self._trained)
        return most_bytes, room_on_streams(most_bytes, self._in_order_bytes, in_order.memory.live_bytes)


def _eager_us(chooser: Chooser) -> float:
    return math.inf if chooser.eager_seconds is None else chooser.eager_seconds * 1e6


def _copies_matter(chooser: Chooser, us: float) -> bool:
    """Whether `us` microseconds of copies are worth more recordings, which take as long to make as many steps."""
    seconds = chooser.replay_seconds
    return seconds is not None and us * 1e-6 >= _WORTHWHILE * seconds
