"""The captured steps of a loop, by signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import RefusalLog
from kitsune.loop.guarded_step import GuardedStep

# Signatures that hold no graph are cheap to remember, and forgetting one means timing it again.
_REMEMBERED_PER_GRAPH = 16

# Where so many were met and fewer calls were replayed, the user is told what a signature is.
_MANY_SIGNATURES = 50
_HARDLY_ANY_TWICE = Refusal(
    f"{_MANY_SIGNATURES} signatures of the arguments were met, hardly any of them twice: shapes are part of them, and "
    "so are numbers and text, whether the model uses them or not",
    remedy="pass numbers that change as tensors, leave out what the model has no use for, or pad to few shapes",
)

S = TypeVar("S", bound=GuardedStep)


class StepCache(Generic[S]):
    """Keeps steps by signature. Few of them may hold graphs; the least recently used are released first."""

    def __init__(self, max_graphs: int, log: RefusalLog) -> None:
        self._max_graphs = max_graphs
        self._log = log
        self._steps: OrderedDict[Hashable, S] = OrderedDict()
        self._met_once: OrderedDict[Hashable, None] = OrderedDict()
        self._num_met = self._past_replays = 0
        self._past_setup_seconds = 0.0

    def is_new(self, key: Hashable) -> bool:
        """Whether a signature is met for the first time. Many never come back: only that it was met is kept."""
        if key in self._steps or key in self._met_once:
            return False
        self._met_once[key] = None
        self._count_met()
        if len(self._met_once) > self._max_graphs * _REMEMBERED_PER_GRAPH:
            self._met_once.popitem(last=False)
        return True

    def get(self, key: Hashable, make: Callable[[], S]) -> S:
        """The step of a signature, the most recently used one from now on."""
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = make()
            if key in self._met_once:
                del self._met_once[key]
            else:
                self._count_met()
            if len(self._steps) > self._max_graphs * _REMEMBERED_PER_GRAPH:
                self._forget(next(iter(self._steps)))
        else:
            self._steps.move_to_end(key)
        return step

    def find(self, key: Hashable) -> S | None:
        """The step of a signature if there is one; it becomes no more recently used."""
        return self._steps.get(key)

    def settle(self, step: S) -> None:
        """To be called after each use of `step`: releases graphs that are not wanted any more."""
        refusal = step.chooser.refusal
        if (refusal is None and len(self._steps) <= self._max_graphs) or step.executor is None:
            return
        if refusal is not None:
            self._log.add(refusal)
            step.release()
            return
        holders = [other for other in self._steps.values() if other.executor is not None]
        for other in holders[: max(len(holders) - self._max_graphs, 0)]:
            other.release()
            other.gave_way = True

    def clear(self) -> None:
        """Releases and forgets everything."""
        for key in list(self._steps):
            self._forget(key)

    @property
    def graphs(self) -> int:
        """How many steps hold graphs."""
        return sum(step.executor is not None for step in self._steps.values())

    @property
    def replays(self) -> int:
        """Replays so far, forgotten steps included."""
        return self._past_replays + sum(step.replays for step in self._steps.values())

    @property
    def setup_seconds(self) -> float:
        """Time spent on captures so far, forgotten steps included."""
        return self._past_setup_seconds + sum(step.setup_seconds for step in self._steps.values())

    def _count_met(self) -> None:
        self._num_met += 1
        if self._num_met == _MANY_SIGNATURES and self.replays < _MANY_SIGNATURES:
            self._log.add(RefusedError(_HARDLY_ANY_TWICE, passing=True))

    def _forget(self, key: Hashable) -> None:
        step = self._steps.pop(key)
        self._past_replays += step.replays
        self._past_setup_seconds += step.setup_seconds
        step.release()
