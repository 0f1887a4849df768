"""Memory over a step, by invented and recorded events: against sums over all events, and what is kept of many."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.comparison import compare
from harness.memory_tables import memory_table, missing_timelines, sentence
from harness.memory_timeline import (
    MOST_POINTS,
    NOT_RECORDED,
    ON_THE_CPU,
    MemoryTimeline,
    RecordedStep,
    graph_split_bytes,
    idle_graph_bytes,
    memory_timeline,
)
from harness.store import Store
from tests.harness import sample

MIB = 2**20
EPOCH = 1_700_000_000_000_000

Event = dict[str, object]


def event(action: str, size: int, at: float) -> Event:
    """As torch tells it: with an address, a stream and a time since the epoch."""
    return {"action": action, "addr": 140_000_000, "size": size, "stream": 0, "time_us": EPOCH + at}


def timeline(
    events: Sequence[Event], end: float = 100.0, allocated: int = MIB, reserved: int = 2 * MIB
) -> MemoryTimeline:
    return memory_timeline(RecordedStep(events, EPOCH, EPOCH + end, allocated, reserved))


def test_a_step_that_allocates_nothing_is_one_point() -> None:
    assert timeline([]) == MemoryTimeline(100.0, ((0.0, MIB, 2 * MIB),))


def test_memory_is_taken_and_given_back_when_the_host_asks_for_it() -> None:
    found = timeline(
        [
            event("alloc", 1000, 5),
            event("segment_alloc", 2 * MIB, 10),
            event("alloc", 2 * MIB, 10),
            event("free_requested", 1000, 20),
            event("free_completed", 1000, 30),
            event("segment_map", MIB, 40),
            event("free_requested", 2 * MIB, 50),
            event("segment_free", 2 * MIB, 60),
            event("snapshot", 0, 70),
        ]
    )
    assert found.points == (
        (0.0, MIB, 2 * MIB),
        (5.0, MIB + 1024, 2 * MIB),  # in multiples of 512 bytes
        (10.0, 3 * MIB + 1024, 4 * MIB),
        (20.0, 3 * MIB, 4 * MIB),
        (40.0, 3 * MIB, 5 * MIB),
        (50.0, MIB, 5 * MIB),
        (60.0, MIB, 3 * MIB),
    )


def test_what_lies_in_a_graph_s_pool_counts_once() -> None:
    """The pool counts as a whole from the beginning; that more memory is reserved for it is told all the same."""
    events = [
        {**event("free_requested", 2048, 5), "addr": 5000},
        {**event("alloc", 1024, 6), "addr": 8999},
        {**event("segment_alloc", MIB, 7), "addr": 5000},
        {**event("alloc", 512, 8), "addr": 9000},
        {**event("alloc", 512, 9), "addr": 4999},
    ]
    step = RecordedStep(events, EPOCH, EPOCH + 100, MIB, 2 * MIB, graph_ranges=((100, 200), (5000, 9000)))
    assert memory_timeline(step).points == (
        (0.0, MIB, 2 * MIB),
        (7.0, MIB, 3 * MIB),
        (8.0, MIB + 512, 3 * MIB),
        (9.0, MIB + 1024, 3 * MIB),
    )


def test_clocks_that_differ_a_little_do_no_harm() -> None:
    found = timeline([event("alloc", 512, -3), event("alloc", 512, 130)], end=100)
    assert [time for time, _, _ in found.points] == [0.0, 130.0]
    assert found.points[0][1] == MIB + 512
    assert found.step_us == 130.0


@given(st.integers(0, 10**6), st.integers(1, 3000))
def test_of_many_points_the_highest_and_the_last_of_each_stretch_stay(seed: int, count: int) -> None:
    rng = random.Random(seed)
    events: list[Event] = []
    held: list[int] = []
    for index in range(count):
        if held and rng.random() < 0.5:
            events.append(event("free_requested", held.pop(rng.randrange(len(held))), index))
        else:
            held.append(512 * rng.randint(1, 5000))
            events.append(event("alloc", held[-1], index))
    found = timeline(events, end=count)
    sums = [MIB]
    for entry in events:
        size = entry["size"]
        assert isinstance(size, int)
        sums.append(sums[-1] + (size if entry["action"] == "alloc" else -size))
    assert len(found.points) <= MOST_POINTS
    assert max(allocated for _, allocated, _ in found.points) == max(sums[1:])
    assert found.points[-1][1] == sums[-1]
    times = [time for time, _, _ in found.points]
    assert times == sorted(set(times))
    if count <= MOST_POINTS:
        assert [allocated for _, allocated, _ in found.points] == sums[1:]


SEGMENTS = [
    {"segment_pool_id": (0, 0), "total_size": 20, "allocated_size": 5,
     "blocks": [{"size": 5, "state": "active_allocated"}, {"size": 15, "state": "inactive"}]},
    {"segment_pool_id": (0, 1), "total_size": 30, "allocated_size": 10,
     "blocks": [{"size": 10, "state": "active_allocated"}, {"size": 20, "state": "inactive"}]},
    {"segment_pool_id": [0, 1], "total_size": 40, "allocated_size": 0, "blocks": [{"size": 40, "state": "inactive"}]},
    {"segment_pool_id": (0, 1), "total_size": 8, "allocated_size": 0,
     "blocks": [{"size": 8, "state": "active_awaiting_free"}]},
]  # fmt: skip


def test_what_a_captured_graph_holds_is_in_use_and_no_fragment() -> None:
    assert idle_graph_bytes(SEGMENTS) == 20 + 40 + 8
    assert graph_split_bytes(SEGMENTS) == 20, "a whole block that is free is no split"


@pytest.mark.parametrize("odd", [{"action": "alloc"}, {"action": "alloc", "size": 5, "time_us": None}, {}])
def test_an_event_that_tells_nothing_is_passed_over(odd: Event) -> None:
    assert timeline([odd]).points == ((0.0, MIB, 2 * MIB),)


def with_profile(root: Path, device: str, *lacking: str, **changed: object) -> Store:
    """Results with one more profile, of a batch size of its own, without some fields and with others changed."""
    sample.write_gpu_history(root, rounds=1)
    case = sample.case_fields("mlp", 8, device)
    record = sample.profile_record("run-2", case, "eager_fp32", random.Random(0))
    kept = {name: value for name, value in record.items() if name not in lacking}
    timed = sample.round_record("run-2", 0, case, {"eager_fp32": [1e-3, 1e-3]})
    with (root / sample.GPU_MACHINE / f"{sample.COMMITS[2]}.samples.jsonl").open("a") as file:
        file.writelines(json.dumps({"schema": 1, **fields}) + "\n" for fields in (timed, {**kept, **changed}))
    return Store(root)


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([], "expected at least one point"),
        ([[0, 1]], "expected [us, allocated, reserved], got [0, 1]"),
        ([[0, 1, 2.5]], "expected [us, allocated, reserved]"),
        ([[0, -1, 2]], "out of order, or less than nothing"),
        ([[3, 1, 2], [2, 1, 2]], "out of order, or less than nothing"),
        ([[99, 1, 2]], "out of order, or less than nothing"),
    ],
)
def test_a_damaged_timeline_is_named(tmp_path: Path, points: object, problem: str) -> None:
    store = with_profile(tmp_path, "cuda", memory_timeline={"step_us": 9.0, "points": points})
    (damage,) = store.load(sample.GPU_MACHINE).damage
    assert problem in damage.problem


@pytest.mark.parametrize(("device", "reason"), [("cuda", NOT_RECORDED), ("cpu", ON_THE_CPU)])
def test_older_results_are_read_and_say_what_they_lack(tmp_path: Path, device: str, reason: str) -> None:
    lacking = ("memory_timeline", "memory_timeline_missing", "inactive_split_bytes")
    history = with_profile(tmp_path, device, *lacking).load(sample.GPU_MACHINE)
    assert history.damage == ()
    comparison = compare(history, folder=tmp_path)
    (row,) = [row for row in comparison.rows if row.case.batch == 8]
    assert row.inactive_split_bytes is None
    assert (row.fragmentation_bytes is None) == (device == "cpu")
    (missing,) = [missing for missing in missing_timelines(comparison) if missing.reason == reason]
    assert [case.name for case in missing.cases] == ["mlp-b8"]
    assert sentence(missing).endswith(f"available for 1 variant of mlp-b8 on {device}: {reason}.")
    table = memory_table(comparison)
    (cells,) = [cells for cells, about in zip(table.rows, table.subjects, strict=True) if about.case.batch == 8]
    assert [cell.text for cell in cells[5:9]].count("not available") == (1 if device == "cuda" else 4)
