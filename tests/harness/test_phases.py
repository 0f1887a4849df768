"""Phases by a trace: against a slow count of every microsecond, and what is kept of traces."""

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.phases import OTHER, STEP, WHOLE, TraceError, annotation, kept_trace, phase_times

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
Event = dict[str, object]
Work = tuple[int, int, int, int, int]
"""Start, end, when its launch was called and when that returned, and the number of the launch."""


def mark(name: str, start: float, duration: float) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1}


def step(start: float, phases: Iterable[tuple[str, float, float]], duration: float = 90) -> list[Event]:
    return [mark(STEP, start, duration), *(mark(annotation(name), start + at, long) for name, at, long in phases)]


def ran(works: Iterable[Work]) -> list[Event]:
    """Works on the device, and the calls that launched them, each once."""
    works = list(works)
    calls = {number: (call, end) for _, _, call, end, number in works}
    launches: list[Event] = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": call, "dur": end - call,
         "args": {"correlation": number}}
        for number, (call, end) in calls.items()
    ]  # fmt: skip
    kernels: list[Event] = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": start, "dur": end - start, "pid": 0, "tid": 7,
         "args": {"correlation": number, "stream": 7}}
        for start, end, _, _, number in works
    ]  # fmt: skip
    return launches + kernels


def trace(*events: Sequence[Event]) -> dict[str, object]:
    return {"schemaVersion": 1, "host_name": "secret", "traceEvents": [event for group in events for event in group]}


def us(times: Sequence[float] | None) -> list[float] | None:
    return None if times is None else [pytest.approx(1e6 * time, abs=1e-6) for time in times]


LOOP = ((FORWARD, 0, 20), (BACKWARD, 20, 30), (OPTIMIZER, 60, 20))


def test_on_a_cpu_phases_are_the_host_s_and_the_rest_is_the_loop() -> None:
    times = phase_times(trace(*(step(100 * index, LOOP) for index in range(4))), "wall", skip=1)
    assert {name: us(values) for name, values in times.phases_s.items()} == {
        FORWARD: [20, 20], BACKWARD: [30, 30], OPTIMIZER: [20, 20], OTHER: [30, 30],
    }  # fmt: skip
    assert list(times.phases_s) == [FORWARD, BACKWARD, OPTIMIZER, OTHER]
    assert times.host_gap_s is None


def test_on_a_gpu_work_belongs_to_the_phase_that_launched_it_and_idle_time_to_who_is_late() -> None:
    """Each step: forward runs 10 µs at once, its second work waits 5 µs though launched in time; then the host is late
    by 15 µs for backward, and by 40 µs for the next step."""
    works: list[Work] = []
    for index in range(3):
        begin = 100 * index
        works += [
            (begin + 5, begin + 15, begin + 1, begin + 3, 10 * index),
            (begin + 20, begin + 30, begin + 4, begin + 6, 10 * index + 1),
            (begin + 45, begin + 65, begin + 40, begin + 43, 10 * index + 2),
        ]
    found = phase_times(trace(*(step(100 * index, LOOP) for index in range(3)), ran(works)), "device")
    assert {name: us(values) for name, values in found.phases_s.items()} == {
        FORWARD: [25, 25], BACKWARD: [20, 20], OPTIMIZER: [0, 0],
    }  # fmt: skip
    assert us(found.host_gap_s) == [55, 55]


def test_what_one_launch_began_never_waits_for_the_host() -> None:
    """The parts of a captured graph, the first of which ends while the launching call has not returned."""
    works: list[Work] = []
    for index in range(3):
        begin = 100 * index
        works += [(begin + first, begin + last, begin + 5, begin + 60, index) for first, last in ((10, 20), (30, 90))]
    found = phase_times(trace(*(step(100 * index, [(WHOLE, 0, 95)]) for index in range(3)), ran(works)), "device")
    assert us(found.phases_s[WHOLE]) == [80, 80]
    assert us(found.host_gap_s) == [20, 20]


def test_work_that_runs_on_into_the_first_step_that_counts_is_part_of_it() -> None:
    """On another stream, from before that step's first work until after it."""
    works: list[Work] = []
    for index in range(3):
        begin = 100 * index
        works += [
            (begin + 10, begin + 20, begin + 1, begin + 3, 10 * index),
            (begin + 90, begin + 150, begin + 65, begin + 67, 10 * index + 1),
        ]
    found = phase_times(trace(*(step(100 * index, LOOP) for index in range(3)), ran(works)), "device", skip=1)
    assert us(found.phases_s[OPTIMIZER]) == [60]
    assert us(found.host_gap_s) == [40]


def test_work_whose_launch_was_not_seen_is_no_gap() -> None:
    works: list[Work] = []
    for index in range(3):
        begin = 100 * index
        works += [
            (begin + 10, begin + 20, begin + 1, begin + 3, 10 * index),
            (begin + 20, begin + 50, begin + 4, begin + 6, 10 * index + 1),
            (begin + 60, begin + 70, begin + 25, begin + 55, 10 * index + 2),
        ]
    unseen = [work[4] for work in works if work[4] % 10 == 1]
    kept: list[Event] = [
        event
        for event in ran(works)
        if event["cat"] == "kernel" or event["args"]["correlation"] not in unseen  # type: ignore[index]
    ]
    bare: list[Event] = [{"ph": "X", "cat": "gpu_memset", "ts": 55, "dur": 2}]
    events = trace(*(step(100 * index, LOOP) for index in range(3)), kept, bare)
    found = phase_times(events, "device")
    assert us(found.phases_s[FORWARD]) == [10, 10]
    assert us(found.phases_s[BACKWARD]) == [13, 10]
    assert us(found.phases_s[OTHER]) == [37, 30]
    assert us(found.host_gap_s) == [40, 50]


def slowly(works: Sequence[Work], steps: Sequence[int], skip: int) -> list[dict[str, int]]:
    """Every microsecond of the steps from ``skip`` on by itself. Phases as in ``LOOP``: those of the launches."""

    def phase(call: int) -> str:
        since = call - max(start for start in steps if start <= call)
        return next((name for name, at, long in LOOP if at <= since < at + long), OTHER)

    first = [min(work[0] for work in works if low <= work[2] < high) for low, high in pairwise([*steps, 10**9])]
    counted = []
    for begin, end in pairwise(first[skip:]):
        count: dict[str, int] = {}
        for tick in range(begin, end):
            running = [work for work in works if work[0] <= tick < work[1]]
            if running:
                owner = phase(min(running, key=lambda work: (work[0], work[4]))[2])
            else:
                done = max((w for w in works if w[0] <= tick), key=lambda w: (w[1], -w[0], -w[4]))
                following = min((w for w in works if w[0] > tick), key=lambda w: (w[0], w[4]))
                late = following[3] > done[1] and following[4] != done[4]
                owner = "gap" if late else phase(following[2])
            count[owner] = count.get(owner, 0) + 1
        counted.append(count)
    return counted


@given(st.integers(0, 10**6), st.integers(0, 2))
def test_every_microsecond_is_somebody_s(seed: int, skip: int) -> None:
    rng = random.Random(seed)
    works: list[Work] = []
    number, steps, device = 0, [100 * index for index in range(4)], 0
    for begin in steps:
        call = begin
        while call < begin + 80:
            returned = call + rng.randint(1, 5)
            for _ in range(rng.choice((1, 1, 1, 3))):
                start = max(call + 1, device + rng.randint(-6, 8))
                works.append((start, start + rng.randint(1, 25), call, returned, number))
                device = works[-1][1]
            number, call = number + 1, returned + rng.randint(0, 30)
    firsts = [min(work[0] for work in works if begin <= work[2] < begin + 100) for begin in steps]
    if sorted(firsts) != firsts:
        return
    expected = slowly(works, steps, skip)
    found = phase_times(trace(*(step(begin, LOOP) for begin in steps), ran(works)), "device", skip)
    for index, count in enumerate(expected):
        times = {name: values[index] for name, values in found.phases_s.items()}
        assert found.host_gap_s is not None
        assert found.host_gap_s[index] == pytest.approx(1e-6 * count.pop("gap", 0), abs=1e-12)
        assert {name: round(1e6 * time) for name, time in times.items() if time} == count


def test_a_trace_without_the_device_s_work_is_refused() -> None:
    steps = [step(100 * index, LOOP) for index in range(3)]
    with pytest.raises(TraceError, match=r"in 3 of 3 steps the profiler saw nothing run on the device.*permission"):
        phase_times(trace(*steps), "device")
    with pytest.raises(TraceError, match="the trace has 1 steps after the first 2"):
        phase_times(trace(*steps), "wall", skip=2)
    with pytest.raises(TraceError, match="no events"):
        phase_times({}, "wall")


def test_ranges_of_others_are_no_phases() -> None:
    theirs = [mark("harness: phase sleeping", 5, 5), mark("Optimizer.step#Adam.step", 60, 10), {"ph": "i", "name": "x"}]
    times = phase_times(trace(step(0, LOOP), step(100, LOOP), theirs), "wall")
    assert set(times.phases_s) == {FORWARD, BACKWARD, OPTIMIZER, OTHER}


def operators(start: float, number: int) -> list[Event]:
    rng = random.Random(start)
    return [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::{rng.random()}", "ts": start + index / number, "dur": 1.0}
        for index in range(number)
    ]


def kept(content: bytes | None) -> dict[str, list[Event]]:
    assert content is not None
    document: dict[str, list[Event]] = json.loads(gzip.decompress(content))
    return document


def test_of_a_trace_the_last_steps_are_kept_with_what_they_launched() -> None:
    works = [(100 * index + 95, 100 * index + 130, 100 * index + 10, 100 * index + 12, index) for index in range(5)]
    flows: list[Event] = [{"ph": "s", "cat": "ac2g", "id": index, "ts": 100 * index + 10} for index in range(5)]
    names: list[Event] = [{"ph": "M", "name": "thread_name", "ts": 0, "args": {"name": "python"}}]
    spans: list[Event] = [{"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 210, "dur": 900}]
    found = kept_trace(trace(names, spans, *(step(100 * index, LOOP) for index in range(5)), ran(works), flows))
    assert (found.shortened, found.missing) == (None, None)
    document = kept(found.content)
    assert set(document) == {"schemaVersion", "traceEvents"}, "nothing of the machine"
    events = document["traceEvents"]
    assert [event["ts"] for event in events if event.get("name") == STEP] == [200, 300]
    assert [event["ts"] for event in events if event.get("cat") == "kernel"] == [295, 395]
    assert [event["id"] for event in events if event.get("cat") == "ac2g"] == [2, 3]
    assert [event["name"] for event in events if event["ph"] == "M"] == ["thread_name"]
    assert "PyTorch Profiler (0)" not in {event["name"] for event in events if "name" in event}


def test_a_large_trace_is_kept_in_part_or_with_the_reason_not_at_all() -> None:
    whole = trace(
        *(step(100 * index, LOOP) for index in range(4)), *(operators(100 * index, 300) for index in range(4))
    )
    two, one, bare = (kept_trace(whole, most) for most in (2**20, 5_000, 1_000))
    assert [part.shortened for part in (two, one, bare)] == [
        None, "one step only", "one step only, without the host's operators",
    ]  # fmt: skip
    counts = [sum(event["name"] == STEP for event in kept(part.content)["traceEvents"]) for part in (two, one, bare)]
    assert counts == [2, 1, 1]
    assert any(event["cat"] == "cpu_op" for event in kept(one.content)["traceEvents"])
    assert not any(event["cat"] == "cpu_op" for event in kept(bare.content)["traceEvents"])
    nothing = kept_trace(whole, 10)
    assert (nothing.content, nothing.shortened) == (None, None)
    assert nothing.missing is not None
    assert "no more than 10 are kept" in nothing.missing
    assert kept_trace(trace(step(0, LOOP))).missing == "the trace has no whole step"
