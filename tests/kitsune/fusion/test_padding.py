"""Which convolutions get more input channels, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models
from kitsune.capture.trace import trace
from kitsune.fusion import padding
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

TEMPLATES = (padding.forward, padding.weight_gradient)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}

Convolution = Callable[..., Tensor]
Function = Callable[..., list[Tensor]]


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """Where cuDNN may round to it, it does so for some numbers of channels only: then more are refused."""
    convolutions = torch.backends.cudnn.conv
    before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
    yield
    convolutions.fp32_precision = before


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, weight, bias, stride=2, padding=1, dilation=1)


def training(forward: Convolution, *, of_input: bool = False) -> Function:
    """The result of `forward`, and the gradients of its parameters, or of all it takes, for its square."""

    def function(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in parameters]
        x = x.detach().requires_grad_(of_input)
        y = forward(x, *leaves)
        wanted = [x, *leaves] if of_input else leaves
        return [y, *torch.autograd.grad(y.float().square().sum(), wanted)]

    return function


def tensors(
    channels: int, *, layout: str = "channels last", dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Images (2, channels, 9, 7), the weight and bias of a 3x3 convolution to 8 channels."""
    images = [torch.randn(2, channels, 9, 7), torch.randn(8, channels, 3, 3)]
    formatted = [image.to(memory_format=LAYOUTS[layout]) for image in images]
    return [tensor.to(device, dtype) for tensor in (*formatted, torch.randn(8))]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 10])
def test_channels_are_padded_once_for_both_directions(
    channels: int, dtype: torch.dtype, layout: str, device: str
) -> None:
    given = tensors(channels, layout=layout, dtype=dtype, device=device)
    module, new = fused(training(convolution), given, TEMPLATES)
    found = operators(new, "aten")
    assert (found["constant_pad_nd"], found["convolution"], found["convolution_backward"]) == (2, 1, 1), told(new)
    assert padded_channels(new) == [-channels % 8 + channels] * 2
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert_alike(run(new, given), run(module, given), rtol=tolerance, atol=tolerance)


def padded_channels(module: torch.fx.GraphModule) -> list[int]:
    """Of the input of each convolution, forward and backward."""
    places = {torch.ops.aten.convolution.default: 0, torch.ops.aten.convolution_backward.default: 1}
    return [node.args[places[node.target]].meta["val"].size(1) for node in module.graph.nodes if node.target in places]


def test_autocast() -> None:
    given = tensors(3)[:2]
    module, new = fused(training(in_autocast(convolution, torch.bfloat16)), given, TEMPLATES)
    assert padded_channels(new) == [8, 8]
    assert operators(new, "aten")["constant_pad_nd"] == 2
    found, wanted = run(new, given), run(module, given)
    exact = training(convolution)(*(tensor.double() for tensor in given))
    for one, other, true in zip(found, wanted, exact, strict=False):
        assert one.stride() == other.stride()
        assert distance(one, true) <= 2 * distance(other, true) + 1e-6


def distance(one: Tensor, other: Tensor) -> float:
    return float((torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)).detach())


def test_one_padded_input_serves_several_convolutions() -> None:
    x, weight, _ = tensors(3)
    given = [x, weight, weight.sin()]

    def branches(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return convolution(x, one) + convolution(x, other)

    module, new = fused(training(branches), given, TEMPLATES)
    assert operators(new, "aten")["constant_pad_nd"] == 3
    assert_alike(run(new, given), run(module, given), rtol=1e-4, atol=1e-4)


def test_what_was_padded_before_a_write_is_padded_again() -> None:
    x, weight, _ = tensors(3)

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        first = convolution(x, weight)
        x.mul_(2)
        return [first, convolution(x, weight)]

    module, new = fused(function, [x, weight], TEMPLATES)
    assert operators(new, "aten")["constant_pad_nd"] == 3
    assert_alike(run(new, [x, weight]), run(module, [x, weight]), rtol=1e-4, atol=1e-4)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight[:, :1], groups=2)


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(x[:, :1].expand(-1, 8, -1, -1), weight)


def of_a_line(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x[..., 0], weight[..., 0])


@pytest.mark.parametrize(
    ("forward", "channels", "dtype"),
    [
        (grouped, 2, torch.float32),
        (transposed, 3, torch.float32),
        (of_a_line, 3, torch.float32),
        (convolution, 8, torch.float32),
        (convolution, 3, torch.float64),
    ],
)
def test_what_does_not_belong_to_it_stays(forward: Convolution, channels: int, dtype: torch.dtype) -> None:
    new, fusions = fuse(trace(training(forward), tensors(channels, dtype=dtype)[:2]), TEMPLATES)
    assert not fusions
    assert operators(new, "aten")["convolution"] == 1


def test_a_wanted_gradient_of_the_input_keeps_the_backward() -> None:
    given = tensors(3)
    module, new = fused(training(convolution, of_input=True), given, TEMPLATES)
    assert padded_channels(new) == [8, 3]
    assert_alike(run(new, given), run(module, given), rtol=1e-4, atol=1e-4)


def test_a_backward_alone_pads_for_itself() -> None:
    given = tensors(3)
    module = trace(training(convolution), given)
    new, fusions = fuse(module, (padding.weight_gradient,))
    assert len(fusions) == 1
    assert padded_channels(new) == [3, 8]
    assert_alike(run(new, given), run(module, given), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resnet18(dtype: torch.dtype) -> None:
    workload = models.build("resnet18", seed=0)
    x, y = workload.batch(2, index=0)
    step = traced_step(InAutocast(workload.module, dtype), torch.nn.functional.cross_entropy, x, y)
    new, fusions = fuse(step.module, TEMPLATES)
    assert [fusion.template for fusion in fusions] == [
        "convolution of padded channels",
        "weight gradient of padded channels",
    ]
    assert operators(new, "aten")["constant_pad_nd"] == 2
    # What the first layer rounds otherwise comes back through all others: an eighth of gradients in bfloat16.
    tolerance = 2e-3 if dtype == torch.float32 else 0.25
    for one, other in zip(run(new, step.inputs), run(step.module, step.inputs), strict=True):
        error = torch.linalg.vector_norm((one - other).double())
        assert error <= tolerance * torch.linalg.vector_norm(other.double()) + 1e-5


def test_lenet_and_the_judge() -> None:
    workload = models.build("lenet", seed=0)
    step = traced_step(workload.module, torch.nn.functional.cross_entropy, *workload.batch(2, index=0))
    new, fusions = fuse(step.module, TEMPLATES, never)
    assert len(fusions) == 3
    assert all(map(torch.equal, run(new, step.inputs), run(step.module, step.inputs)))
    new, _ = fuse(step.module, TEMPLATES, always)
    assert padded_channels(new) == [8, 8, 6, 8]
    assert_alike(run(new, step.inputs), run(step.module, step.inputs), rtol=1e-3, atol=1e-4)
