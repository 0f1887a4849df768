"""What is recognized as a linear layer with its activation, forward and backward, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import models
from kitsune.capture.trace import trace
from kitsune.fusion import linear
from kitsune.kernels.linear import ACTIVATIONS
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
)
from tests.kitsune.kernels.interpreter import error, normal
from tests.kitsune.passes.running import calls
from tests.kitsune.steps import traced_step

TEMPLATES = (linear.forward, linear.backward)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
ACTIVE = [name for name in ACTIVATIONS if name != "none"]
FORWARDS = {"relu", "tanh", "gelu", "silu"}
BACKWARDS = {"threshold_backward", "tanh_backward", "gelu_backward", "silu_backward"}

Forward = Callable[..., Tensor]


def inputs(lead: tuple[int, ...] = (5,), device: str = "cpu") -> list[Tensor]:
    """Of two layers, 6 to 7 to 4: the input, and weight and bias of both, exact in bfloat16 and half precision."""
    shapes = [(*lead, 6), (7, 6), (7,), (4, 7), (4,)]
    return [normal(shape, torch.bfloat16, device, place).float() for place, shape in enumerate(shapes)]


def two_layers(activation: str, *, biases: bool = True) -> Forward:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, last_weight: Tensor, last_bias: Tensor) -> Tensor:
        y = ACTIVATIONS[activation](F.linear(x, weight, bias if biases else None))
        return F.linear(y, last_weight, last_bias if biases else None)

    return forward


def gradients(forward: Forward, dtype: torch.dtype = torch.float32) -> Callable[..., list[Tensor | None]]:
    """Returns what `forward` does under autocast to `dtype`, and the gradients of its square."""

    def function(*tensors: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        y = in_autocast(forward, dtype)(*leaves)
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)]

    return function


def kept(module: fx.GraphModule) -> list[object]:
    """Whether each of its fused layers keeps the pre-activation."""
    return [node.kwargs["keep_preactivation"] for node in calls(module, torch.ops.kitsune.linear_activation.default)]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("activation", ACTIVE)
def test_two_layers(activation: str, lead: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    forward, tensors = two_layers(activation), inputs(lead, device)
    module, new = fused(gradients(forward, dtype), tensors, TEMPLATES)
    casts = dtype != torch.float32
    assert operators(new) == {"linear_activation": 1 + casts, "linear_input_gradient": 1 + casts}
    assert not operators(new, "aten").keys() & (FORWARDS | BACKWARDS)
    assert kept(new)[0] is (activation in linear.OF_PREACTIVATION)
    wide = [tensor.double() for tensor in tensors]
    exact = run(trace(gradients(forward), wide), wide)
    for one, other, wanted in zip(run(new, tensors), run(module, tensors), exact, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert error(one, wanted) <= 2 * error(other, wanted) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_biases(dtype: torch.dtype) -> None:
    tensors = inputs((2, 3))
    module, new = fused(gradients(two_layers("gelu", biases=False), dtype), tensors, TEMPLATES)
    assert operators(new)["linear_activation"] == 1
    assert [node.args[2] for node in calls(new, torch.ops.kitsune.linear_activation.default)] == [None]
    assert operators(new)["linear_input_gradient"] >= 1
    assert_alike(run(new, tensors), run(module, tensors), rtol=0.05, atol=0.5 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_bias_that_is_added(lead: tuple[int, ...], is_first: bool) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor]:
        product = x @ weight.t()
        return [torch.tanh(bias + product if is_first else product + bias), (x @ weight.t()) + bias]

    tensors = inputs(lead)
    module, new = fused(function, tensors, TEMPLATES)
    assert operators(new) == {"linear_activation": 2}
    assert not operators(new, "aten").keys() & {"mm", "add", "tanh"}
    assert_alike(run(new, tensors), run(module, tensors))


def test_the_preactivation_is_kept_in_each_shape_that_others_use() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor]:
        before = torch.addmm(bias, x.flatten(0, 1), weight.t())
        viewed = before.view(2, 3, 7)
        return [F.silu(viewed), before.exp(), viewed.sin()]

    tensors = inputs((2, 3))
    module, new = fused(function, tensors, TEMPLATES)
    assert kept(new) == [True]
    assert_alike(run(new, tensors), run(module, tensors))


def test_nothing_is_kept_for_a_backward_that_is_not_there() -> None:
    def function(*tensors: Tensor) -> list[Tensor]:
        return [two_layers("gelu")(*tensors)]

    tensors = inputs()
    module, new = fused(function, tensors, TEMPLATES)
    assert kept(new) == [False]
    assert_alike(run(new, tensors), run(module, tensors))


def test_casts_go_with_their_last_user() -> None:
    tensors = inputs()
    _, new = fused(gradients(two_layers("relu"), torch.bfloat16), tensors, TEMPLATES)
    weights = {node for node in new.graph.nodes if node.op == "placeholder"} - {next(iter(new.graph.nodes))}
    assert not [node for node in calls(new, torch.ops.aten._to_copy.default) if node.args[0] in weights]


def test_a_cast_is_read_again_where_what_it_casts_is_written_meanwhile() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor]:
        cast = weight.bfloat16()
        weight.add_(1)
        return [F.relu(F.linear(x.bfloat16(), cast, bias.bfloat16())), cast]

    tensors = inputs()
    module, new = fused(function, tensors, TEMPLATES)
    (layer,) = calls(new, torch.ops.kitsune.linear_activation.default)
    assert isinstance(layer.args[1], fx.Node)
    assert layer.args[1].target is torch.ops.aten._to_copy.default
    assert_alike(run(new, tensors), run(module, tensors), rtol=0.01, atol=0.01)


def test_a_cast_that_others_use_is_read_if_reading_what_it_casts_is_not_faster() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor]:
        cast = weight.bfloat16()
        return [F.relu(F.linear(x.bfloat16(), cast, bias.bfloat16())), cast]

    tensors = inputs()
    refused: list[object] = []

    def not_the_first(alone: object) -> object:
        refused.append(alone)
        return never(alone) if len(refused) == 1 else always(alone)  # type: ignore[arg-type]

    module = trace(function, tensors)
    new, fusions = fuse(module, TEMPLATES, not_the_first)  # type: ignore[arg-type]
    assert len(refused) == 2
    assert [fusion.refusal for fusion in fusions] == [None]
    assert operators(new, "aten")["_to_copy"] == 1
    assert_alike(run(new, tensors), run(module, tensors), rtol=0.01, atol=0.01)


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_only_where_pytorch_may_use_it(precision: str) -> None:
    _, new = fused(gradients(two_layers("relu")), inputs(), TEMPLATES)
    targets = torch.ops.kitsune.linear_activation.default, torch.ops.kitsune.linear_input_gradient.default
    found = [node.kwargs["allow_tf32"] for target in targets for node in calls(new, target)]
    assert found == [precision == "tf32"] * 2


def scaled(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.relu(torch.addmm(bias, x, weight.t(), alpha=2))


def scaled_bias(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.relu(torch.addmm(bias, x, weight.t(), beta=2))


def matrix_added(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.relu(torch.addmm(bias.expand(5, 7) * x[:, :1], x, weight.t()))


def not_transposed(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.relu(torch.addmm(bias[:6], x[:, :1].expand(5, 7), weight))


def used_elsewhere(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    before = F.linear(x, weight, bias)
    return F.relu(before) * before


def another_activation(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.leaky_relu(F.linear(x, weight, bias))


def another_threshold(*tensors: Tensor) -> Tensor:
    x, weight, bias, last_weight, last_bias = tensors
    return F.linear(F.threshold(F.linear(x, weight, bias), 0.5, 0.0), last_weight, last_bias)


def column_added(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.relu(x @ weight.t() + bias[:5, None])


def scaled_sum(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return F.relu(torch.add(x @ weight.t(), bias, alpha=2))


def no_layer(x: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    return F.relu(x * weight[:5])


NEAR_MISSES = (
    scaled, scaled_bias, matrix_added, not_transposed, used_elsewhere, another_activation, another_threshold,
    column_added, scaled_sum, no_layer,
)  # fmt: skip


@pytest.mark.parametrize("forward", NEAR_MISSES)
def test_what_is_no_layer_with_its_activation_stays(forward: Forward) -> None:
    module, new = fused(gradients(forward), inputs(), TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_float64_stays() -> None:
    tensors = [tensor.double() for tensor in inputs()]
    _, new = fused(gradients(two_layers("relu")), tensors, TEMPLATES)
    assert not operators(new)


def test_a_gradient_that_others_use_stays() -> None:
    """The layer's input is used twice, so that its gradient is a sum."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor, last_weight: Tensor, last_bias: Tensor) -> Tensor:
        y = F.relu(F.linear(x, weight, bias))
        return F.linear(y, last_weight, last_bias) + y[:, :4]

    module, new = fused(gradients(forward), inputs(), TEMPLATES)
    assert operators(new) == {"linear_activation": 1}
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_values_that_cannot_be_viewed_as_a_matrix_are_refused_with_the_reason() -> None:
    def function(grad: Tensor, weight: Tensor, saved: Tensor) -> list[Tensor]:
        return [torch.ops.aten.silu_backward((grad @ weight).view(2, 3, 7), saved.transpose(0, 1))]

    tensors = [normal(shape, torch.float32, "cpu", place) for place, shape in enumerate([(6, 4), (4, 7), (3, 2, 7)])]
    new, fusions = fuse(trace(function, tensors), TEMPLATES)
    assert not operators(new)
    assert [(fusion.refusal or "")[:24] for fusion in fusions] == ["it cannot be used here: "]


@pytest.mark.parametrize("judge", [always, never])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "layers", "backwards"), [("mlp", 2, 2), ("lenet", 2, 2)])
def test_steps(name: str, layers: int, backwards: int, dtype: torch.dtype, judge: Callable[..., object]) -> None:
    workload = models.build(name, seed=0)
    loss_fn = in_autocast(F.cross_entropy, dtype)
    step = traced_step(InAutocast(workload.module, dtype), loss_fn, *workload.batch(2, index=0))
    new, fusions = fuse(step.module, TEMPLATES, judge)  # type: ignore[arg-type]
    wanted = run(step.module, step.inputs)
    if judge is never:
        assert not operators(new)
        assert all(map(torch.equal, run(new, step.inputs), wanted))
        return
    casts = dtype != torch.float32
    assert len([fusion for fusion in fusions if fusion.refusal is None]) == sum(operators(new).values())
    assert operators(new)["linear_activation"] == layers + casts
    # Without a cast to save, the product before which no activation stands is left to the library.
    assert operators(new)["linear_input_gradient"] == backwards + (casts and name != "mlp")
    for one, other in zip(run(new, step.inputs), wanted, strict=True):
        difference = torch.linalg.vector_norm((one - other).double())
        assert difference <= 2 * torch.finfo(dtype).eps ** 0.75 * torch.linalg.vector_norm(other.double()) + 1e-5
