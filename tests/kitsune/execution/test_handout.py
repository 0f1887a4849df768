"""Results that belong to the caller: on a GPU, and with a kernel in plain Python elsewhere."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from kitsune.execution import handout as module
from kitsune.execution.handout import (
    MOST_BYTES,
    PLACES,
    ROW_BYTES,
    Handout,
    _Copies,
    _pitch,
    _Rows,
    handout,
    is_small,
)
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter

CPU = torch.device("cpu")


class Graph:
    """A captured graph whose first results are their values plus the number of its replay."""

    def __init__(self, handout: Handout, values: Sequence[torch.Tensor]) -> None:
        self.values, self.launches = values, list[object]()
        handout.prepare(values)
        self.give = handout.record(values)

    def replay(self) -> None:
        for value in self.values:
            value += 1
        for launch in self.launches:
            launch()  # type: ignore[operator]

    def __call__(self) -> list[torch.Tensor]:
        return self.give(self.replay)


@pytest.fixture
def _recording_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are recorded only, on the CPU: graphs have to run the kernel at the end of a replay."""
    kernel = ModuleType("hand_out_triton")
    kernel.hand_out = lambda value, cell, pitch: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kitsune.kernels.hand_out_triton", kernel)


@pytest.fixture
def row(_recording_only: None) -> _Rows:
    """Of one result."""
    return _Rows(CPU, 1)


def _hand_out(value: torch.Tensor, cell: torch.Tensor) -> None:
    """The kernel's reference."""
    ctypes.memmove(int(cell), value.data_ptr(), value.nbytes)
    cell += _pitch(value) * value.element_size()


def recorded(rows: _Rows, *values: torch.Tensor) -> Graph:
    graph = Graph(rows, values)
    for value, cell in zip(values, rows._cells, strict=True):
        graph.launches.append(lambda value=value, cell=cell: _hand_out(value, cell))
    return graph


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_each_replay_gives_a_tensor_that_later_ones_leave(
    row: _Rows, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    graph = recorded(row, torch.zeros(shape, dtype=dtype))
    given = [one for _ in range(2 * PLACES + 3) for one in graph()]
    assert all(one.shape == shape and one.dtype == dtype for one in given)
    expected = torch.arange(1, len(given) + 1).to(dtype)
    assert torch.equal(torch.cat([one.reshape(1) for one in given]), expected)
    assert len({one.data_ptr() for one in given}) == len(given)


def test_what_is_given_is_no_view_of_another(row: _Rows) -> None:
    graph = recorded(row, torch.zeros(()))
    (one,), (other,) = graph(), graph()
    version = other._version
    one.mul_(5)
    assert one._base is None
    assert other._version == version
    assert other == 2


def test_an_interrupted_replay_shifts_nothing(row: _Rows) -> None:
    graph = recorded(row, torch.zeros(()))
    graph()
    launch = graph.launches[0]

    def interrupt() -> None:
        raise KeyboardInterrupt

    for launches in ([interrupt, launch], [launch, interrupt]):  # before and after the device has written
        graph.launches = launches
        with pytest.raises(KeyboardInterrupt):
            graph()
        graph.launches = [launch]
        assert graph() == list(graph.values)
        assert graph() == list(graph.values)


def test_graphs_share_a_row(row: _Rows) -> None:
    first, second = recorded(row, torch.zeros(())), recorded(row, torch.full((), 100.0))
    given = [graph()[0] for graph in (first, second, second, first)]
    assert [one.item() for one in given] == [1, 101, 102, 2]
    later = recorded(row, torch.full((), 200.0))
    assert [graph()[0].item() for graph in (first, later, second)] == [3, 201, 103]
    assert [one.item() for one in given] == [1, 101, 102, 2]


def test_another_stream_gets_another_row(row: _Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = recorded(row, torch.zeros(()))
    (first,) = graph()
    monkeypatch.setattr(row, "_current_stream", lambda: 1)
    (second,), (third,) = graph(), graph()
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert [one.item() for one in (first, second, third)] == [1, 2, 3]


@pytest.mark.usefixtures("_recording_only")
def test_several_results_have_a_row_each() -> None:
    """Of their own types and layouts, aligned as kernels may rely on."""
    rows = _Rows(CPU, 3)
    images = torch.zeros(3, 5, 2, 2, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    graph = recorded(rows, torch.zeros(()), torch.zeros(7, 3).t(), images)
    given = [graph() for _ in range(PLACES + 2)]
    for number, results in enumerate(given, 1):
        for result, value in zip(results, graph.values, strict=True):
            assert (result.dtype, result.shape, result.stride()) == (value.dtype, value.shape, value.stride())
            assert torch.equal(result, torch.full_like(value, number))
            assert result.data_ptr() % 16 == 0


@pytest.mark.usefixtures("_recording_only")
def test_rows_of_larger_results_are_no_larger() -> None:
    """Who keeps one result keeps the memory of a row."""
    rows = _Rows(CPU, 2)
    graph = recorded(rows, torch.zeros(()), torch.zeros(MOST_BYTES // 4))
    given = [graph() for _ in range(2 * ROW_BYTES // MOST_BYTES + 1)]
    for number, results in enumerate(given, 1):
        for result in results:
            assert torch.equal(result, torch.full_like(result, number))
            assert result.untyped_storage().nbytes() <= ROW_BYTES


def test_what_is_small() -> None:
    assert is_small(torch.zeros(()))
    assert is_small(torch.zeros(MOST_BYTES // 4))
    assert not is_small(torch.zeros(MOST_BYTES // 4 + 1))
    assert not is_small(torch.zeros(0))
    assert not is_small(torch.zeros(3, 8)[:, :5])
    assert not is_small(torch.zeros(3, dtype=torch.complex64))


def test_without_triton_results_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "refuse_triton", lambda device, purpose: "no")
    copies = handout(CPU)
    assert isinstance(copies, _Copies)
    graph = Graph(copies, [torch.zeros(())])
    (one,), (other,) = graph(), graph()
    assert (one.item(), other.item()) == (1, 2)


@pytest.mark.parametrize("size", [6, 1024, 1025, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernel_fills_one_place_after_the_other(
    device: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        hand_out = interpreted("hand_out_triton").hand_out
        patch_interpreter(monkeypatch)
    else:
        from kitsune.kernels.hand_out_triton import hand_out
    pitch = size + 2
    row = torch.zeros(12, pitch, dtype=dtype, device=device)
    cell = torch.tensor(row.data_ptr(), device=device)
    expected = torch.zeros_like(row)
    for number in range(10):
        value = torch.randn(size // 2, 2, device=device).to(dtype)
        hand_out(value, cell, pitch)
        expected[number, : value.numel()] = value.flatten()
    assert torch.equal(row, expected)
    assert int(cell) == row.data_ptr() + 10 * pitch * row.element_size()


@pytest.mark.gpu
def test_results_of_replayed_graphs_belong_to_the_caller() -> None:
    from kitsune.execution.cuda_graph import CudaGraph
    from kitsune.execution.graph_pool import GraphPool
    from kitsune.execution.in_order import InOrder
    from kitsune.execution.stream_pool import StreamPool

    x = torch.ones(3, device="cuda")
    graph = torch.fx.symbolic_trace(lambda x: (x.sum(), x * 3, x * 5))
    given = handout(x.device, 2)
    one, other = (
        CudaGraph(InOrder(graph), [x], copied={0}, mutated={}, pool=GraphPool(StreamPool()), handout=given)
        for _ in range(2)
    )
    numbers = torch.arange(300.0, device="cuda")
    results = [(one, other)[index % 2]([number.expand(3)]) for index, number in enumerate(numbers)]
    assert torch.equal(torch.stack([sums for sums, _, _ in results]), 3 * numbers)
    assert torch.equal(torch.stack([triples for _, triples, _ in results]), 3 * numbers[:, None].expand(-1, 3))
    assert torch.equal(results[-1][2], torch.full((3,), 5 * 299.0, device="cuda"))
