"""A whole plan, and the ways to look at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kitsune.plan import consistency, dot, serialize, text, timeline
from kitsune.plan.fusions import Fusion
from kitsune.plan.memory import MemoryPlan
from kitsune.plan.schedule import Schedule
from kitsune.plan.tasks import Costs, TaskGraph

Span = tuple[float, float]
"""When a task starts and when it ends, in microseconds since the start of the whole."""


@dataclass(frozen=True)
class Plan:
    """What is run, when, where, and at what price. `str` of it is a table of its tasks.

    Attributes:
        graph: the tasks and values.
        schedule: order, streams and waits of the tasks.
        memory: places of the values.
        costs: of the tasks.
        predicted_us: simulated microseconds of the whole.
        measured_us: microseconds of the whole on the device; None where it was not measured.
        predicted_spans: by index of the task, when the simulation runs it; None where it is not kept.
        measured_spans: the same on the device, all of one run; None where it was not measured.
        fusions: what could be fused in the graph before it was planned, done or not.
    """

    graph: TaskGraph
    schedule: Schedule
    memory: MemoryPlan
    costs: Costs
    predicted_us: float
    measured_us: float | None = None
    predicted_spans: tuple[Span, ...] | None = None
    measured_spans: tuple[Span, ...] | None = None
    fusions: tuple[Fusion, ...] = ()

    @property
    def is_fused(self) -> bool:
        """Whether anything was fused."""
        return any(fusion.refusal is None for fusion in self.fusions)

    def __str__(self) -> str:
        return text.table(self)

    def summary(self) -> str:
        """The figures of the whole plan, a line each, without its tasks."""
        return text.summary(self)

    def to_dot(self) -> str:
        """The plan in Graphviz's language: tasks by stream, with dependencies and waits."""
        return dot.digraph(self)

    def to_json(self) -> str:
        """The plan as JSON text of which `from_json` makes an equal plan.

        Raises:
            ValueError: a number of it is not finite.
        """
        return serialize.encode(self)

    @classmethod
    def from_json(cls, document: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not of this version, is damaged, or does not describe a plan; the
                message names the place.
        """
        plan = serialize.decode(document, cls)
        problem = consistency.problem(plan)
        if problem is not None:
            raise ValueError(f"not a plan: {problem}")
        return plan

    def timeline(self, path: str | Path) -> None:
        """Writes the predicted and the measured spans, as far as they are known, as a trace to `path`.

        chrome://tracing and https://ui.perfetto.dev open it. A file that is there is replaced as a whole.

        Raises:
            ValueError: neither kind of spans is known, or they contradict the schedule.
            OSError: the file cannot be written; what was there is still there.
        """
        timeline.write(self, Path(path))
