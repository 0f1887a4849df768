"""Plans on live CUDA streams, and recorded from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.in_order import InOrder
from kitsune.execution.lanes import lanes_for
from kitsune.execution.lower import Lowered, lower
from kitsune.execution.on_streams import OnStreams
from kitsune.execution.stream_pool import MAX_STREAMS, StreamPool
from kitsune.plan import task_graph
from tests.kitsune.execution.test_lower import any_schedule

CUDA = torch.device("cuda", 0)
SIDE = 256


def function(x: Tensor, y: Tensor) -> list[Tensor]:
    """Integers in floating point: exact in any order."""
    left, right = x, y
    for _ in range(6):
        left, right = (left @ y) % 7, (right @ x) % 5
        left, right = left + right.t(), right - left.t()
    return [left, right, (left * right).sum()]


def values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 5, (SIDE, SIDE), generator=generator).float().to(CUDA) for _ in range(2)]


def lowered(module: fx.GraphModule, seed: int, num_streams: int) -> Lowered:
    graph = task_graph(module.graph)
    return lower(module, graph, any_schedule(graph, seed, num_streams))


@pytest.mark.gpu
@pytest.mark.parametrize("num_streams", [1, 2, 4, MAX_STREAMS])
@pytest.mark.parametrize("seed", range(5))
def test_any_legal_schedule_gives_the_same(seed: int, num_streams: int) -> None:
    module = trace(function, values())
    expected = InOrder(module)(values())
    run = OnStreams(lowered(module, seed, num_streams), StreamPool(), CUDA)
    for _ in range(50):
        for one, other in zip(run(values()), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_recorded_it_gives_the_same(seed: int) -> None:
    module = trace(function, values())
    expected = InOrder(module)(values())
    planned, pool = lowered(module, seed, 4), StreamPool()
    run = InOrder(planned.module, lanes=lanes_for(planned.num_streams, pool, CUDA))
    graph = CudaGraph(run, values(), copied={0, 1}, mutated={}, pool=GraphPool(pool))
    for _ in range(50):
        for one, other in zip(graph(values()), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_recording_that_fails_on_a_side_stream_can_be_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitsune.execution.cuda_graph._rehearse", lambda run, inputs: run(inputs))
    graph = fx.Graph()
    lanes, x = graph.placeholder("lanes"), graph.placeholder("x")
    graph.call_method("to", (lanes, 1))
    graph.call_method("begin", (lanes,))
    graph.call_function(torch.ops.aten.nonzero.default, (x,))
    graph.call_method("to", (lanes, 0))
    graph.call_method("join", (lanes,))
    graph.output([graph.call_function(torch.ops.aten.relu.default, (x,))])
    streams = StreamPool()
    pool = GraphPool(streams)
    inputs, current = values()[:1], torch.cuda.current_stream()
    run = InOrder(fx.GraphModule({}, graph), lanes=lanes_for(2, streams, CUDA))
    with pytest.raises(RuntimeError):
        CudaGraph(run, inputs, copied={0}, mutated={}, pool=pool)
    assert torch.cuda.current_stream() == current
    torch.cuda.synchronize()
    module = trace(function, values())
    CudaGraph(InOrder(module), values(), copied={0, 1}, mutated={}, pool=pool)(values())


class Stream:
    """Notes what it is told."""

    def __init__(self, name: str, log: list[tuple[str, str, str]]) -> None:
        self.name, self._log = name, log

    def record_event(self) -> str:
        self._log.append((self.name, "record", ""))
        return f"{self.name}{len(self._log)}"

    def wait_event(self, event: str) -> None:
        self._log.append((self.name, "wait", event))

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.name, "wait for", other.name))


def test_lanes_leave_the_first_stream_current_where_an_operator_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str, str]] = []
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    pool = StreamPool()
    pool._streams[CUDA] = [Stream("a", log), Stream("b", log)]  # type: ignore[list-item]

    def fail(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    graph = fx.Graph()
    lanes, x = graph.placeholder("lanes"), graph.placeholder("x")
    graph.call_method("to", (lanes, 1))
    graph.call_method("begin", (lanes,))
    graph.output([graph.call_function(fail, (x,))])
    with pytest.raises(torch.OutOfMemoryError):
        InOrder(fx.GraphModule({}, graph), lanes=lanes_for(2, pool, CUDA))([torch.zeros(2)])
    assert [stream.name for stream in current] == ["b", "a"]
    assert log == [("a", "record", ""), ("b", "wait", "a1")]
