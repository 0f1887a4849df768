"""Copies past torch's dispatcher: of what they copy, and when they leave it to torch.

On the CPU something that moves bytes stands in for the driver.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from kitsune.execution import copier as module
from kitsune.execution.copier import Copier
from kitsune.native.plain_copy import COPY, PythonPlainCopy

INVALID = 1  # CUDA_ERROR_INVALID_VALUE


class Driver:
    """Copies at once; or as a CUDA driver does, if that is given. Each copy is counted.

    Attributes:
        address: of this as a function, while it lives.
        answer: what it returns in place of copying.
    """

    def __init__(self, address: int | None) -> None:
        self.num_copies = 0
        self.answer: int | None = None
        self._copy = None if address is None else COPY(address)
        self._function = COPY(self._call)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _call(self, to: int, address: int, num_bytes: int, stream: int | None) -> int:
        if self.answer is not None:
            return self.answer
        self.num_copies += 1
        if self._copy is not None:
            return int(self._copy(to, address, num_bytes, stream))
        ctypes.memmove(to, address, num_bytes)
        return 0


@pytest.fixture(params=["python", "c"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Driver:
    """What either way to call a driver calls."""
    if request.param == "python":
        monkeypatch.setattr(module, "plain_copy_type", lambda: PythonPlainCopy)
    elif module.plain_copy_type() is PythonPlainCopy:
        pytest.skip("there is no C compiler")
    driver = Driver(module._driver_copy(device.type))
    monkeypatch.setattr(module, "_driver_copy", lambda kind: driver.address)
    return driver


def copied(tensor: Tensor, memory: Tensor) -> Tensor:
    """`memory`, with `tensor` copied there."""
    Copier(memory)(tensor)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("channels_last", [False, True])
def test_alike_tensors_are_copied_by_the_driver(
    device: torch.device, driver: Driver, dtype: torch.dtype, channels_last: bool
) -> None:
    tensor = (torch.randn(3, 4, 5, 6, device=device) * 2).to(dtype)
    if channels_last:
        tensor = tensor.to(memory_format=torch.channels_last)
    memory = torch.zeros_like(tensor)
    copy_in = Copier(memory)
    for _ in range(2):
        copy_in(tensor)
        assert torch.equal(memory, tensor)
        tensor = torch.empty_like(memory).copy_(tensor.flip(0))
    assert driver.num_copies == 2


def test_a_part_of_a_larger_tensor_is_copied(device: torch.device, driver: Driver) -> None:
    whole = torch.randn(8, 16, device=device)
    part = whole[2:5]
    assert torch.equal(copied(part, torch.zeros(3, 16, device=device)), whole[2:5])
    assert driver.num_copies == 1


def test_elements_that_lie_otherwise_are_copied_by_torch(device: torch.device, driver: Driver) -> None:
    tensor = torch.randn(6, 4, device=device)
    transposed, spaced, expanded = tensor.t(), tensor[:, ::2], tensor[:1].expand(5, 4)
    for one in (transposed, spaced, expanded):
        assert torch.equal(copied(one, torch.zeros(one.shape, device=device)), one)
    apart = torch.zeros(6, 8, device=device)[:, ::4]  # memory with gaps, laid out like what is copied
    other = torch.randn(6, 8, device=device)[:, ::4]
    assert torch.equal(copied(other, apart), other)
    assert driver.num_copies == 0


def test_other_values_than_those_of_the_memory_are_copied_by_torch(device: torch.device, driver: Driver) -> None:
    tensor = torch.randn(4, 3, device=device)
    assert torch.equal(copied(tensor.double(), torch.zeros(4, 3, device=device)), tensor)
    assert torch.equal(copied(tensor[:1], torch.zeros(4, 3, device=device)), tensor[:1].expand(4, 3))
    assert torch.equal(copied(torch.ones(3), torch.zeros(3, device=device)), torch.ones(3, device=device))
    assert driver.num_copies == (device.type == "cpu")  # of the last one


def test_bytes_that_do_not_tell_the_values_are_copied_by_torch(device: torch.device, driver: Driver) -> None:
    numbers = torch.randn(4, 3, dtype=torch.complex64, device=device)
    conjugate = numbers.conj()
    assert torch.equal(copied(conjugate, torch.zeros_like(numbers)), conjugate)
    negative = torch._neg_view(torch.randn(4, 3, device=device))
    assert torch.equal(copied(negative, torch.zeros(4, 3, device=device)), negative)
    zeros = torch._efficientzerotensor((4, 3), device=device)
    assert torch.equal(copied(zeros, torch.ones(4, 3, device=device)), torch.zeros(4, 3, device=device))
    assert copied(torch.empty(0, 3, device=device), torch.empty(0, 3, device=device)).shape == (0, 3)
    assert driver.num_copies == 0


def test_what_the_driver_refuses_is_copied_by_torch(device: torch.device, driver: Driver) -> None:
    driver.answer = INVALID
    tensor = torch.randn(4, 3, device=device)
    assert torch.equal(copied(tensor, torch.zeros_like(tensor)), tensor)


@pytest.mark.parametrize("answer", [None, INVALID])
def test_autograd_does_not_see_copies(device: torch.device, driver: Driver, answer: int | None) -> None:
    driver.answer = answer
    tensor = torch.randn(4, 3, device=device, requires_grad=True)
    memory = copied(tensor, torch.zeros(4, 3, device=device))
    assert not memory.requires_grad
    assert torch.equal(memory, tensor.detach())


def test_without_a_driver_torch_copies(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_driver_copy", lambda kind: None)
    tensor = torch.randn(4, 3, device=device)
    assert torch.equal(copied(tensor, torch.zeros_like(tensor)), tensor)
    monkeypatch.undo()
    assert module._driver_copy("cpu") is None


@pytest.mark.gpu
def test_the_current_stream_copies() -> None:
    """What another stream is busy with is not waited for, and what the current one does comes first."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensor, memory = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    copy_in = Copier(memory)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        tensor += 1
        copy_in(tensor)
    torch.cuda.synchronize()
    assert memory.eq(1).all()


@pytest.mark.gpu
def test_a_recorded_copy_is_replayed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensor, memory = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    copy_in = Copier(memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_in(tensor)
    tensor += 1
    graph.replay()
    assert memory.eq(1).all()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_where_another_device_is_current_torch_copies(
    device: torch.device, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [1 - torch.cuda.current_device()]
    monkeypatch.setattr(module, "index_reader", lambda device: lambda: current[0])
    tensor = torch.randn(1000, device=device)
    copy_in = Copier(torch.zeros_like(tensor))
    copy_in(tensor)
    assert torch.equal(copy_in.memory, tensor)
    assert driver.num_copies == 0
    current[0] = torch.cuda.current_device()
    copy_in(tensor + 1)
    assert torch.equal(copy_in.memory, tensor + 1)
    assert driver.num_copies == 1
