"""The executor that records a CUDA graph: what it copies, writes, draws, keeps and gives back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.in_order import InOrder
from kitsune.execution.lanes import lanes_for
from kitsune.execution.lower import lower
from kitsune.execution.stream_pool import StreamPool
from kitsune.graph import dataflow
from kitsune.memory.segments import pieces
from kitsune.plan import Schedule, task_graph
from tests.kitsune.execution.test_lower import any_schedule

pytestmark = pytest.mark.gpu

Function = Callable[..., list[Tensor]]


def record(function: Function, inputs: list[Tensor], *, copied: set[int], pool: GraphPool | None = None) -> CudaGraph:
    module = trace(function, inputs)
    mutated = dataflow.written_inputs(module.graph)
    pool = pool if pool is not None else GraphPool(StreamPool())
    return CudaGraph(InOrder(module), inputs, copied=copied, mutated=mutated, pool=pool)


def at_rest() -> tuple[int, int]:
    """Allocated and reserved bytes when nothing runs and nothing is cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def count_and_multiply(x: Tensor, total: Tensor) -> list[Tensor]:
    total.add_(1)
    return [x * total, x.sum()]


def pair() -> list[Tensor]:
    return [torch.arange(6.0, device="cuda").reshape(2, 3), torch.zeros((), device="cuda")]


def test_recording_runs_nothing_on_the_inputs() -> None:
    x, total = pair()
    graph = record(count_and_multiply, [x, total], copied={0})
    torch.cuda.synchronize()
    assert total.item() == 0
    graph([x, total])
    assert total.item() == 1


def test_each_replay_reads_its_own_arguments_and_the_stable_tensors_as_they_are() -> None:
    x, total = pair()
    graph = record(count_and_multiply, [x, total], copied={0})
    for count in range(1, 5):
        other = torch.randn(2, 3, device="cuda")
        product, summed = graph([other, total])
        torch.testing.assert_close(product, other * count)
        torch.testing.assert_close(summed, other.sum())
    total.fill_(10)
    product, _ = graph([x, total])
    torch.testing.assert_close(product, x * 11)


def test_outputs_are_the_same_tensors_at_every_replay() -> None:
    x, total = pair()
    graph = record(count_and_multiply, [x, total], copied={0})
    first = list(graph([x, total]))
    second = list(graph([x, total]))
    assert graph.keeps_outputs
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert [tensor.data_ptr() for tensor in graph.static_outputs()] == [tensor.data_ptr() for tensor in first]


def test_strided_arguments_keep_their_strides() -> None:
    x = torch.randn(3, 2, device="cuda").t()
    graph = record(lambda x: [x * 2, x.new_tensor(x.stride())], [x], copied={0})
    other = torch.randn(2, 3, device="cuda")
    doubled, strides = graph([other])
    torch.testing.assert_close(doubled, other * 2)
    assert strides.tolist() == list(x.stride())


def test_random_numbers_go_on_where_eager_left_off() -> None:
    x = torch.ones(1000, device="cuda")
    state = torch.cuda.get_rng_state()
    graph = record(lambda x: [torch.nn.functional.dropout(x, 0.5)], [x], copied=set())
    assert torch.equal(torch.cuda.get_rng_state(), state), "recording draws nothing"
    torch.manual_seed(3)
    masks = [graph([x])[0].clone() for _ in range(3)]
    eager = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(3)
    expected = [torch.nn.functional.dropout(x, 0.5) for _ in range(4)]
    assert not torch.equal(masks[0], masks[1])
    for found, wanted in zip([*masks, eager], expected, strict=True):
        assert torch.equal(found, wanted)


def test_it_runs_on_the_stream_of_its_caller() -> None:
    x, total = pair()
    graph = record(count_and_multiply, [x, total], copied={0})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    fresh = torch.zeros(2, 3, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        fresh.fill_(7)
        product, _ = graph([fresh, total])
        kept = product.clone()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(kept, torch.full((2, 3), 7.0, device="cuda"))


def test_graphs_of_one_pool_take_turns() -> None:
    pool = GraphPool(StreamPool())
    x, total = pair()
    first = record(lambda x, total: [(x + 1).relu() * 2], [x, total], copied={0}, pool=pool)
    second = record(lambda x, total: [(x - 1).sigmoid() + total], [x, total], copied={0}, pool=pool)
    for _ in range(3):
        torch.testing.assert_close(first([x, total])[0], (x + 1).relu() * 2)
        torch.testing.assert_close(second([x, total])[0], (x - 1).sigmoid())
    first.release()
    torch.testing.assert_close(second([x, total])[0], (x - 1).sigmoid())
    second.release()
    third = record(lambda x, total: [x * 3], [x, total], copied={0}, pool=pool)
    torch.testing.assert_close(third([x, total])[0], x * 3)


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_recording_that_fails_leaves_everything_as_it_was(rehearsed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator waits for the device, which a rehearsal forbids; without one, the recording fails at it."""
    if not rehearsed:
        monkeypatch.setattr("kitsune.execution.cuda_graph._rehearse", lambda run, inputs: run(inputs))
    x = torch.randn(8, device="cuda")
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.call_function(torch.ops.aten.nonzero.default, (node,))
    graph.output([graph.call_function(torch.ops.aten.bernoulli.p, (node, 0.5))])

    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    pool = GraphPool(StreamPool())
    record(count_and_multiply, pair(), copied={0}, pool=pool).release()
    before = at_rest()
    with pytest.raises(RuntimeError):
        CudaGraph(InOrder(fx.GraphModule({}, graph)), [x], copied={0}, mutated={}, pool=pool)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert at_rest() == before
    torch.randn(5, device="cuda")
    torch.cuda.synchronize()
    record(count_and_multiply, pair(), copied={0}, pool=pool)(pair())


def test_release_gives_the_memory_back() -> None:
    x = torch.randn(1024, 1024, device="cuda")

    def function(x: Tensor) -> list[Tensor]:
        return [(x @ x).relu(), x + 1]

    record(function, [x], copied={0}).release()
    before = at_rest()
    for _ in range(5):
        graph = record(function, [x], copied={0})
        graph([x])
        graph.release()
        del graph
    assert at_rest() == before


MIB = 2**20


def divided(x: Tensor) -> list[Tensor]:
    """What its first value leaves is divided for the second, and the third, as large as the first, fits nowhere."""
    total = x.new_full((16 * MIB,), 1).sum()
    second = x.new_full((10 * MIB,), 2)
    third = x.new_full((16 * MIB,), 4)
    return [total + second.sum() + third.sum()]


def test_large_values_lie_in_one_piece() -> None:
    x = torch.zeros((), device="cuda")
    module = trace(divided, [x])
    graph = task_graph(module.graph)
    schedule = Schedule("in order", tuple(range(len(graph.tasks))), (0,) * len(graph.tasks))
    lowered, in_one = lower(module, graph, schedule), pieces(graph, schedule)
    assert in_one == (104 * MIB,)
    for given, mib in ((), 128), (in_one, 104):
        pool = GraphPool(StreamPool())
        recorded = []
        for more in given, ():  # the second one uses the same memory
            run = InOrder(lowered.module)
            recorded.append(CudaGraph(run, [x], copied={0}, mutated={}, pool=pool, pieces=more))
            taken = pool.num_bytes()
            assert taken is not None
            assert mib * MIB <= taken <= (mib + 4) * MIB  # and what is small
            assert all(int(one([x])[0]) == (16 + 2 * 10 + 4 * 16) * MIB for one in recorded)


def test_each_stream_has_a_piece() -> None:
    """That of the second stream is taken before anything is issued there."""
    x = torch.zeros((), device="cuda")
    module = trace(lambda x: [divided(x)[0] + divided(x)[0]], [x])
    graph = task_graph(module.graph)
    streams = StreamPool()
    lowered = lower(module, graph, any_schedule(graph, 0, 2))
    assert lowered.num_streams == 2
    pool = GraphPool(streams)
    run = InOrder(lowered.module, lanes=lanes_for(2, streams, x.device))
    recorded = CudaGraph(run, [x], copied={0}, mutated={}, pool=pool, pieces=(300 * MIB, 300 * MIB))
    taken = pool.num_bytes()
    assert taken is not None
    assert 600 * MIB <= taken <= 604 * MIB
    for _ in range(20):
        assert int(recorded([x])[0]) == 2 * (16 + 2 * 10 + 4 * 16) * MIB
