"""What is recognized as the last layer of a classifier with its loss and their backward, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import models
from kitsune.capture.trace import trace
from kitsune.fusion import head, linear
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
    told,
)
from tests.kitsune.kernels.interpreter import error, normal
from tests.kitsune.passes.running import calls
from tests.kitsune.steps import TracedStep, traced_step

TEMPLATES = (head.forward_and_backward,)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LOSS = {"_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data"}
BACKWARDS = {"threshold_backward", "tanh_backward", "gelu_backward", "silu_backward"}

Forward = Callable[..., Tensor]


def inputs(device: str = "cpu", num_classes: int = 4) -> list[Tensor]:
    """The input of a layer of 7 to 4 classes, its weight and bias, targets, and the gradient of the loss.

    One target is to be ignored. The numbers are exact in bfloat16 and half precision.
    """
    shapes = [(5, 7), (num_classes, 7), (num_classes,)]
    x, weight, bias = [normal(shape, torch.bfloat16, device, place).float() for place, shape in enumerate(shapes)]
    targets = torch.tensor([3, 0, -100, 1, 3], device=device)
    return [x, weight, bias, targets, torch.full((), 3.0, device=device)]


def gradients(forward: Forward, dtype: torch.dtype = torch.float32) -> Callable[..., list[Tensor | None]]:
    """Returns the loss that `forward` gives under autocast to `dtype`, and its gradients, three times a factor."""

    def function(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, factor: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        loss = in_autocast(forward, dtype)(*leaves, targets)
        scale = (factor * 3.0).to(loss.dtype).expand_as(loss)
        return [loss.detach(), *torch.autograd.grad([loss], leaves, [scale], allow_unused=True)]

    return function


def activated(activation: str) -> Forward:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(ACTIVATIONS[activation](x.to(_dtype_for(x))), weight, bias), targets)

    return forward


def _dtype_for(x: Tensor) -> torch.dtype:
    """What a layer before would have given."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def layer(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets)


def only_call(module: fx.GraphModule) -> fx.Node:
    (call,) = calls(module, torch.ops.kitsune.cross_entropy_head.default)
    return call


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_backward(activation: str, dtype: torch.dtype, device: str) -> None:
    forward, tensors = activated(activation), inputs(device)
    module, new = fused(gradients(forward, dtype), tensors, TEMPLATES)
    assert operators(new) == {"cross_entropy_head": 1}, told(new)
    assert only_call(new).args[5] == activation
    assert not operators(new, "aten").keys() & {*LOSS, *BACKWARDS, "addmm"}
    assert operators(new, "aten")["mm"] == 1  # the weight's gradient
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    exact = run(trace(gradients(forward), wide), wide)
    units = [4.0] + [1.0] * 8  # a logit that rounds otherwise shows in the one number that the loss is
    for one, other, wanted, unit in zip(run(new, tensors), run(module, tensors), exact, units, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if wanted.is_floating_point():
            assert error(one, wanted) <= 2 * error(other, wanted) + unit * torch.finfo(dtype).eps


def test_a_softmax_in_half_precision() -> None:
    """Autocast on GPUs casts what it gives, not what it takes."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(F.relu(x.bfloat16()), weight.bfloat16(), bias.bfloat16())
        return F.nll_loss(F.log_softmax(logits, 1).float(), targets)

    module, new = fused(gradients(forward), inputs(), TEMPLATES)
    assert operators(new) == {"cross_entropy_head": 1}, told(new)
    assert not operators(new, "aten").keys() & {*LOSS, *BACKWARDS, "addmm"}
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0.03, atol=0.03)


def test_without_bias_and_with_another_index_to_ignore() -> None:
    def forward(x: Tensor, weight: Tensor, _: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets, ignore_index=3)

    x, weight, bias, _, factor = inputs()
    tensors = [x, weight, bias, torch.tensor([3, 0, 2, 1, 3]), factor]
    module, new = fused(gradients(forward), tensors, TEMPLATES)
    assert only_call(new).args[2] is None
    assert only_call(new).kwargs["ignore_index"] == 3
    assert_alike(run(new, tensors), run(module, tensors))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_class_for_each_token(activation: str) -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        y = ACTIVATIONS[activation](x.expand(2, 5, 7) * 2)
        return F.cross_entropy(F.linear(y, weight, bias).flatten(0, 1), targets.repeat(2))

    module, new = fused(gradients(forward), inputs(), TEMPLATES)
    assert only_call(new).args[5] == activation
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_an_input_that_needs_no_gradient() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, factor: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (weight, bias)]
        loss = layer(x, *leaves, targets)
        return [loss.detach(), *torch.autograd.grad([loss], leaves, [factor])]

    module, new = fused(function, inputs(), TEMPLATES)
    assert only_call(new).args[5] == "none"
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_an_activation_backward_that_is_not_known_stays() -> None:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        return layer(F.leaky_relu(x), weight, bias, targets)

    module, new = fused(gradients(forward), inputs(), TEMPLATES)
    assert only_call(new).args[5] == "none"
    assert operators(new, "aten")["leaky_relu_backward"] == 1
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_the_judge_may_prefer_less() -> None:
    def only_without_the_activation(alone: object) -> object:
        backwards = [name for name in operators(alone.before, "aten") if name == "threshold_backward"]  # type: ignore[attr-defined]
        return never(alone) if backwards else always(alone)  # type: ignore[arg-type]

    module = trace(gradients(activated("relu")), inputs())
    new, _ = fuse(module, TEMPLATES, only_without_the_activation)  # type: ignore[arg-type]
    assert only_call(new).args[5] == "none"
    assert operators(new, "aten")["threshold_backward"] == 1
    assert_alike(run(new, inputs()), run(module, inputs()))


def class_weights(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, weight=bias.detach().exp())


def summed(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="sum")


def each(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none").square().sum()


def smoothed(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, label_smoothing=0.1)


def regularized(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits, targets) + logits.square().mean()


def entropy(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logarithms = F.log_softmax(F.linear(x, weight, bias), 1)
    return F.nll_loss(logarithms, targets) + logarithms.mean()


def over_rows(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(F.linear(x, weight, bias), 0), targets)


def scaled_logits(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias) * 2, targets)


def no_layer(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x * weight[:1] + bias[:1], targets)


NEAR_MISSES = (class_weights, summed, each, smoothed, regularized, entropy, over_rows, scaled_logits, no_layer)


@pytest.mark.parametrize("forward", NEAR_MISSES)
def test_other_losses_stay(forward: Forward) -> None:
    module, new = fused(gradients(forward), inputs(), TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_logits_that_others_use_stay() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, _: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        logits = F.linear(*leaves)
        loss = F.cross_entropy(logits, targets)
        return [logits.argmax(1), *torch.autograd.grad([loss], leaves)]

    module, new = fused(function, inputs(), TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_a_loss_that_is_used_before_its_gradient_is_known_stays() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, _: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        loss = layer(*leaves, targets)
        return [loss.detach(), *torch.autograd.grad([loss], leaves, [loss.detach().sqrt()])]

    module, new = fused(function, inputs(), TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_the_forward_alone_stays() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, _: Tensor) -> list[Tensor]:
        return [layer(x, weight, bias, targets)]

    _, new = fused(function, inputs(), TEMPLATES)
    assert not operators(new)


def test_many_classes_are_refused_with_the_reason() -> None:
    new, fusions = fuse(trace(gradients(layer), inputs(num_classes=129)), TEMPLATES)
    assert not operators(new)
    assert fusions
    assert all("takes 1 to 128 classes: got 129" in (fusion.refusal or "") for fusion in fusions)


def test_a_loss_in_bfloat16_stays() -> None:
    """The kernel's is in float32."""
    tensors = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs()]
    new, _ = fuse(trace(gradients(layer), tensors), TEMPLATES)
    assert not operators(new)


def assert_close_to_the_original(new: fx.GraphModule, step: TracedStep, dtype: torch.dtype) -> None:
    tolerance = 2 * torch.finfo(dtype).eps ** 0.75
    for one, other in zip(run(new, step.inputs), run(step.module, step.inputs), strict=True):
        difference = torch.linalg.vector_norm((one - other).double())
        assert difference <= tolerance * torch.linalg.vector_norm(other.double()) + 1e-5


def model_step(name: str, dtype: torch.dtype) -> TracedStep:
    workload = models.build(name, seed=0)
    loss_fn = in_autocast(F.cross_entropy, dtype)
    return traced_step(InAutocast(workload.module, dtype), loss_fn, *workload.batch(2, index=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_steps_with_layers_before(name: str, dtype: torch.dtype) -> None:
    step = model_step(name, dtype)
    new, _ = fuse(step.module, (*TEMPLATES, linear.forward, linear.backward))
    assert only_call(new).args[5] == "relu"
    assert operators(new)["linear_activation"] == 2
    assert not operators(new, "aten").keys() & {*LOSS, "addmm"}
    assert_close_to_the_original(new, step, dtype)


@pytest.mark.slow
def test_resnet18() -> None:
    step = model_step("resnet18", torch.bfloat16)
    new, _ = fuse(step.module, TEMPLATES)
    assert only_call(new).args[5] == "none"
    assert not operators(new, "aten").keys() & {*LOSS, "addmm"}
    assert_close_to_the_original(new, step, torch.bfloat16)


def test_nothing_changes_where_the_judge_refuses() -> None:
    step = model_step("mlp", torch.float32)
    new, fusions = fuse(step.module, TEMPLATES, never)
    assert fusions
    assert not operators(new)
    assert all(map(torch.equal, run(new, step.inputs), run(step.module, step.inputs)))
