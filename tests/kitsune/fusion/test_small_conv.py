"""What is recognized as a small convolution with its surroundings, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from kitsune.capture.trace import trace
from kitsune.fusion import pool, small_conv
from tests.kitsune.fusion.running import (
    InAutocast,
    always,
    assert_alike,
    fuse,
    fused,
    in_autocast,
    never,
    operators,
    run,
    told,
)
from tests.kitsune.steps import traced_step

TEMPLATES = (small_conv.forward, small_conv.backward)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
REPLACED = {"convolution", "convolution_backward"}

ALL = {"small_conv": 1, "small_conv_input_grad": 1, "small_conv_weight_grad": 1}


def inputs(device: str = "cpu", *, bias: bool = True, channels_last: bool = False) -> list[Tensor]:
    """Images, weight and bias of a convolution."""
    torch.manual_seed(5)
    tensors = [torch.randn(2, 3, 7, 6), torch.randn(4, 3, 3, 2) / 4, torch.randn(4)][: 3 if bias else 2]
    if channels_last:
        tensors[:2] = [tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors[:2]]
    return [tensor.to(device) for tensor in tensors]


def with_gradients(forward: Callable[..., Tensor], *, of_input: bool = True) -> Callable[..., list[Tensor]]:
    """The result of `forward` as float32, and the gradients for its square."""

    def function(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_(place > 0 or of_input) for place, tensor in enumerate(tensors)]
        y = forward(*leaves).float()
        return [y, *torch.autograd.grad(y.square().sum(), [leaf for leaf in leaves if leaf.requires_grad])]

    return function


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.1}


FORWARDS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda x, *weights: F.conv2d(x, *weights),
    "relu": lambda x, *weights: F.relu(F.conv2d(x, *weights, padding=1)),
    "in place": lambda x, *weights: F.relu(F.conv2d(x, *weights, stride=2), inplace=True),
}


@DEVICES
@DTYPES
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_fused_computes_the_same(name: str, channels_last: bool, dtype: torch.dtype, device: str) -> None:
    tensors = inputs(device, channels_last=channels_last)
    module, new = fused(with_gradients(in_autocast(FORWARDS[name], dtype)), tensors, TEMPLATES)
    assert operators(new) == ALL, told(new)
    assert not operators(new, "aten").keys() & {*REPLACED, "relu"}
    assert operators(new, "aten")["_to_copy"] <= (0 if dtype == torch.float32 else 3)  # what autograd computes besides
    assert_alike(run(new, tensors), run(module, tensors), **tolerances(dtype))


@DTYPES
def test_the_relu_before_it_is_part_of_its_backward(dtype: torch.dtype) -> None:
    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        return F.conv2d(F.relu(x.to(dtype).sin()), *weights)

    tensors = inputs()
    module, new = fused(with_gradients(in_autocast(forward, dtype)), tensors, TEMPLATES)
    assert operators(new) == ALL
    assert not operators(new, "aten").keys() & {*REPLACED, "threshold_backward"}
    assert_alike(run(new, tensors), run(module, tensors), **tolerances(dtype))


def test_errors_are_no_larger() -> None:
    """Of bfloat16, against float64: sums are rounded once."""
    tensors = inputs()
    function = with_gradients(in_autocast(FORWARDS["relu"], torch.bfloat16))
    module, new = fused(function, tensors, TEMPLATES)
    exact = with_gradients(FORWARDS["relu"])(*(tensor.double() for tensor in tensors))
    for found, before, wanted in zip(run(new, tensors), run(module, tensors), exact, strict=False):
        errors = [torch.linalg.vector_norm(one.double() - wanted) for one in (found, before)]
        assert errors[0] <= 1.1 * errors[1]


def test_without_bias_and_input_gradient() -> None:
    tensors = inputs(bias=False)
    module, new = fused(with_gradients(FORWARDS["relu"], of_input=False), tensors, TEMPLATES)
    assert operators(new) == {"small_conv": 1, "small_conv_weight_grad": 1}
    assert_alike(run(new, tensors), run(module, tensors), **tolerances(torch.float32))


def test_the_input_gradient_alone() -> None:
    def function(x: Tensor, *weights: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = F.conv2d(leaf, *weights)
        return [y, *torch.autograd.grad(y.square().sum(), [leaf])]

    tensors = inputs()
    module, new = fused(function, tensors, TEMPLATES)
    assert operators(new) == {"small_conv": 1, "small_conv_input_grad": 1}
    assert_alike(run(new, tensors), run(module, tensors), **tolerances(torch.float32))


def relu_used_too(x: Tensor, *weights: Tensor) -> Tensor:
    y = F.conv2d(x, *weights)
    return F.relu(y) + y.sin()


def other_activation(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.tanh(F.conv2d(x, *weights))


@pytest.mark.parametrize(("forward", "left"), [(relu_used_too, "relu"), (other_activation, "tanh")])
def test_what_does_not_belong_to_it_stays(forward: Callable[..., Tensor], left: str) -> None:
    tensors = inputs()
    module, new = fused(with_gradients(forward), tensors, TEMPLATES)
    assert operators(new) == ALL
    assert operators(new, "aten")[left] == 1
    assert_alike(run(new, tensors), run(module, tensors), **tolerances(torch.float32))


def input_used_too(x: Tensor, *weights: Tensor) -> Tensor:
    y = F.relu(x.sin())
    return F.conv2d(y, *weights).sin().sum(1) + y[:, 0, :5, :5]


def test_the_relu_of_an_input_that_others_use_stays() -> None:
    tensors = inputs()
    module, new = fused(with_gradients(input_used_too), tensors, TEMPLATES)
    assert operators(new) == ALL
    assert operators(new, "aten")["threshold_backward"] == 1
    assert_alike(run(new, tensors), run(module, tensors), **tolerances(torch.float32))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, weight: F.conv2d(x, weight, dilation=2),
        lambda x, weight: F.conv2d(x, weight[:3, :1], groups=3),
        lambda x, weight: F.conv_transpose2d(x, weight[:3]),
        lambda x, weight: F.conv2d(x, weight, stride=3),
        lambda x, weight: F.conv2d(x, weight.repeat(20, 1, 1, 1)),
        lambda x, weight: F.conv1d(x[:, :, 0], weight[:, :, 0]),
    ],
    ids=["dilation", "groups", "transposed", "stride 3", "80 channels", "one dimension"],
)
def test_other_convolutions_stay(forward: Callable[..., Tensor]) -> None:
    tensors = inputs(bias=False)
    module, new = fused(with_gradients(forward), tensors, TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, tensors), run(module, tensors), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "count"),
    [(3, 64, (3, 2), 2), (3, 65, (3, 2), 0), (32, 4, (3, 3), 2), (33, 4, (3, 3), 0), (64, 64, (1, 1), 2)],
)
def test_what_is_too_large_is_not_even_tried(inputs: int, outputs: int, kernel: tuple[int, int], count: int) -> None:
    tensors = [torch.randn(2, inputs, 7, 6), torch.randn(outputs, inputs, *kernel)]
    new, fusions = fuse(trace(with_gradients(FORWARDS["plain"]), tensors), TEMPLATES)
    assert len(fusions) == count
    assert bool(operators(new)) == bool(count)


def test_float64_is_refused_with_the_reason() -> None:
    new, fusions = fuse(trace(with_gradients(FORWARDS["plain"]), [one.double() for one in inputs()]), TEMPLATES)
    assert not operators(new)
    assert fusions
    assert all("float" in (fusion.refusal or "") for fusion in fusions)


@pytest.fixture
def _precision() -> Iterator[None]:
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in settings]
    yield
    for setting, value in zip(settings, before, strict=True):
        setting.fp32_precision = value


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize(("matmul", "conv"), [("ieee", "tf32"), ("tf32", "ieee"), ("tf32", "tf32")])
def test_tf32_only_where_it_is_allowed(matmul: str, conv: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.conv.fp32_precision = conv
    _, new = fused(with_gradients(FORWARDS["plain"]), inputs(), TEMPLATES)
    found = [node.kwargs["allow_tf32"] for node in new.graph.nodes if "allow_tf32" in node.kwargs]
    assert found == [matmul == conv == "tf32"] * 3


@DEVICES
@DTYPES
def test_lenet(dtype: torch.dtype, device: str) -> None:
    workload = models.build("lenet", seed=0)
    module = InAutocast(workload.module.to(device), dtype)
    x, y = (tensor.to(device) for tensor in workload.batch(4, index=0))
    step = traced_step(module, nn.functional.cross_entropy, x, y)
    new, _ = fuse(step.module, (pool.backward, pool.forward, *TEMPLATES), always)
    assert operators(new) - operators(step.module) == {
        "small_conv": 2,
        "small_conv_input_grad": 1,
        "small_conv_weight_grad": 2,
        "max_pool": 2,
        "max_pool_backward": 2,
    }, told(new)
    assert not operators(new, "aten").keys() & REPLACED
    assert_alike(
        run(new, step.inputs),
        run(step.module, step.inputs),
        rtol=1e-3 if dtype == torch.float32 else 0.05,
        atol=1e-4 if dtype == torch.float32 else 0.05,
    )
    unchanged, fusions = fuse(step.module, TEMPLATES, never)
    assert operators(unchanged) == operators(step.module)
    assert fusions
