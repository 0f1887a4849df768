"""Templates of convolutions in half precision: which graphs they fit, and that results stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from kitsune.capture.trace import trace
from kitsune.fusion import batch_norm, conv
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from tests.kitsune.fusion.running import always, fuse, operators, run, told
from tests.kitsune.kernels.interpreter import error

aten, kitsune = torch.ops.aten, torch.ops.kitsune

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TEMPLATES = (
    batch_norm.forward, batch_norm.backward, conv.forward_with_batch_norm, conv.forward, conv.backward,
    conv.weight_gradient,
)  # fmt: skip


class Block(nn.Module):
    """Two convolutions with batch norms and a residual, as in ResNets."""

    def __init__(self, channels: int = 32, kernel: int = 3) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


class Biased(nn.Module):
    """Convolutions with biases, as in U-Nets without batch norms."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def step(module: nn.Module, shape: tuple[int, ...], device: str) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """A function of an input and of the module's tensors that gives its result and all gradients, and these."""
    module = module.to(device).bfloat16().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.float()
    names = [name for name, _ in module.named_parameters()]
    buffers = [name for name, one in module.named_buffers() if one.is_floating_point()]

    def function(x: Tensor, *tensors: Tensor) -> list[Tensor]:
        given = dict(zip([*names, *buffers], tensors, strict=True))
        x = x.detach().requires_grad_()
        leaves = [given[name] for name in names]
        y = torch.func.functional_call(module, given, (x,))
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, *leaves])]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    parameters = [one.detach().clone().requires_grad_() for one in module.parameters()]
    return function, [x, *parameters, *(dict(module.named_buffers())[name].clone() for name in buffers)]


def between_convolutions(
    *, size: int = 8, residual: bool = False, looked_at: bool = False
) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """A batch norm between two convolutions and their backwards, as the templates before have left it.

    On the CPU batch norm in bfloat16 saves other statistics than on a GPU, and its templates leave it.
    """
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def function(x: Tensor, grad: Tensor, first: Tensor, second: Tensor, *of_norm: Tensor) -> list[Tensor]:
        conv = aten.convolution.default(x, first, None, *plain)
        y, mean, invstd = kitsune.batch_norm.default(
            conv, x if residual else None, *of_norm, momentum=0.1, eps=1e-5, relu=True
        )
        result = aten.convolution.default(y, second, None, *plain)
        of_y, of_second, _ = aten.convolution_backward.default(grad, y, second, [0], *plain, [True, True, False])
        if residual:
            back = kitsune.batch_norm_residual_backward.default(x, conv, y, of_norm[0], mean, invstd, added_grad_y=of_y)
        else:
            back = kitsune.batch_norm_backward.default(of_y, conv, None, *of_norm[:2], mean, invstd, relu=True)
        return [result, of_second, *back, *([conv * 2] if looked_at else [])]

    def images(*shape: int) -> Tensor:
        return (torch.randn(shape) / 4).bfloat16().contiguous(memory_format=torch.channels_last)

    x, grad = images(4, 32, size, size), images(4, 32, size, size)
    return function, [x, grad, images(32, 32, 3, 3), images(32, 32, 3, 3), *(torch.rand(32) + 0.5 for _ in range(4))]


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Equal in form, and in value but for what sums in another order make of bfloat16."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert error(one, other.double()) < 0.02


def with_rivals_refused(*refused: str) -> Callable[[Alone], Verdict]:
    """Takes every replacement that agrees but those that call one of the operators."""

    def judge(alone: Alone) -> Verdict:
        if set(operators(alone.after)) & set(refused):
            return Verdict("it is not faster", 1.0, 2.0)
        return always(alone)

    return judge


@pytest.mark.parametrize("device", [GPU])
def test_block_of_a_residual_network(device: str) -> None:
    function, inputs = step(Block(), (4, 32, 8, 8), device)
    module = trace(function, inputs)
    result, _ = fuse(module, TEMPLATES, with_rivals_refused())
    assert operators(result) == {
        "conv_batch_norm": 2,
        "conv_input_grad_batch_norm_backward": 1,
        "batch_norm_residual_backward": 1,
        "conv_input_grad": 1,
        "conv_weight_grad": 2,
    }, told(result)
    assert operators(result, "aten")["convolution_backward"] == 0
    assert_near(run(result, inputs), run(module, inputs))


@pytest.mark.parametrize("residual", [False, True])
def test_batch_norm_between_convolutions(residual: bool) -> None:
    function, inputs = between_convolutions(residual=residual)
    module = trace(function, inputs)
    result, _ = fuse(module, TEMPLATES, with_rivals_refused())
    assert operators(result) == {
        "conv_batch_norm": 1,
        "conv": 1,
        "conv_input_grad_batch_norm_backward": 1,
        "conv_weight_grad": 1,
    }, told(result)
    assert not operators(result, "aten")["convolution_backward"]
    assert_near(run(result, inputs), run(module, inputs))


def test_weights_may_be_left_to_the_library() -> None:
    function, inputs = between_convolutions()
    module = trace(function, inputs)
    result, _ = fuse(module, TEMPLATES, with_rivals_refused("conv_weight_grad"))
    assert operators(result)["conv_input_grad_batch_norm_backward"] == 1, told(result)
    assert wanted_of_the_library(result) == [[False, True, False]]
    assert_near(run(result, inputs), run(module, inputs))


def test_inputs_may_be_left_to_the_library() -> None:
    function, inputs = between_convolutions()
    module = trace(function, inputs)
    refused = ("conv_input_grad", "conv_input_grad_batch_norm_backward")
    result, _ = fuse(module, TEMPLATES, with_rivals_refused(*refused))
    assert operators(result)["conv_weight_grad"] == 1, told(result)
    assert wanted_of_the_library(result) == [[True, False, False]]
    assert_near(run(result, inputs), run(module, inputs))


def test_norm_may_stay_apart_from_the_gradient() -> None:
    function, inputs = between_convolutions()
    module = trace(function, inputs)
    result, _ = fuse(module, TEMPLATES, with_rivals_refused("conv_input_grad_batch_norm_backward", "conv_batch_norm"))
    found = operators(result)
    assert (found["conv"], found["batch_norm"], found["conv_input_grad"], found["batch_norm_backward"]) == (2, 1, 1, 1)
    assert_near(run(result, inputs), run(module, inputs))


def test_convolution_that_is_needed_beside_its_norm() -> None:
    function, inputs = between_convolutions(looked_at=True)
    module = trace(function, inputs)
    result, _ = fuse(module, TEMPLATES, with_rivals_refused())
    assert operators(result)["conv_batch_norm"] == 1, told(result)
    assert_near(run(result, inputs), run(module, inputs))


def wanted_of_the_library(module: fx.GraphModule) -> list[Any]:
    return [node.args[-1] for node in module.graph.nodes if node.target is aten.convolution_backward.default]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_biases_and_relu(device: str) -> None:
    function, inputs = step(Biased(), (2, 32, 8, 8), device)
    module = trace(function, inputs)
    result, fusions = fuse(module, TEMPLATES, with_rivals_refused())
    assert operators(result) == {"conv": 2, "conv_input_grad": 2, "conv_weight_grad": 2}, told(result)
    assert any(fusion.template == "convolution + relu" and fusion.refusal is None for fusion in fusions)
    assert wanted_of_the_library(result) == [[False, False, True]] * 2
    assert_near(run(result, inputs), run(module, inputs))


def test_images_that_no_tile_fills_have_their_norm_apart() -> None:
    function, inputs = between_convolutions(size=7)
    module = trace(function, inputs)
    result, _ = fuse(module, TEMPLATES, with_rivals_refused())
    found = operators(result)
    assert (found["conv"], found["conv_input_grad"]) == (2, 1), told(result)
    assert found["conv_batch_norm"] == found["conv_weight_grad"] == 0
    assert_near(run(result, inputs), run(module, inputs))


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.Conv2d(32, 32, 3, dilation=2),
        nn.Conv2d(32, 32, 3, groups=2),
        nn.ConvTranspose2d(32, 32, 3),
        nn.Conv2d(8, 32, 3),
    ],
    ids=str,
)
def test_other_convolutions_stay(module: nn.Module) -> None:
    channels = 8 if getattr(module, "in_channels", 32) == 8 else 32
    function, inputs = step(module, (2, channels, 8, 8), "cpu")
    result, _ = fuse(trace(function, inputs), TEMPLATES, with_rivals_refused())
    found = operators(result)
    assert found["conv"] == found["conv_batch_norm"] == 0
    assert channels == 8 or not found


def test_float32_stays() -> None:
    module = nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [torch.nn.functional.conv2d(x, weight)]

    x = torch.randn(2, 32, 8, 8).contiguous(memory_format=torch.channels_last)
    result, _ = fuse(trace(function, [x, module.weight.detach()]), TEMPLATES, with_rivals_refused())
    assert not operators(result)
