"""A number added to many scalars: the kernel in Triton's interpreter on the CPU and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kitsune.kernels import scalars
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter

GPU = pytest.param("cuda", marks=pytest.mark.gpu)

Add = Callable[[list[Tensor], int], None]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    module = interpreted("scalars_triton")
    module._WIDTHS = (1, 3)
    return module


@pytest.fixture(params=["reference", "cpu", GPU])
def add(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Add]:
    """A device, and what adds there: the reference, the kernel in the interpreter, or compiled."""
    if request.param == "reference":
        return "cpu", scalars.add_to_scalars_
    if request.param == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
        return "cuda", scalars.add_to_scalars_
    patch_interpreter(monkeypatch)
    return "cpu", request.getfixturevalue("kernel").launch


@pytest.mark.parametrize("dtype", scalars.DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("number", [1, -(2**31)])
def test_equals_add(add: tuple[str, Add], dtype: torch.dtype, count: int, number: int) -> None:
    """Of any shape, at any address; what lies beside them stays."""
    device, add_to_scalars_ = add
    values = torch.arange(3 * count + 1, device=device).to(dtype) * 2**20
    expected = values.clone()
    expected[1::3] += number
    wanted = [values[place] for place in range(1, len(values), 3)]
    add_to_scalars_([wanted[0].view(1, 1), *wanted[1:]], number)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("add", [GPU], indirect=True)
@pytest.mark.parametrize("count", [9, 65, 300])
def test_in_several_launches(add: tuple[str, Add], count: int) -> None:
    values = torch.arange(float(count), device="cuda")
    scalars.add_to_scalars_(list(values.unbind()), 3)
    assert torch.equal(values, torch.arange(float(count), device="cuda") + 3)


def test_numbers_that_are_not_finite(add: tuple[str, Add]) -> None:
    device, add_to_scalars_ = add
    values = torch.tensor([float("inf"), float("nan"), 2.0**24], device=device)
    add_to_scalars_(list(values.unbind()), 1)
    torch.testing.assert_close(values.cpu(), torch.tensor([float("inf"), float("nan"), 2.0**24]), equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_operator(device: str) -> None:
    inputs = [torch.zeros((), device=device), torch.ones(1, device=device)]
    torch.library.opcheck(
        torch.ops.kitsune.add_to_scalars_.default, (inputs, 1), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([torch.zeros(2)], r"tensors of one element, .* got \(2,\)"),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.float64)], "of torch.float64 on cpu beside torch.float32 on cpu"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], "on meta beside torch.float32 on cpu"),
        ([torch.zeros(1, dtype=torch.float16)], "got torch.float16"),
    ],
)
def test_what_it_does_not_take(tensors: list[Tensor], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        scalars.add_to_scalars_(tensors, 1)
