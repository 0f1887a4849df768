"""Results that belong to the caller: on a GPU, and with a kernel in plain Python elsewhere."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

import pytest
import torch

from kitsune.execution import handout as module
from kitsune.execution.handout import PLACES, Handout, _Copy, _Row, handout
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter

CPU = torch.device("cpu")


class Graph:
    """A captured graph whose result is the number of its replay."""

    def __init__(self, handout: Handout, value: torch.Tensor) -> None:
        self.value, self.launches = value, list[object]()
        handout.prepare(value)
        self.give = handout.record(value)

    def replay(self) -> None:
        self.value += 1
        for launch in self.launches:
            launch()  # type: ignore[operator]

    def __call__(self) -> torch.Tensor:
        return self.give(self.replay)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> _Row:
    """One on the CPU, where launches are recorded only: graphs have to run the kernel at the end of a replay."""
    kernel = ModuleType("hand_out_triton")
    kernel.hand_out = lambda value, cell: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kitsune.kernels.hand_out_triton", kernel)
    return _Row(CPU)


def _hand_out(value: torch.Tensor, cell: torch.Tensor) -> None:
    """The kernel's reference."""
    ctypes.memmove(int(cell), value.data_ptr(), value.element_size())
    cell += value.element_size()


def recorded(row: _Row, value: torch.Tensor) -> Graph:
    graph = Graph(row, value)
    graph.launches.append(lambda: _hand_out(value, row._cell))
    return graph


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_each_replay_gives_a_tensor_that_later_ones_leave(
    row: _Row, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    graph = recorded(row, torch.zeros(shape, dtype=dtype))
    given = [graph() for _ in range(2 * PLACES + 3)]
    assert all(one.shape == shape and one.dtype == dtype for one in given)
    expected = torch.arange(1, len(given) + 1).to(dtype)
    assert torch.equal(torch.cat([one.reshape(1) for one in given]), expected)
    assert len({one.data_ptr() for one in given}) == len(given)


def test_what_is_given_is_no_view_of_another(row: _Row) -> None:
    graph = recorded(row, torch.zeros(()))
    one, other = graph(), graph()
    version = other._version
    one.mul_(5)
    assert one._base is None
    assert other._version == version
    assert other == 2


def test_an_interrupted_replay_shifts_nothing(row: _Row) -> None:
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
        assert graph() == graph.value
        assert graph() == graph.value


def test_graphs_share_a_row(row: _Row) -> None:
    first, second = recorded(row, torch.zeros(())), recorded(row, torch.full((), 100.0))
    given = [graph() for graph in (first, second, second, first)]
    assert [one.item() for one in given] == [1, 101, 102, 2]
    later = recorded(row, torch.full((), 200.0))
    assert [graph().item() for graph in (first, later, second)] == [3, 201, 103]
    assert [one.item() for one in given] == [1, 101, 102, 2]


def test_another_stream_gets_another_row(row: _Row, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = recorded(row, torch.zeros(()))
    first = graph()
    monkeypatch.setattr(row, "_current_stream", lambda: 1)
    second, third = graph(), graph()
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert [one.item() for one in (first, second, third)] == [1, 2, 3]


def test_without_triton_results_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "refuse_triton", lambda device, purpose: "no")
    copies = handout(CPU)
    assert isinstance(copies, _Copy)
    graph = Graph(copies, torch.zeros(()))
    one, other = graph(), graph()
    assert (one.item(), other.item()) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernel_fills_one_place_after_the_other(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        hand_out = interpreted("hand_out_triton").hand_out
        patch_interpreter(monkeypatch)
    else:
        from kitsune.kernels.hand_out_triton import hand_out
    row = torch.zeros(3, dtype=dtype, device=device)
    cell = torch.tensor(row.data_ptr(), device=device)
    for number in (5.0, 7.0):
        hand_out(torch.full((), number, dtype=dtype, device=device), cell)
    assert row.tolist() == [5, 7, 0]
    assert int(cell) == row.data_ptr() + 2 * row.element_size()


@pytest.mark.gpu
def test_losses_of_replayed_graphs_belong_to_the_caller() -> None:
    from kitsune.execution.cuda_graph import CudaGraph
    from kitsune.execution.graph_pool import GraphPool
    from kitsune.execution.in_order import InOrder
    from kitsune.execution.stream_pool import StreamPool

    x = torch.ones((), device="cuda")
    graph = torch.fx.symbolic_trace(lambda x: (x * 3,))
    given = handout(x.device)
    one, other = (
        CudaGraph(InOrder(graph), [x], copied={0}, mutated={}, pool=GraphPool(StreamPool()), handout=given)
        for _ in range(2)
    )
    results = [(one, other)[index % 2]([torch.full((), float(index), device="cuda")])[0] for index in range(300)]
    assert torch.equal(torch.stack(results), 3 * torch.arange(300.0, device="cuda"))
