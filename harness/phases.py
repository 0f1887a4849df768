"""The phases of a training step, by a trace of torch.profiler: how long each took, and the part of it that is kept.

Nothing here needs torch or a device: a trace is its decoded JSON (Chrome's trace-event format, times in microseconds).
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Clock = Literal["device", "wall"]
Event = Mapping[str, object]

STEP = "harness: training step"
"""The range around a step, by which steps are told apart in a trace."""
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
WHOLE = "whole step"
"""The one phase of a step that runs as one thing."""
OTHER = "other"
"""What lies in no phase: the loop itself."""
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, WHOLE, OTHER)
"""All of them, in the order in which charts and tables show them."""

MOST_TRACE_BYTES = 2**20
"""A trace that is kept is no larger, compressed."""

_KEPT_PARTS = (
    (2, True, None),
    (1, True, "one step only"),
    (1, False, "one step only, without the host's operators"),
)
"""How many of the last steps are kept, whether with the host's operators, and how that is told."""

_PREFIX = "harness: phase "
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_TRACE_FIELDS = ("schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "deviceProperties")
"""What is kept of a trace besides its events; its other fields tell of the machine's name and paths."""
_HOST_DETAIL = ("cpu_op", "fwdbwd", "python_function")
_GAP = "host gap"
_NO_CORRELATION = -1
_UNSEEN = (-math.inf, -math.inf)
"""When a call began and ended that the trace does not have."""
_US = 1e-6


class TraceError(Exception):
    """A trace from which no phases can be told. The message says what it lacks."""


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of each phase in each profiled step; those of a step and its host gap add up to the step.

    With the clock "device" these are the device's times of what a phase launched, waits between pieces of work that the
    host had launched in time included; ``host_gap_s`` is the time in which the device was idle because the host had not
    yet launched its next work. With "wall" they are the host's times, and there is no gap.
    """

    clock: Clock
    phases_s: Mapping[str, tuple[float, ...]]
    host_gap_s: tuple[float, ...] | None


@dataclass(frozen=True)
class KeptTrace:
    """A part of a trace, gzip-compressed JSON, and what it has where it was shortened; None and the reason for none."""

    content: bytes | None
    shortened: str | None
    missing: str | None


@dataclass(frozen=True)
class _Work:
    """Something that the device did, and the call of the host that launched it. Times are microseconds.

    Where the trace lacks that call, it was launched before all else: in time, in no step and in no phase.
    """

    start: float
    end: float
    launch: float
    launched: float
    correlation: int


def annotation(phase: str) -> str:
    """What the range of a phase is called in a trace."""
    return _PREFIX + phase


def phase_times(trace: Mapping[str, object], clock: Clock, skip: int = 0) -> PhaseTimes:
    """The phases of the steps of a trace, without the first ``skip`` and the last, which marks the end of those before.

    Raises:
        TraceError: it has too few steps, or of the device's work there is none.
    """
    events = _events(trace)
    steps = sorted(_time(event, "ts") for event in _ranges(events) if event.get("name") == STEP)[skip:]
    if len(steps) < 2:
        raise TraceError(f"the trace has {len(steps)} steps after the first {skip}; at least two are needed")
    phases = _phase_starts(events)
    times = _wall_times(phases, steps) if clock == "wall" else _device_times(_work(events), phases, steps)
    marked = {name for _, _, name in phases}
    in_seconds = {name: tuple(_US * us for us in values) for name, values in times.items()}
    kept = {name: in_seconds[name] for name in PHASES if name in marked or any(in_seconds[name])}
    return PhaseTimes(clock, kept, in_seconds.get(_GAP))


def kept_trace(trace: Mapping[str, object], most_bytes: int = MOST_TRACE_BYTES) -> KeptTrace:
    """The last two steps of a trace; where that is too large one, and where that is, without the host's operators."""
    events = _events(trace)
    steps = sorted(_time(event, "ts") for event in _ranges(events) if event.get("name") == STEP)
    fields = {name: trace[name] for name in _TRACE_FIELDS if name in trace}
    size = 0
    for num_steps, has_detail, shortened in _KEPT_PARTS:
        window = (steps[-1 - num_steps], steps[-1]) if len(steps) > num_steps else None
        if window is None:
            continue
        part = [event for event in _between(events, *window) if has_detail or event.get("cat") not in _HOST_DETAIL]
        document = json.dumps({**fields, "traceEvents": part}, separators=(",", ":"))
        content = gzip.compress(document.encode(), mtime=0)
        size = len(content)
        if size <= most_bytes:
            return KeptTrace(content, shortened, None)
    if not size:
        return KeptTrace(None, None, "the trace has no whole step")
    return KeptTrace(
        None, None, f"a single step takes {size:,} bytes, compressed; no more than {most_bytes:,} are kept"
    )


def _wall_times(phases: Sequence[tuple[float, float, str]], steps: Sequence[float]) -> dict[str, list[float]]:
    times = {phase: [0.0] * (len(steps) - 1) for phase in PHASES}
    for index, (begin, end) in enumerate(pairwise(steps)):
        members = [(last - first, name) for first, last, name in phases if begin <= first < end]
        for duration, name in members:
            times[name][index] += duration
        times[OTHER][index] = max(0.0, end - begin - sum(duration for duration, _ in members))
    return times


def _device_times(
    work: Sequence[_Work], phases: Sequence[tuple[float, float, str]], steps: Sequence[float]
) -> dict[str, list[float]]:
    """Goes along the device's time: it belongs to the phase whose work runs, or to the host gap.

    A step lasts from its first work on the device to that of the next. Where works overlap, the one that began earlier
    has the time.
    """
    first = [
        min((item.start for item in work if begin <= item.launch < end), default=None)
        for begin, end in zip(steps, [*steps[1:], float("inf")], strict=True)
    ]
    begins = [start for start in first if start is not None]
    if len(begins) < len(first) or sorted(begins) != begins:
        missing = len(first) - len(begins)
        raise TraceError(
            f"in {missing} of {len(first)} steps the profiler saw nothing run on the device; it may lack the permission"
            " to (NVIDIA's driver can limit profiling to administrators), or another profiler is attached"
            if missing
            else "the steps do not follow one another on the device"
        )
    times = {phase: [0.0] * (len(steps) - 1) for phase in (_GAP, *PHASES)}
    starts = [start for start, _, _ in phases]
    cursor, earlier = begins[0], None
    for item in sorted(work, key=lambda item: (item.start, item.correlation)):
        if item.end <= begins[0] or item.start > begins[-1]:
            continue
        name = _phase_at(phases, starts, item.launch)
        if item.start > cursor:
            waits_for_host = item.launched > cursor and item.correlation != earlier
            _add(times[_GAP if waits_for_host else name], begins, cursor, item.start)
        _add(times[name], begins, max(cursor, item.start), item.end)
        if item.end > cursor:
            cursor, earlier = item.end, item.correlation
    return times


def _add(times: list[float], begins: Sequence[float], start: float, end: float) -> None:
    """Adds a stretch of time to the steps that it lies in."""
    for index in range(max(0, bisect_right(begins, start) - 1), len(times)):
        if begins[index] >= end:
            return
        times[index] += max(0.0, min(end, begins[index + 1]) - max(start, begins[index]))


def _phase_at(phases: Sequence[tuple[float, float, str]], starts: Sequence[float], time: float) -> str:
    place = bisect_right(starts, time) - 1
    return phases[place][2] if place >= 0 and time < phases[place][1] else OTHER


def _phase_starts(events: Iterable[Event]) -> list[tuple[float, float, str]]:
    """Beginning, end and name of the phases, in order."""
    names = {annotation(phase): phase for phase in PHASES}
    return sorted(
        (_time(event, "ts"), _time(event, "ts") + _time(event, "dur"), names[str(event["name"])])
        for event in _ranges(events)
        if event.get("name") in names
    )


def _work(events: Iterable[Event]) -> list[_Work]:
    """What the device did, with the launching calls that were seen."""
    calls = {
        _correlation(event): (_time(event, "ts"), _time(event, "ts") + _time(event, "dur"))
        for event in events
        if event.get("cat") in _LAUNCHES and _correlation(event) != _NO_CORRELATION
    }
    works = []
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            start, correlation = _time(event, "ts"), _correlation(event)
            launch, launched = calls.get(correlation, _UNSEEN)
            works.append(_Work(start, start + _time(event, "dur"), launch, launched, correlation))
    return works


def _between(events: Sequence[Event], begin: float, end: float) -> Iterator[Event]:
    """Names of threads, what the host did in a time, and what it launched then."""
    launched = {
        _correlation(event)
        for event in events
        if event.get("cat") in _LAUNCHES and begin <= _time(event, "ts") < end
    } - {_NO_CORRELATION}  # fmt: skip
    device = [
        (_time(event, "ts"), _time(event, "ts") + _time(event, "dur"))
        for event in events
        if event.get("cat") in _DEVICE_WORK and _correlation(event) in launched
    ]
    first, last = min((start for start, _ in device), default=0.0), max((stop for _, stop in device), default=0.0)
    for event in events:
        category = event.get("cat")
        if event.get("ph") == "M":
            is_kept = True
        elif category in _DEVICE_WORK:
            is_kept = _correlation(event) in launched
        elif category == "ac2g":
            is_kept = event.get("id") in launched
        elif category == "gpu_user_annotation":
            is_kept = first <= _time(event, "ts") < last
        else:
            is_kept = category not in (None, "Trace") and begin <= _time(event, "ts") < end
        if is_kept:
            yield event


def _events(trace: Mapping[str, object]) -> list[Event]:
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError("the trace has no events")
    return [event for event in events if isinstance(event, Mapping)]


def _ranges(events: Iterable[Event]) -> Iterator[Event]:
    """The ranges that the host marked."""
    return (event for event in events if event.get("cat") == "user_annotation" and event.get("ph") == "X")


def _time(event: Event, name: str) -> float:
    value = event.get(name, 0.0)
    if not isinstance(value, (int, float)):
        raise TraceError(f"{name} of an event is {value!r:.60}, and no time")
    return float(value)


def _correlation(event: Event) -> int:
    """What work on the device and the call that launched it have in common."""
    details = event.get("args")
    value = details.get("correlation") if isinstance(details, Mapping) else None
    return value if isinstance(value, int) else _NO_CORRELATION
