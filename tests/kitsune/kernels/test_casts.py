"""Casts of many tensors against `Tensor.to`: the kernel in Triton's interpreter on the CPU and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kitsune.kernels import casts
from kitsune.kernels.images import FLOATS
from tests.kitsune.kernels.interpreter import interpreted, normal, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow")

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
SIZES = (1, 3, 1023, 1024, 1025, 0, 2500, 4096)

Cast = Callable[[list[Tensor], torch.dtype], list[Tensor]]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    module = interpreted("adam_triton", "casts_triton")
    module._WIDTHS = (2, 4)  # the interpreter takes its time for each
    return module


@pytest.fixture(params=["reference", "cpu", GPU])
def cast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Cast]:
    """A device, and what casts there: the reference, the kernel in the interpreter, or compiled."""
    if request.param == "reference":
        return "cpu", casts.cast_many
    if request.param == "cuda":
        casts_triton()
        return "cuda", casts.cast_many
    patch_interpreter(monkeypatch)
    return "cpu", interpreted_operator(request.getfixturevalue("kernel"))


def casts_triton() -> ModuleType:
    module: ModuleType = pytest.importorskip("kitsune.kernels.casts_triton", reason="Triton is not installed")
    return module


def interpreted_operator(module: ModuleType) -> Cast:
    def cast_many(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        results = casts._fake(inputs, dtype)
        module.launch(inputs, results)
        return results

    return cast_many


def check(found: list[Tensor], inputs: list[Tensor], dtype: torch.dtype) -> None:
    assert len(found) == len(inputs)
    for one, tensor in zip(found, inputs, strict=True):
        torch.testing.assert_close(one, tensor.to(dtype), rtol=0, atol=0, equal_nan=True, check_stride=True)
        assert one.data_ptr() != tensor.data_ptr() or not one.numel()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_equals_to(cast: tuple[str, Cast], source: torch.dtype, dtype: torch.dtype) -> None:
    device, cast_many = cast
    inputs = [normal((size,), source, device, seed=size) for size in SIZES]
    check(cast_many(inputs, dtype), inputs, dtype)


def test_layouts_and_addresses(cast: tuple[str, Cast]) -> None:
    """Any order of dimensions, no dimensions, and slices that begin anywhere."""
    device, cast_many = cast
    x = normal((4, 3, 5, 2), torch.float32, device, seed=1)
    inputs = [x.contiguous(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[0, 0, 0, 0], x.view(-1)[1:], x]
    check(cast_many(inputs, torch.bfloat16), inputs, torch.bfloat16)


def test_numbers_that_are_not_finite(cast: tuple[str, Cast]) -> None:
    device, cast_many = cast
    inputs = [torch.tensor([float("nan"), float("inf"), -float("inf"), 1e6, -1e-8, -0.0, 3.0], device=device)]
    check(cast_many(inputs, torch.float16), inputs, torch.float16)


def test_more_tensors_than_a_launch_takes(cast: tuple[str, Cast]) -> None:
    device, cast_many = cast
    inputs = [
        normal((size % 40 + 1,), torch.float32, device, seed=size) for size in range(300 if device == "cuda" else 9)
    ]
    check(cast_many(inputs, torch.bfloat16), inputs, torch.bfloat16)


@pytest.mark.parametrize("cast", ["cpu", GPU], indirect=True)
def test_every_form(cast: tuple[str, Cast], kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cast_many = cast
    inputs = [normal((size,), torch.float32, device, seed=size) for size in (5000, 16384, 7)]
    for form in kernel._FORMS:
        for module in (kernel, casts_triton()):
            monkeypatch.setattr(module, "_FORMS", (form,))
        check(cast_many(inputs, torch.bfloat16), inputs, torch.bfloat16)


def test_schema_and_fakes(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
    inputs = [torch.randn(3, 4, device=device).t(), torch.randn((), device=device)]
    torch.library.opcheck(
        torch.ops.kitsune.cast_many.default, (inputs, torch.bfloat16), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("inputs", "dtype", "problem"),
    [
        ([torch.ones(2, dtype=torch.float64)], torch.float32, "got torch.float64 to be cast to torch.float32"),
        ([torch.ones(2)], torch.int32, "got torch.float32 to be cast to torch.int32"),
        ([torch.ones(2), torch.ones(2).half()], torch.bfloat16, "got torch.float16 on cpu beside torch.float32 on cpu"),
        ([torch.ones(2), torch.ones(2, device="meta")], torch.bfloat16, "got torch.float32 on meta"),
        ([torch.ones(4, 4)[:, 1:]], torch.bfloat16, r"dense in memory: got \(4, 3\) with strides \(4, 1\)"),
        ([torch.ones(1, 4).expand(3, 4)], torch.bfloat16, r"dense in memory: got \(3, 4\) with strides \(0, 1\)"),
    ],
)
def test_what_it_refuses(inputs: list[Tensor], dtype: torch.dtype, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        casts._fake(inputs, dtype)
