"""The face of scheduling: options, and the choice between strategies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kitsune.collection import no_garbage_collection
from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.assign import StreamStrategy, in_order, on_streams
from kitsune.schedule.live_bytes import peak_bytes
from kitsune.schedule.simulate import simulate

Strategy = Literal["auto", "in order", "chains", "list"]

_MAX_STREAMS = 8


@dataclass(frozen=True)
class DataflowScheduler:
    """Makes schedules. The same arguments always give the same schedule.

    Attributes:
        num_streams: the most streams that a schedule may use, from 1 to 8.
        strategy: `"in order"`: one stream; `"chains"`: the most concurrency for the fewest waits; `"list"`: the
            critical path first, by cost; `"auto"`: what the simulation says is fastest.
        max_bytes: what the values of the graph may need at once, on every interleaving; None for no bound. Work is
            serialized where it would exceed that. In order, a graph needs what it needs: if no schedule with less is
            found, it is run in order even beyond the bound.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    num_streams: int = 4
    strategy: Strategy = "auto"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.num_streams) is not int or not 1 <= self.num_streams <= _MAX_STREAMS:
            raise ValueError(f"num_streams is {self.num_streams!r}; it must be a whole number from 1 to {_MAX_STREAMS}")
        if self.strategy not in get_args(Strategy):
            allowed = ", ".join(map(repr, get_args(Strategy)))
            raise ValueError(f"strategy is {self.strategy!r}; it must be one of {allowed}")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise ValueError(f"max_bytes is {self.max_bytes}; it must be at least 0, or None for no bound")

    @no_garbage_collection()
    def schedule(self, graph: TaskGraph, costs: Costs) -> Schedule:
        """The schedule of `graph` by the strategy; `"auto"` looks at 2 and at `num_streams` streams."""
        serial = in_order(graph)
        if self.strategy == "in order" or self.num_streams == 1:
            return serial
        if self.strategy != "auto":
            return on_streams(graph, costs, self.strategy, self.num_streams, self.max_bytes) or serial
        choices = self._on_streams(graph, costs, sorted({2, self.num_streams}))
        if not choices or self.max_bytes is None or peak_bytes(graph, serial) <= self.max_bytes:
            choices.append(serial)
        return _by_time(graph, costs, choices)[0]

    @no_garbage_collection()
    def candidates(self, graph: TaskGraph, costs: Costs, known: Sequence[Schedule] = ()) -> tuple[Schedule, ...]:
        """Schedules that are worth measuring: in order first, then others by simulated time.

        The others are those of the strategy, with `"auto"` of all strategies, for every number of streams from 2 to
        `num_streams`, that keep to `max_bytes`; none is there twice, or like one of those `known`. The simulation
        leaves none of them out: it does not see everything that makes one faster.
        """
        others = self._on_streams(graph, costs, range(2, self.num_streams + 1), known)
        return (in_order(graph), *_by_time(graph, costs, others))

    def _on_streams(
        self, graph: TaskGraph, costs: Costs, counts: Iterable[int], known: Sequence[Schedule] = ()
    ) -> list[Schedule]:
        """Schedules for these numbers of streams, without duplicates and without those that use but one stream."""
        wanted = [strategy for strategy in get_args(StreamStrategy) if self.strategy in ("auto", strategy)]
        left_out = set(map(_effect, known))
        found: dict[tuple[object, ...], Schedule] = {}
        for num_streams in counts:
            for strategy in wanted:
                schedule = on_streams(graph, costs, strategy, num_streams, self.max_bytes)
                if schedule is None or schedule.num_streams == 1 or _effect(schedule) in left_out:
                    continue
                found.setdefault(_effect(schedule), schedule)
        return list(found.values())


def _effect(schedule: Schedule) -> tuple[object, ...]:
    """What a device sees of it."""
    return schedule.streams, schedule.positions, schedule.waits


def _by_time(graph: TaskGraph, costs: Costs, schedules: Sequence[Schedule]) -> list[Schedule]:
    """By simulated time; of equally fast ones, those with fewer streams and then with fewer waits come first."""
    keys = [
        (simulate(graph, costs, schedule).total_us, schedule.num_streams, len(schedule.waits), index)
        for index, schedule in enumerate(schedules)
    ]
    return [schedules[key[-1]] for key in sorted(keys)]
