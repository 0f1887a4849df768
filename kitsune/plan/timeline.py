"""A plan's times as a trace for chrome://tracing and Perfetto.

The format is the JSON object format of the "Trace Event Format" (Google, 2016): complete events "X" for tasks, flow
events "s" and "f" for waits, metadata events "M" for names. Its unit is the microsecond; times here are whole
nanoseconds, the resolution of both viewers, so that tasks that touch do not overlap by a rounding error.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kitsune.plan.plan import Plan, Span

Event = dict[str, Any]

_RESOLUTION_NS = 1000
"""By how much spans may contradict the schedule and still be right: CUDA's events resolve about half a microsecond."""

_PROCESSES = {"predicted": 1, "measured": 2}
_PLACES = {"M": 0, "X": 1, "s": 2, "f": 3}  # a flow event belongs to the task that encloses it, which precedes it


def write(plan: Plan, path: Path) -> None:
    """Writes the trace of `plan` to `path`, whole or not at all.

    Raises:
        ValueError: as `trace`.
        OSError: the file cannot be written; what was there is still there.
    """
    content = json.dumps(trace(plan), allow_nan=False, separators=(",", ":"))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:  # follows no link that somebody else has put there
            file.write(content)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def trace(plan: Plan) -> dict[str, object]:
    """The trace: a process for each known kind of times (1 predicted, 2 measured), in it a thread for each stream.

    Thread `stream + 1` is the stream, since 0 stands for the idle processor. Events are ascending in time.

    Raises:
        ValueError: the plan holds no times, or a task starts before the end of one that precedes it on its
            stream or that it waits for.
    """
    kinds = {"predicted": plan.predicted_spans, "measured": plan.measured_spans}
    known = {kind: spans for kind, spans in kinds.items() if spans is not None}
    if not known:
        raise ValueError("the plan holds neither predicted nor measured times of its tasks, so there is no timeline")
    events: list[Event] = []
    for kind, spans in known.items():
        exact = _exact_spans(plan, spans, kind)
        first_flow = len(plan.schedule.waits) * (_PROCESSES[kind] - 1)
        events += _names(plan, kind)
        events += _tasks(plan, exact, _PROCESSES[kind])
        events += _flows(plan, exact, _PROCESSES[kind], first_flow)
    events.sort(key=lambda event: (_PLACES[event["ph"]] > 0, event.get("ts", 0), _PLACES[event["ph"]], event["pid"]))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"strategy": plan.schedule.strategy, "costs": plan.costs.source},
    }


def _exact_spans(plan: Plan, spans: Sequence[Span], kind: str) -> list[tuple[int, int]]:
    """The spans in nanoseconds. Starts that are too early by no more than the resolution are moved."""
    if len(spans) != len(plan.graph.tasks):
        raise ValueError(f"{len(plan.graph.tasks)} tasks, but {kind} times of {len(spans)}")
    given = [(round(1000 * start), round(1000 * end)) for start, end in spans]
    exact = list(given)
    for task, earlier_tasks in _precedence(plan):
        start, end = given[task]
        if end < start:
            raise ValueError(f"{kind} times: task {task} ends before it starts")
        for earlier in earlier_tasks:
            if start < given[earlier][1] - _RESOLUTION_NS:
                raise ValueError(
                    f"{kind} times: task {task} starts before the end of task {earlier}, which precedes it"
                )
        start = max([start, *(exact[earlier][1] for earlier in earlier_tasks)])
        exact[task] = (start, max(start, end))
    return exact


def _precedence(plan: Plan) -> Iterator[tuple[int, Sequence[int]]]:
    """For each task, as they are issued, what must have ended: the task before it on its stream, and the awaited."""
    awaited: dict[int, list[int]] = {}
    for wait in plan.schedule.waits:
        awaited.setdefault(wait.later, []).append(wait.earlier)
    latest: dict[int, int] = {}  # by stream
    for task in plan.schedule.order:
        stream = plan.schedule.streams[task]
        before = [latest[stream]] if stream in latest else []
        yield task, [*before, *awaited.get(task, ())]
        latest[stream] = task


def _names(plan: Plan, kind: str) -> Iterator[Event]:
    pid = _PROCESSES[kind]
    yield _metadata("process_name", pid, 0, {"name": kind})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for stream in range(plan.schedule.num_streams):
        yield _metadata("thread_name", pid, stream + 1, {"name": f"stream {stream}"})
        yield _metadata("thread_sort_index", pid, stream + 1, {"sort_index": stream})


def _metadata(name: str, pid: int, tid: int, args: dict[str, object]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _tasks(plan: Plan, spans: Sequence[tuple[int, int]], pid: int) -> Iterator[Event]:
    for index in plan.schedule.order:  # so that a task without duration precedes the one that starts as it ends
        task, cost, (start, end) = plan.graph.tasks[index], plan.costs.tasks[index], spans[index]
        args = {
            "task": index, "operator": task.operator, "cost_us": cost.us, "share": cost.share, "bound": cost.bound,
        }  # fmt: skip
        yield {
            "ph": "X", "name": task.name, "cat": "task", "ts": start / 1000, "dur": (end - start) / 1000, "pid": pid,
            "tid": plan.schedule.streams[index] + 1, "args": args,
        }  # fmt: skip


def _flows(plan: Plan, spans: Sequence[tuple[int, int]], pid: int, first: int) -> Iterator[Event]:
    """An arrow for each wait, from the last nanosecond of the earlier task to the start of the later one."""
    for number, wait in enumerate(plan.schedule.waits, first):
        begin, end = spans[wait.earlier]
        tail = max(begin, end - 1)
        flow = {"name": "wait", "cat": "wait", "id": number, "pid": pid}
        yield flow | {"ph": "s", "ts": tail / 1000, "tid": plan.schedule.streams[wait.earlier] + 1}
        yield flow | {
            "ph": "f",
            "bp": "e",
            "ts": spans[wait.later][0] / 1000,
            "tid": plan.schedule.streams[wait.later] + 1,
        }
