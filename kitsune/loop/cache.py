"""The captured steps of a loop, by signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from kitsune.budget import CaptureBudget
from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import RefusalLog
from kitsune.loop.guarded_step import GuardedStep
from kitsune.loop.room import Room
from kitsune.loop.variants import Variants

# Signatures that hold no graph are cheap to remember, and forgetting one means timing it again.
_REMEMBERED_PER_GRAPH = 16

# Of several variants, those that were not used between two looks give their memory back: a state may be over for good.
_REPLAYS_BETWEEN_LOOKS = 1000

# Where so many were met and fewer calls were replayed, the user is told what a signature is.
_MANY_SIGNATURES = 50
_HARDLY_ANY_TWICE = Refusal(
    f"{_MANY_SIGNATURES} signatures of the arguments were met, hardly any of them twice: shapes are part of them, and "
    "so are numbers and text, whether the model uses them or not",
    remedy="pass numbers that change as tensors, leave out what the model has no use for, or pad to few shapes",
)

S = TypeVar("S", bound=GuardedStep)

Make = Callable[[bool], S]
"""Makes a step, told whether there is another one of its signature."""


class StepCache(Generic[S]):
    """Keeps steps by signature, and of each signature by the state in which they were captured.

    At most `max_graphs` of them hold graphs; see `Room` for which.

    Args:
        budget: bounds the time that captures take.
    """

    def __init__(self, max_graphs: int, budget: CaptureBudget, log: RefusalLog) -> None:
        self._max_graphs, self._budget, self._log = max_graphs, budget, log
        self._most_busy = max(max_graphs // 2, 1)  # of one signature
        self._room = Room(max_graphs, remedy="a larger max_graphs keeps more")
        self._kinds: OrderedDict[Hashable, Variants[S]] = OrderedDict()
        self._kind_of: dict[GuardedStep, Variants[S]] = {}
        self._entered: list[GuardedStep] = []  # those that may hold graphs
        self._latest: S | None = None
        self._met_once: OrderedDict[Hashable, None] = OrderedDict()
        self._num_met = self._past_replays = 0

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a step of a signature."""
        return key in self._kinds

    def is_new(self, key: Hashable) -> bool:
        """Whether a signature is met for the first time. Many never come back: only that it was met is kept."""
        if key in self._kinds or key in self._met_once:
            return False
        self._met_once[key] = None
        self._count_met()
        if len(self._met_once) > self._max_graphs * _REMEMBERED_PER_GRAPH:
            self._met_once.popitem(last=False)
        return True

    def get(self, key: Hashable, args: tuple[Any, ...], kwargs: Mapping[str, Any], make: Make[S]) -> S:
        """The step of a signature that answers a call: one whose graphs fit the present state, if there is one.

        Else one without graphs, which waits for its capture. Where all that fit are pending, and are as many as may be,
        the last of those.
        """
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._begin(key)
        else:
            self._kinds.move_to_end(key)
        step = self._find(kind, args, kwargs, make)
        if self._latest is not None and self._latest.executor is not None:
            self._room.note_use(self._latest)  # its replays since, of which nobody is told
        self._latest = step
        self._room.note_use(step)
        return step

    def find(self, key: Hashable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> S | None:
        """The step that would replay a call, if there is one; it becomes no more recently used."""
        steps = self._kinds.get(key, ())
        return next((step for step in steps if step.fits(args, kwargs)), None)

    def check(self, step: GuardedStep) -> None:
        """See `kitsune.loop.guarded_step.Admission`."""
        error = self._kind_of[step].refuse(step.cause)
        if error is not None:
            if not error.passing:
                self._drop_others(step)
            raise error
        place = self._room.place_for(step, self._holders())
        refusal = place if isinstance(place, Refusal) else self._budget.refuse()
        if refusal is not None:
            raise RefusedError(refusal, passing=True)

    def enter(self, step: GuardedStep) -> None:
        """See `kitsune.loop.guarded_step.Admission`."""
        place = self._room.place_for(step, self._holders())
        if isinstance(place, GuardedStep):
            place.release()
        self._entered = [*self._holders(), step]
        kind = self._kind_of[step]
        step.is_first = kind.num_captures == 0
        kind.note_capture(step)

    def give_memory(self, step: GuardedStep) -> bool:
        """See `kitsune.loop.guarded_step.Admission`."""
        others = [one for one in self._kind_of[step] if one is not step and one.executor is not None]
        for other in others:
            if not other.is_pending():
                other.release()
        return any(other.executor is None for other in others)

    def of(self, module: torch.nn.Module) -> list[S]:
        """Those whose calls are of `module`."""
        return [step for step in self._steps() if step.module is module]

    def settle(self, step: S) -> None:
        """To be called after each use of `step`: releases graphs that are not wanted any more."""
        refusal = step.chooser.refusal
        if refusal is not None and step.executor is not None:
            self._log.add(refusal)
            step.release()
        if step.replays and not step.replays % _REPLAYS_BETWEEN_LOOKS and (kind := self._kind_of.get(step)) is not None:
            for unused in kind.unused():
                unused.release()

    def clear(self) -> None:
        """Releases and forgets everything."""
        for key in list(self._kinds):
            self._forget(key)
        self._latest = None
        self._entered.clear()

    @property
    def graphs(self) -> int:
        """How many steps hold graphs."""
        return len(self._holders())

    @property
    def replays(self) -> int:
        """Replays so far, forgotten steps included."""
        return self._past_replays + sum(step.replays for step in self._steps())

    def _steps(self) -> Iterator[S]:
        for kind in self._kinds.values():
            yield from kind

    def _holders(self) -> list[GuardedStep]:
        return [step for step in self._entered if step.executor is not None]

    def _find(self, kind: Variants[S], args: tuple[Any, ...], kwargs: Mapping[str, Any], make: Make[S]) -> S:
        steps = list(kind)
        if len(steps) == 1 and not steps[0].misfits and not steps[0].is_pending():
            return steps[0]  # to be replayed, it asks the guards itself
        found, pending = kind.find(lambda step: step.fits(args, kwargs), lambda step: step.is_pending())
        if found is not None:
            return found
        if len(pending) >= self._most_busy:
            return pending[-1]
        waiting = [step for step in kind if step.executor is None]
        for step in waiting[1:]:
            self._remove(kind, step)
        if waiting:
            return waiting[0]
        step = make(bool(steps))
        self._kind_of[step] = kind
        if steps:
            step.cause = steps[0].misfit(args, kwargs)
        kind.add(step)
        return step

    def _begin(self, key: Hashable) -> Variants[S]:
        if key in self._met_once:
            del self._met_once[key]
        else:
            self._count_met()
        kind = self._kinds[key] = Variants(self._max_graphs)
        if len(self._kinds) > self._max_graphs * _REMEMBERED_PER_GRAPH:
            self._forget(next(iter(self._kinds)))
        return kind

    def _count_met(self) -> None:
        self._num_met += 1
        if self._num_met == _MANY_SIGNATURES and self.replays < _MANY_SIGNATURES:
            self._log.add(RefusedError(_HARDLY_ANY_TWICE, passing=True))

    def _drop_others(self, step: GuardedStep) -> None:
        """Their states do not come back."""
        kind = self._kind_of[step]
        for other in kind:
            if other is not step:
                self._remove(kind, other)

    def _forget(self, key: Hashable) -> None:
        kind = self._kinds.pop(key)
        for step in kind:
            self._remove(kind, step)

    def _remove(self, kind: Variants[S], step: S) -> None:
        kind.remove(step)
        del self._kind_of[step]
        self._past_replays += step.replays
        self._room.forget(step)
        step.release()
