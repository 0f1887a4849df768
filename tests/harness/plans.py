"""Plans as Kitsune's status holds them, written by Kitsune itself so that what the harness reads is what is written."""

import json
from typing import Any

from kitsune.plan import Cost, Costs, Dependency, Fusion, MemoryPlan, Plan, Schedule, Task, TaskGraph, Wait

_OPERATORS = (
    "aten.convolution.default", "aten.native_batch_norm.default", "aten.relu.default", "aten.mm.default",
    "aten.clone.default", "aten.sum.dim_IntList", "kitsune.adam_.default",
)  # fmt: skip


FUSIONS = (
    *[Fusion("batch norm + relu", ("native_batch_norm", "relu"), 6.5, 4.0, None)] * 3,
    Fusion("batch norm + relu", ("native_batch_norm_9", "relu_9"), 8.5, 6.0, None),
    Fusion("gradients of linear layers + adam", ("mm", "sum_1", "_fused_adam_"), 12.25, 9.75, None),
    *[Fusion("region", ("add", "mul"), None, None, None)] * 2,
    Fusion("linear + relu", ("addmm", "relu_4"), 5.0, 5.5, "it is not faster"),
    Fusion("linear + relu", ("addmm_1", "relu_5"), 7.0, 7.5, "it is not faster"),
    Fusion("region", ("sub", "exp"), None, None, "there was no time left to try it"),
)
"""Parts with each outcome, with and without times: 6 replaced ones, of which the timed ones win 12.5 us, and 3 left."""


def document(
    num_tasks: int, num_streams: int = 1, *, measured: bool = True, fusions: tuple[Fusion, ...] = ()
) -> dict[str, Any]:
    """The decoded JSON of a plan: a chain dealt to the streams in turn, of which task i takes 1 + i % 7 us."""
    tasks = tuple(
        Task(i, f"node_{i}", _OPERATORS[i % len(_OPERATORS)], (f"node_{i}",), (Dependency(i - 1),) if i else ())
        for i in range(num_tasks)
    )
    streams = tuple(i % num_streams for i in range(num_tasks))
    waits = tuple(Wait(i, i - 1) for i in range(1, num_tasks) if streams[i] != streams[i - 1])
    spans, now = [], 0.0
    for i in range(num_tasks):
        spans.append((now, now + 1 + i % 7))
        now = spans[-1][1] + 0.5
    plan = Plan(
        graph=TaskGraph(tasks),
        schedule=Schedule("list", tuple(range(num_tasks)), streams, waits),
        memory=MemoryPlan((), 0, 0),
        costs=Costs(tuple(Cost(end - start) for start, end in spans), 0.5, 1.0, "measured"),
        predicted_us=now,
        measured_us=1.25 * now if measured else None,
        predicted_spans=tuple(spans),
        measured_spans=tuple((1.25 * start, 1.25 * end) for start, end in spans) if measured else None,
        fusions=fusions,
    )
    return decoded(plan)


def decoded(plan: Plan) -> dict[str, Any]:
    """A plan as it stands in a status."""
    found: dict[str, Any] = json.loads(plan.to_json())
    return found
