"""What is recognized as max-pooling with its surroundings, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from kitsune.capture.trace import trace
from kitsune.fusion import batch_norm, pool
from tests.kitsune.fusion.running import InAutocast, always, assert_alike, fuse, fused, never, operators, run, told
from tests.kitsune.steps import traced_step

TEMPLATES = (pool.backward, pool.forward)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
REPLACED = {"relu", "threshold_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward"}


def images(shape: tuple[int, ...] = (2, 3, 8, 7), dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Multiples of 1/4, so that there are ties and sums are exact."""
    torch.manual_seed(3)
    return (torch.randint(-6, 7, shape) / 4).to(device, dtype).contiguous(memory_format=torch.channels_last)


@DEVICES
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_copy_of_a_flattening_is_what_is_made(channels_last: bool, device: str) -> None:
    layout, other = (
        (torch.channels_last, torch.contiguous_format)
        if channels_last
        else (torch.contiguous_format, torch.channels_last)
    )

    def function(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        copy = F.max_pool2d(F.relu(leaf.sin()), 2).clone(memory_format=other)
        return [copy, *torch.autograd.grad(copy.square().sum(), [leaf])]

    inputs = [images(device=device).contiguous(memory_format=layout)]
    module, new = fused(function, inputs, (*TEMPLATES, pool.copied))
    assert operators(new) == {"max_pool": 1, "max_pool_backward": 1}
    assert "clone" not in operators(new, "aten")
    assert_alike(run(new, inputs), run(module, inputs), rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (1, 3, 2, 2), (1, 1, 8, 8), (2, 1, 8, 6)], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("other", [torch.contiguous_format, torch.channels_last])
def test_layouts_that_differ_in_strides_alone(
    shape: tuple[int, ...], memory_format: torch.memory_format, other: torch.memory_format
) -> None:
    """Of one channel, or one pixel: strides are those of plain PyTorch."""
    strides = torch.empty(shape, memory_format=memory_format).stride()
    inputs = [torch.empty_strided(shape, strides).copy_(torch.randn(shape))]
    functions: list[Callable[[Tensor], list[Tensor]]] = [
        lambda x: [F.max_pool2d(x, 2).sin()],
        lambda x: [F.max_pool2d(x, 2).clone()],
        lambda x: [F.max_pool2d(x, 2).clone(memory_format=other).sin()],
    ]
    for function in functions:
        module, new = fused(function, inputs, (*TEMPLATES, pool.copied))
        assert operators(new) == {"max_pool": 1}
        assert_alike(run(new, inputs), run(module, inputs), rtol=0)
        assert [one.stride() for one in run(new, inputs)] == [one.stride() for one in run(module, inputs)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [(y := F.max_pool2d(x, 2)).contiguous(), y.sin()],
        lambda x: [F.max_pool2d(x, 2).clone(memory_format=torch.channels_last).sin()],
    ],
    ids=["used itself", "in the same layout"],
)
def test_copies_that_stay(function: Callable[[Tensor], list[Tensor]]) -> None:
    inputs = [images()]
    module, new = fused(function, inputs, (*TEMPLATES, pool.copied))
    assert operators(new) == {"max_pool": 1}
    assert operators(new, "aten")["clone"] == 1
    assert_alike(run(new, inputs), run(module, inputs), rtol=1e-5)


def with_gradient(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    """The result of `forward`, and the gradient for its square."""

    def function(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = forward(leaf.sin())
        return [y, *torch.autograd.grad(y.square().sum(), [leaf])]

    return function


FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu before": lambda x: F.max_pool2d(F.relu(x), 2),
    "relu after": lambda x: F.relu(F.max_pool2d(x, 3, stride=2, padding=1)),
    "in place": lambda x: F.relu(F.max_pool2d(x, (3, 2), stride=(1, 2), padding=(1, 0)), inplace=True),
    "alone": lambda x: F.max_pool2d(x, 3, stride=1, padding=1),
    "of contiguous images": lambda x: F.max_pool2d(F.relu(x.contiguous() + 0), 2),
}


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_fused_computes_the_same(name: str, dtype: torch.dtype, device: str) -> None:
    inputs = [images(dtype=dtype, device=device)]
    module, new = fused(with_gradient(FORWARDS[name]), inputs, TEMPLATES)
    assert operators(new) == {"max_pool": 1, "max_pool_backward": 1}
    assert not operators(new, "aten").keys() & REPLACED
    assert_alike(run(new, inputs), run(module, inputs), rtol=1e-5 if dtype == torch.float32 else 0.02)


def test_without_a_backward() -> None:
    inputs = [images()]
    module, new = fused(lambda x: [F.max_pool2d(F.relu(x), 2)], inputs, TEMPLATES)
    assert operators(new) == {"max_pool": 1}
    assert operators(new, "aten") == {}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_two_like_each_other() -> None:
    inputs = [images()]
    module, new = fused(with_gradient(lambda x: F.max_pool2d(x, 2) + F.max_pool2d(x, 2).sin()), inputs, TEMPLATES)
    assert operators(new, "aten").keys() & REPLACED == set()
    assert operators(new)["max_pool_backward"] == 2
    assert_alike(run(new, inputs), run(module, inputs))


def relu_used_twice(x: Tensor) -> Tensor:
    y = F.relu(x)
    return F.max_pool2d(y, 2).square().sum() + y.square().sum()


def pooled_used_twice(x: Tensor) -> Tensor:
    y = F.max_pool2d(x, 2)
    return F.relu(y) + y.cos()


def other_mask(x: Tensor) -> Tensor:
    return F.max_pool2d(F.threshold(x, 0.5, 0.0), 2)


@pytest.mark.parametrize("forward", [relu_used_twice, pooled_used_twice, other_mask])
def test_what_does_not_belong_to_it_stays(forward: Callable[[Tensor], Tensor]) -> None:
    inputs = [images()]
    module, new = fused(with_gradient(forward), inputs, TEMPLATES)
    assert operators(new) == {"max_pool": 1, "max_pool_backward": 1}
    assert operators(new, "aten")["threshold_backward"] == 1
    assert_alike(run(new, inputs), run(module, inputs))


def indices_used(x: Tensor) -> Tensor:
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return y * indices


@pytest.mark.parametrize(
    "forward",
    [
        indices_used,
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, dilation=2),
        lambda x: F.max_pool2d(x, 4),
    ],
    ids=["indices used", "ceil mode", "dilation", "large windows"],
)
def test_other_pooling_keeps_its_forward(forward: Callable[[Tensor], Tensor]) -> None:
    inputs = [images()]
    module, new = fused(with_gradient(forward), inputs, TEMPLATES)
    assert operators(new, "aten")["max_pool2d_with_indices"] == 1
    assert_alike(run(new, inputs), run(module, inputs))


def test_an_input_that_is_written_later_is_not_read_again() -> None:
    def function(x: Tensor, grad: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = F.max_pool2d(F.relu(leaf), 2)
        x.mul_(-1)
        return [y, *torch.autograd.grad(y, [leaf], grad)]

    inputs = [images(), images((2, 3, 4, 3))]
    module, new = fused(function, inputs, TEMPLATES)
    assert operators(new)["max_pool_backward"] == 1
    assert operators(new, "aten")["relu"] + operators(new, "aten")["relu_"] == 1
    assert_alike(run(new, inputs), run(module, inputs))


def test_a_relu_whose_result_is_shown_too() -> None:
    def function(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = F.relu(leaf)
        pooled = F.max_pool2d(y, 2)
        return [y, pooled, *torch.autograd.grad(pooled.square().sum(), [leaf])]

    inputs = [images()]
    module, new = fused(function, inputs, TEMPLATES)
    assert operators(new) == {"max_pool": 1, "max_pool_backward": 1}
    assert operators(new, "aten").keys() & REPLACED == {"relu"}
    assert_alike(run(new, inputs), run(module, inputs))


def test_three_dimensions_are_refused_with_the_reason() -> None:
    new, fusions = fuse(trace(with_gradient(FORWARDS["relu before"]), [images()[0].contiguous()]), TEMPLATES)
    assert not operators(new)
    assert fusions
    assert all("four dimensions" in (fusion.refusal or "") for fusion in fusions)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lenet(dtype: torch.dtype, device: str) -> None:
    workload = models.build("lenet", seed=0)
    module = InAutocast(workload.module.to(device), dtype)
    x, y = (tensor.to(device) for tensor in workload.batch(4, index=0))
    step = traced_step(module, nn.functional.cross_entropy, x, y)
    new, _ = fuse(step.module, TEMPLATES, always)
    assert operators(new) - operators(step.module) == {"max_pool": 2, "max_pool_backward": 2}, told(new)
    assert not operators(new, "aten").keys() & {"max_pool2d_with_indices", "max_pool2d_with_indices_backward"}
    assert operators(new, "aten")["relu"] == operators(new, "aten")["threshold_backward"] == 2
    assert_alike(run(new, step.inputs), run(step.module, step.inputs), rtol=1e-4 if dtype == torch.float32 else 0.03)
    unchanged, fusions = fuse(step.module, TEMPLATES, never)
    assert operators(unchanged) == operators(step.module)
    assert fusions


def test_behind_batch_norm() -> None:
    """As a ResNet for large images begins: batch norm takes the ReLU."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        normal = F.relu(F.batch_norm(leaves[0], None, None, *leaves[1:], training=True))
        y = F.max_pool2d(normal, 3, 2, 1)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    inputs = [images(), torch.rand(3), torch.rand(3)]
    module, new = fused(forward, inputs, (batch_norm.forward, batch_norm.backward, *TEMPLATES))
    assert operators(new) == {"batch_norm": 1, "batch_norm_backward": 1, "max_pool": 1, "max_pool_backward": 1}
    assert_alike(run(new, inputs), run(module, inputs), rtol=1e-4, atol=1e-4)
