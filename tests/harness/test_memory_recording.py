"""Recording the allocations of a step: where that is impossible, and on a GPU."""

import pytest
import torch

from harness import memory, memory_recording
from harness.memory_recording import recorded_step
from harness.memory_timeline import ON_THE_CPU, RecordedStep, memory_timeline

CUDA = torch.device("cuda")
_MIB = 2**20
GRAPH = {"segment_pool_id": (0, 1), "address": 1000, "total_size": 24}


def no_step() -> None:
    raise AssertionError("no step is taken")


def test_on_the_cpu_there_is_nothing_to_record() -> None:
    assert recorded_step(no_step, torch.device("cpu")) == ON_THE_CPU


class Recorder:
    """In place of torch's functions; tells these events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: list[dict[str, object]]) -> None:
        self.calls: list[object] = []
        self.events = events
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(memory, "in_use", lambda device: (1, 2))
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [GRAPH, {"segment_pool_id": (0, 0)}])
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"device_traces": [[], self.events]})

    def record(self, enabled: str | None, **options: object) -> None:
        self.calls.append(enabled)


def test_recording_ends_whatever_the_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, [{"action": "alloc"}])
    found = recorded_step(lambda: recorder.calls.append("step"), CUDA)
    assert isinstance(found, RecordedStep)
    assert (found.events, found.allocated_bytes, found.reserved_bytes) == (recorder.events, 1, 2)
    assert found.graph_ranges == ((1000, 1024),)
    assert found.begin_us <= found.end_us
    assert recorder.calls == ["all", "step", None]

    def out_of_memory() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    told = recorded_step(out_of_memory, CUDA)
    assert isinstance(told, str)
    assert told.startswith(f"a step could not be recorded with torch {torch.__version__}: ")
    assert told.endswith("CUDA out of memory. Tried to allocate 2 GiB")
    assert recorder.calls[3:] == ["all", None]


def refused(*arguments: object, **options: object) -> None:
    raise TypeError("unexpected keyword")


def refused_at_the_end(enabled: str | None, **options: object) -> None:
    if enabled is None:
        raise RuntimeError("cannot stop")


@pytest.mark.parametrize(
    ("name", "other", "problem"),
    [
        ("_record_memory_history", refused, "TypeError: unexpected keyword"),
        ("_record_memory_history", refused_at_the_end, "RuntimeError: cannot stop"),
        ("_snapshot", refused, "TypeError: unexpected keyword"),
        ("_snapshot", lambda device: {}, "KeyError: 'device_traces'"),
        ("_snapshot", lambda device: {"device_traces": []}, "IndexError: list index out of range"),
        ("_snapshot", None, "TypeError: 'NoneType' object is not callable"),
    ],
)
def test_a_torch_with_other_private_functions_costs_the_timeline_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, other: object, problem: str
) -> None:
    Recorder(monkeypatch, [])
    monkeypatch.setattr(torch.cuda.memory, name, other)
    told = recorded_step(lambda: None, CUDA)
    assert told == f"a step could not be recorded with torch {torch.__version__}: {problem}"


def test_a_step_of_too_many_allocations_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_recording, "_MOST_EVENTS", 2)
    Recorder(monkeypatch, [{}, {}])
    assert "2 allocations or more" in str(recorded_step(lambda: None, CUDA))


@pytest.mark.gpu
def test_a_step_s_memory_is_recorded() -> None:
    held = torch.ones(8 * _MIB, device=CUDA)
    torch.cuda.synchronize()
    memory.reset_peak(CUDA)

    def step() -> None:
        first = torch.empty(16 * _MIB, dtype=torch.uint8, device=CUDA)
        second = torch.empty(64 * _MIB, dtype=torch.uint8, device=CUDA)
        del second
        first.zero_()

    before = memory.in_use(CUDA)
    recorded = recorded_step(step, CUDA)
    assert isinstance(recorded, RecordedStep)
    timeline = memory_timeline(recorded)
    allocated = [size for _, size, _ in timeline.points]
    assert allocated[0] == before[0]
    assert max(allocated) == allocated[0] + 80 * _MIB
    assert allocated[-1] == memory.in_use(CUDA)[0]
    assert timeline.points[-1][2] == memory.in_use(CUDA)[1]
    assert max(allocated) == memory.peak(CUDA).allocated_bytes
    assert [time for time, _, _ in timeline.points] == sorted(time for time, _, _ in timeline.points)
    assert 0 < timeline.step_us < 60e6
    del held


@pytest.mark.gpu
def test_what_is_given_back_to_a_graph_s_pool_stays_in_use() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(4 * _MIB, device=CUDA)
    results = []
    with torch.cuda.graph(graph):
        results.append((x + 1).exp())
    recorded = recorded_step(results.clear, CUDA)
    assert isinstance(recorded, RecordedStep)
    allocated = [size for _, size, _ in memory_timeline(recorded).points]
    assert set(allocated) == {memory.in_use(CUDA)[0]}
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_pieces_of_blocks_are_fragmentation_and_graphs_are_not() -> None:
    torch.cuda.empty_cache()
    memory.reset_peak(CUDA)
    pieces = [torch.empty(4 * _MIB, dtype=torch.uint8, device=CUDA) for _ in range(5)]  # of one block of 20 MiB
    del pieces[1::2]
    peak = memory.peak(CUDA)
    assert peak.inactive_split_bytes is not None
    assert peak.inactive_split_bytes >= 8 * _MIB
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(4 * _MIB, device=CUDA)
    with torch.cuda.graph(graph):
        y = (x + 1).exp().sum()
    memory.reset_peak(CUDA)
    graph.replay()
    torch.cuda.synchronize()
    after = memory.peak(CUDA)
    assert after.inactive_split_bytes is not None
    assert after.inactive_split_bytes < 16 * _MIB + peak.inactive_split_bytes
    del y
