"""Max-pooling with ReLU against ATen: the kernels in Triton's interpreter on the CPU and compiled on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kitsune.kernels import pool
from tests.kitsune.kernels import offline
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
WINDOWS = [  # kernel, stride, padding
    ((2, 2), (2, 2), (0, 0)),
    ((3, 3), (2, 2), (1, 1)),
    ((3, 3), (1, 1), (1, 1)),
    ((2, 3), (3, 1), (1, 0)),
    ((1, 2), (4, 5), (0, 1)),
]
SHAPES = [(2, 6, 10, 9), (1, 1, 4, 3), (2, 17, 5, 7)]

Windows = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


class Pools(NamedTuple):
    """A device, the two operators there, and the module of their kernels, if they run any."""

    device: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]
    module: ModuleType | None


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("pool_triton")


@pytest.fixture(params=["reference", "cpu", GPU])
def pools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pools:
    """The references, the kernels in the interpreter, and compiled in their first form, which saves time."""
    if request.param == "reference":
        return Pools("cpu", pool.max_pool, pool.max_pool_backward, None)
    if request.param == "cpu":
        patch_interpreter(monkeypatch)
        return interpreted_operators(request.getfixturevalue("kernels"))
    module = compiled()
    monkeypatch.setattr(module, "choose", lambda key, forms, run, device: forms[0])
    return Pools("cuda", pool.max_pool, pool.max_pool_backward, module)


def compiled() -> ModuleType:
    module: ModuleType = pytest.importorskip("kitsune.kernels.pool_triton", reason="Triton is not installed")
    return module


def interpreted_operators(module: ModuleType) -> Pools:
    def forward(x: Tensor, *windows: Any, **options: Any) -> tuple[Tensor, Tensor]:
        results = pool._fake(x, *map(list, windows), **options)
        module.launch(x, *results, *windows, relu=options["relu"])
        return results

    def backward(grad: Tensor, position: Tensor, *windows: Any, **options: Any) -> Tensor:
        result = pool._fake_backward(grad, position, *map(list, windows), **options)
        module.launch_backward(grad, position, result, *windows[1:], **options)
        return result

    return Pools("cpu", forward, backward, module)


def images(
    shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> Tensor:
    """Small multiples of 1/4, so that there are ties and sums are exact in every dtype."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return (torch.randint(-6, 7, shape) / 4).to(device, dtype).contiguous(memory_format=memory_format)


def strides(shape: Any, channels_last: bool) -> tuple[int, ...]:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, memory_format=memory_format).stride()


def check(pools: Pools, x: Tensor, windows: Windows, relu: bool, channels_last: bool) -> None:
    """Compares values, layouts and gradients with those of ATen in float64. All are exact."""
    forward, backward = pools.forward, pools.backward
    exact = x.detach().double().requires_grad_()
    expected = F.max_pool2d(F.relu(exact) if relu else exact, *windows)
    grad = images(tuple(expected.shape), x.device.type, x.dtype)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())

    y, position = forward(x, *windows, relu=relu, channels_last=channels_last)
    found_grad = backward(grad, position, x.shape[2:], *windows, channels_last=channels_last)

    assert (y.dtype, position.dtype, found_grad.dtype) == (x.dtype, torch.uint8, x.dtype)
    assert y.stride() == position.stride() == strides(y.shape, channels_last)
    assert found_grad.stride() == strides(x.shape, channels_last)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found_grad.double(), expected_grad, rtol=0, atol=0)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_aten(pools: Pools, shape: tuple[int, ...], windows: Windows) -> None:
    for relu, channels_last in ((True, False), (False, True)):
        check(pools, images(shape, pools.device, channels_last=channels_last), windows, relu, channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("windows", WINDOWS[:2], ids=str)
def test_positions_in_the_other_layout(pools: Pools, windows: Windows, channels_last: bool) -> None:
    x = images((2, 7, 14, 13), pools.device, channels_last=channels_last)
    y, position = pools.forward(
        x, *windows, relu=True, channels_last=channels_last, position_channels_last=not channels_last
    )
    alike, position_alike = pools.forward(x, *windows, relu=True, channels_last=channels_last)
    assert y.stride() == strides(y.shape, channels_last)
    assert position.stride() == strides(y.shape, not channels_last)
    assert torch.equal(y, alike)
    assert torch.equal(position, position_alike)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(pools: Pools, dtype: torch.dtype) -> None:
    for windows in WINDOWS[:2]:
        check(pools, images((2, 5, 7, 9), pools.device, dtype, channels_last=True), windows, True, True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_any_strides(pools: Pools, channels_last: bool) -> None:
    """Slices of larger tensors, odd addresses, expanded ones, and the other layout."""
    base = images((3, 8, 9, 11), pools.device)
    layouts = [base[1:, 1:6, ::2, 3:], base[:1].expand(2, -1, -1, -1), base.permute(0, 3, 1, 2)]
    for x in [*layouts, base.contiguous(memory_format=torch.channels_last)]:
        check(pools, x, ((2, 2), (2, 2), (0, 0)), True, channels_last)


@pytest.mark.slow
@pytest.mark.parametrize("pools", ["cpu", GPU], indirect=True)
def test_every_form(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pools.module is not None
    for form in pools.module._FORMS:
        monkeypatch.setattr(pools.module, "_FORMS", (form,))
        check(pools, images((2, 7, 14, 13), pools.device, channels_last=True), WINDOWS[1], True, True)


def launch_what_may_compute_in_pairs() -> None:
    module = compiled()
    module._FORMS = module._FORMS[::6]
    forward, backward = interpreted_operators(module)[1:3]
    x = torch.empty(2, 7, 14, 13)
    for windows, channels_last in product(WINDOWS[1::2], (False, True)):
        y, position = forward(x, *windows, relu=True, channels_last=channels_last)
        backward(y, position, x.shape[2:], *windows, channels_last=channels_last)
        forward(x, *windows, relu=True, channels_last=channels_last, position_channels_last=not channels_last)


@pytest.mark.slow
def test_does_not_compute_in_pairs() -> None:
    """In these cases LLVM would, and what ptxas makes of it is wrong."""
    compiled()
    kernels = offline.compiled(launch_what_may_compute_in_pairs)
    assert len(kernels) == 24
    assert not [kernel.name for kernel in kernels if re.search(r"\.[su]16x2", kernel.ptx)]


@pytest.mark.gpu
def test_a_measured_form() -> None:
    measured = Pools("cuda", pool.max_pool, pool.max_pool_backward, compiled())
    check(measured, images((2, 7, 14, 13), "cuda", channels_last=True), WINDOWS[1], True, True)


def test_ties_and_numbers_that_are_not_finite(pools: Pools) -> None:
    """The chosen positions are those of ATen: the first of the largest, the last NaN, the first -inf."""
    nan, inf = float("nan"), float("inf")
    x = images((2, 3, 9, 10), pools.device)
    x[0, 0, 2:5, 3:7] = nan
    x[0, 1, 2:5, 3:7] = inf
    x[1, 0] = -inf
    x[1, 1, 4] = nan
    x[1, 2] = 1.0
    for windows in WINDOWS[:3]:
        for relu in (False, True):
            check(pools, x, windows, relu, channels_last=True)


def test_no_gradient_where_relu_gives_zero(pools: Pools) -> None:
    device, forward, backward, _ = pools
    x = torch.tensor([[-1.0, -2.0, 3.0, 0.0], [-3.0, -4.0, 0.0, 0.0]], device=device).view(1, 1, 2, 4)
    windows = ((2, 2), (2, 2), (0, 0))
    y, position = forward(x, *windows, relu=True, channels_last=False)
    assert y.flatten().tolist() == [0.0, 3.0]
    assert position.flatten().tolist() == [pool.NO_GRADIENT, 0]
    grad = torch.full_like(y, float("inf"))
    grad[..., 0] = float("nan")
    found = backward(grad, position, (2, 4), *windows, channels_last=False)
    assert found.flatten().tolist() == [0, 0, float("inf"), 0, 0, 0, 0, 0]


def test_sums_in_float32(pools: Pools) -> None:
    """Nine gradients that float16 could not add one by one."""
    device, _, backward, _ = pools
    position = torch.arange(8, -1, -1, dtype=torch.uint8, device=device).view(1, 1, 3, 3)  # all choose the centre
    grad = torch.tensor([2048.0] + [1.0] * 8, device=device).view(1, 1, 3, 3)
    found = backward(grad.half(), position, (3, 3), (3, 3), (1, 1), (1, 1), channels_last=False)
    assert found.flatten().tolist() == [0, 0, 0, 0, 2056, 0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(0, 3, 6, 6), (2, 0, 6, 6)])
def test_nothing_to_do(pools: Pools, shape: tuple[int, ...]) -> None:
    device, forward, backward, _ = pools
    y, position = forward(torch.empty(shape, device=device), (2, 2), (2, 2), (0, 0), relu=True, channels_last=True)
    assert y.shape == position.shape == (*shape[:2], 3, 3)
    assert backward(y, position, (6, 6), (2, 2), (2, 2), (0, 0), channels_last=True).shape == shape


# The operators


def check_operator(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.library.opcheck(operator, arguments, options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_schema_and_fakes(device: torch.device, channels_last: bool, relu: bool) -> None:
    if device.type == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
    x = images((2, 3, 7, 6), device.type, torch.bfloat16)
    windows = ([3, 2], [2, 2], [1, 0])
    for case in (x, x[:0], x[:, :1, :, 1:]):
        options = {"relu": relu, "channels_last": channels_last}
        check_operator(torch.ops.kitsune.max_pool.default, (case, *windows), options)
        pooled = pool.max_pool(case, *windows, relu=relu, channels_last=channels_last)
        arguments = (*pooled, list(case.shape[2:]), *windows)
        check_operator(torch.ops.kitsune.max_pool_backward.default, arguments, {"channels_last": channels_last})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"x": torch.ones(3, 6, 6)}, r"x must have four dimensions .* got \(3, 6, 6\)"),
        ({"x": torch.ones(1, 3, 6, 6, dtype=torch.float64)}, "got torch.float64"),
        ({"kernel": (4, 2)}, r"got kernel \[4, 2\]"),
        ({"stride": (0, 2)}, r"stride \[0, 2\]"),
        ({"padding": (2, 0)}, r"padding \[2, 0\]"),
        ({"x": torch.ones(1, 3, 1, 6)}, r"no window of \[2, 2\] with padding \[0, 0\] fits into images of \[1, 6\]"),
        ({"x": torch.ones(1).expand(1, 2**10, 2**10, 2**13)}, "one image of a result may have"),
        ({"x": torch.empty(1, 3, 2**15, 2**15, device="meta")}, "one image of x may span"),
    ],
)
def test_what_the_forward_refuses(changes: dict[str, Any], problem: str) -> None:
    merged = {"x": torch.ones(1, 3, 6, 6), "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), **changes}
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=problem):
        pool.max_pool(**merged, relu=True, channels_last=True)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grad": torch.ones(1, 3, 3, 3, dtype=torch.float64)}, "got torch.float64 and torch.uint8"),
        ({"position": torch.ones(1, 3, 3, 3)}, "got torch.float32 and torch.float32"),
        ({"position": torch.ones(1, 3, 3, 2, dtype=torch.uint8)}, r"got \(1, 3, 3, 3\) and \(1, 3, 3, 2\)"),
        ({"size": (8, 6)}, r"positions of \[4, 3\] windows"),
        ({"position": torch.ones(1, 3, 3, 3, dtype=torch.uint8, device="meta")}, "position must .* lie on cpu"),
    ],
)
def test_what_the_backward_refuses(changes: dict[str, Any], problem: str) -> None:
    tensors = {"grad": torch.ones(1, 3, 3, 3), "position": torch.ones(1, 3, 3, 3, dtype=torch.uint8)}
    windows = {"size": (6, 6), "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    merged = {**tensors, **windows, **changes}
    with pytest.raises(ValueError, match=problem):
        pool._fake_backward(**{**merged, **{name: list(merged[name]) for name in windows}}, channels_last=True)
