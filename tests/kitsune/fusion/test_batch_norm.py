"""What is recognized as batch norm with its surroundings, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import models
from kitsune.capture.trace import trace
from kitsune.fusion import batch_norm
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from tests.kitsune.fusion.running import always, assert_alike, fuse, fused, never, operators, run, told
from tests.kitsune.steps import traced_step

TEMPLATES = (batch_norm.forward, batch_norm.backward)
SHAPE = (3, 4, 5, 2)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def norm(x: Tensor, state: list[Tensor]) -> Tensor:
    weight, bias, mean, var = state
    return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.2, eps=1e-3)


def inputs(count: int = 1, branches: int = 1, device: str = "cpu") -> list[Tensor]:
    """Images and, for each branch, weight, bias, running mean and variance."""
    torch.manual_seed(7)
    images = [torch.randn(SHAPE).to(memory_format=torch.channels_last) for _ in range(count)]
    state = [torch.rand(SHAPE[1]) + 0.1 * index for _ in range(branches) for index in range(4)]
    return [tensor.to(device) for tensor in (*images, *state)]


def gradients(forward: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Returns what `forward` does, and the gradients of all but running statistics, for its square."""

    def function(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        places = [place for place in range(len(tensors)) if (place - len(tensors)) % 4 < 2 or tensors[place].dim() > 1]
        result = forward(*(leaves[place] if place in places else tensors[place] for place in range(len(tensors))))
        return [result, *torch.autograd.grad(result.square().sum(), [leaves[place] for place in places])]

    return function


def plain(x: Tensor, *state: Tensor) -> Tensor:
    return norm(x, list(state))


def with_relu(x: Tensor, *state: Tensor) -> Tensor:
    return F.relu(norm(x, list(state)))


def with_relu_in_place(x: Tensor, *state: Tensor) -> Tensor:
    return F.relu(norm(x, list(state)), inplace=True)


def with_residual(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    return other + norm(x, list(state))


def block(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    y = norm(x, list(state))
    y += other
    return F.relu(y, inplace=True)


def join(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    return F.relu(norm(x, list(state[:4])) + norm(other.sin(), list(state[4:])))


CASES = {
    "plain": (plain, inputs(), {"batch_norm": 1, "batch_norm_backward": 1}),
    "relu": (with_relu, inputs(), {"batch_norm": 1, "batch_norm_backward": 1}),
    "relu in place": (with_relu_in_place, inputs(), {"batch_norm": 1, "batch_norm_backward": 1}),
    "residual": (with_residual, inputs(2), {"batch_norm": 1, "batch_norm_backward": 1}),
    "block": (block, inputs(2), {"batch_norm": 1, "batch_norm_residual_backward": 1}),
    "join": (join, inputs(2, 2), {"batch_norm_join": 1, "batch_norm_join_backward": 1}),
}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", CASES)
def test_what_is_fused_computes_the_same(case: str, device: str) -> None:
    function, tensors, wanted = CASES[case]
    tensors = [tensor.to(device) for tensor in tensors]
    module, new = fused(gradients(function), tensors, TEMPLATES)
    assert operators(new) == wanted, told(new)
    assert not operators(new, "aten").keys() & {"native_batch_norm", "native_batch_norm_backward"}
    if case not in ("plain", "residual"):
        assert not operators(new, "aten").keys() & {"relu", "relu_", "threshold_backward"}
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def test_without_affine_parameters_and_running_statistics() -> None:
    def function(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = F.relu(F.batch_norm(leaf, None, None, training=True))
        return [y, *torch.autograd.grad(y.square().sum(), [leaf])]

    tensors = inputs()[:1]
    module, new = fused(function, tensors, TEMPLATES)
    assert operators(new) == {"batch_norm": 1, "batch_norm_backward": 1}
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def used_twice(x: Tensor, *state: Tensor) -> Tensor:
    y = norm(x, list(state))
    return F.relu(y) + y


def doubled(x: Tensor, *state: Tensor) -> Tensor:
    y = norm(x, list(state))
    return F.relu(y + y)


def broadcast(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    return F.relu(norm(x, list(state)) + other[:, :1])


def scaled(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    return F.relu(torch.add(norm(x, list(state)), other, alpha=2))


@pytest.mark.parametrize(("function", "count"), [(used_twice, 1), (doubled, 1), (broadcast, 2), (scaled, 2)])
def test_what_does_not_belong_to_it_stays(function: Callable[..., Tensor], count: int) -> None:
    tensors = inputs(count)
    module, new = fused(gradients(function), tensors, TEMPLATES)
    assert operators(new)["batch_norm"] == 1
    assert operators(new, "aten")["relu"] + operators(new, "aten")["relu_"] == 1
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def test_evaluation_is_left_alone() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        return [F.relu(F.batch_norm(x, mean, var, weight, bias, training=False))]

    _, new = fused(function, inputs(), TEMPLATES)
    assert not operators(new)


def test_float64_is_refused_with_the_reason() -> None:
    tensors = [tensor.double() for tensor in inputs()]
    new, fusions = fuse(trace(gradients(with_relu), tensors), TEMPLATES)
    assert not operators(new)
    assert fusions
    assert all("float" in (fusion.refusal or "") for fusion in fusions)


def contiguous(x: Tensor, *state: Tensor) -> Tensor:
    return with_relu(x, *state).contiguous()


def mean_of_block(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    """As a ResNet ends."""
    return block(x, other, *state).mean((2, 3))


def mean_of_join(x: Tensor, other: Tensor, *state: Tensor) -> Tensor:
    return join(x, other, *state).mean((2, 3))


@pytest.mark.parametrize(
    ("function", "images", "branches", "backward"),
    [
        (contiguous, 1, 1, "batch_norm_backward"),
        (mean_of_block, 2, 1, "batch_norm_residual_backward"),
        (mean_of_join, 2, 2, "batch_norm_join_backward"),
    ],
)
def test_a_gradient_laid_out_differently_is_copied(
    function: Callable[..., Tensor], images: int, branches: int, backward: str
) -> None:
    tensors = inputs(images, branches)
    module, new = fused(gradients(function), tensors, TEMPLATES)
    (call,) = [node for node in new.graph.nodes if node.name.startswith(backward)]
    assert call.args[0].target is torch.ops.aten.clone.default
    assert call.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def used_by_two(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Two gradients meet at its result."""

    def two(*tensors: Tensor) -> Tensor:
        y = function(*tensors)
        return y.sin() + y.exp()

    return two


SUMS = {
    "plain": (plain, inputs(), "batch_norm_backward"),
    "relu": (with_relu, inputs(), "batch_norm_backward"),
    "block": (block, inputs(2), "batch_norm_residual_backward"),
    "join": (join, inputs(2, 2), "batch_norm_join_backward"),
}


def calls_of(module: fx.GraphModule, name: str) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is getattr(torch.ops.kitsune, name).default]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", SUMS)
def test_the_sum_of_two_gradients_is_taken_in(case: str, device: str) -> None:
    function, tensors, backward = SUMS[case]
    tensors = [tensor.to(device) for tensor in tensors]
    module, new = fused(gradients(used_by_two(function)), tensors, TEMPLATES)
    (call,) = calls_of(new, backward)
    assert call.kwargs["added_grad_y"] is not None, told(new)
    before, after = operators(module, "aten"), operators(new, "aten")
    forward = 0 if case in ("plain", "relu") else 1
    assert before["add"] + before["add_"] - after["add"] - after["add_"] == 1 + forward
    assert any(fusion.template.startswith("add + ") for fusion in new.meta["fusions"])
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def test_what_is_rounded_stays_so() -> None:
    """In half precision the sum is rounded before it is used, taken in or not."""
    state = inputs()[1:]
    images = [image.bfloat16() for image in inputs(4)[:4]]

    def function(one: Tensor, other: Tensor, y: Tensor, x: Tensor, *state: Tensor) -> list[Tensor]:
        return backward_of(lambda: one + other, y, x, *state)

    module = trace(function, [*images, *state])

    def refuse_sums(alone: Alone) -> Verdict:
        is_sum = any(node.target is torch.ops.aten.add.Tensor for node in alone.before.graph.nodes)
        return never(alone) if is_sum else always(alone)

    taken, left = fuse(module, TEMPLATES)[0], fuse(module, TEMPLATES, refuse_sums)[0]
    assert operators(taken, "aten")["add"] == 0
    assert operators(left, "aten")["add"] == 1
    assert all(map(torch.equal, run(taken, [*images, *state]), run(left, [*images, *state])))


def backward_of(add: Callable[[], Tensor], y: Tensor, x: Tensor, *state: Tensor) -> list[Tensor]:
    weight, _, mean, var = state
    grad = add()
    masked = torch.ops.aten.threshold_backward(grad, y, 0)
    grads = torch.ops.aten.native_batch_norm_backward(masked, x, weight, None, None, mean, var, True, 1e-3, [True] * 3)
    return [*grads, masked]


@pytest.mark.parametrize(
    "add",
    [
        lambda one, other: torch.add(one, other, alpha=2),
        lambda one, other: one + other[:, :1],
        lambda one, _: one + one,
        lambda one, _: one + 1,
        lambda one, other: one + other.half(),
        lambda one, other: one + other.contiguous(),
        lambda one, other: one - other,
    ],
    ids=["scaled", "broadcast", "doubled", "number", "types", "layouts", "difference"],
)
def test_other_sums_are_left_alone(add: Callable[[Tensor, Tensor], Tensor]) -> None:
    tensors = inputs(4)

    def function(one: Tensor, other: Tensor, y: Tensor, x: Tensor, *state: Tensor) -> list[Tensor]:
        return backward_of(lambda: add(one, other), y, x, *state)

    module, new = fused(function, tensors, TEMPLATES)
    (call,) = calls_of(new, "batch_norm_residual_backward")
    assert call.kwargs.get("added_grad_y") is None
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def test_a_sum_that_others_use_is_left_alone() -> None:
    tensors = inputs(4)

    def function(one: Tensor, other: Tensor, y: Tensor, x: Tensor, *state: Tensor) -> list[Tensor]:
        total = one + other
        return [*backward_of(lambda: total, y, x, *state), total.sin()]

    module, new = fused(function, tensors, TEMPLATES)
    (call,) = calls_of(new, "batch_norm_residual_backward")
    assert call.kwargs.get("added_grad_y") is None
    assert operators(new, "aten")["add"] == 1
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-4)


def resnet_step(**options: bool) -> tuple[nn.Module, Tensor, Tensor]:
    workload = models.build("resnet18", seed=0)
    x, y = workload.batch(2, index=0)
    return workload.module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last), y


@pytest.mark.parametrize("judge", [pytest.param(always, marks=pytest.mark.slow), never])
def test_resnet18(judge: object) -> None:
    module, x, y = resnet_step()
    step = traced_step(module, nn.functional.cross_entropy, x, y)
    new, fusions = fuse(step.module, TEMPLATES, judge)  # type: ignore[arg-type]
    if judge is never:
        assert not operators(new)
        assert len(fusions) >= 40
        wanted = run(step.module, step.inputs)
        assert all(map(torch.equal, run(new, step.inputs), wanted))
        return
    assert operators(new)["batch_norm"] == 14
    assert operators(new)["batch_norm_join"] == operators(new)["batch_norm_join_backward"] == 3
    assert operators(new)["batch_norm_backward"] + operators(new)["batch_norm_residual_backward"] == 14
    added = [node for node in new.graph.nodes if node.kwargs.get("added_grad_y") is not None]
    assert len(added) == 8  # one for the input of each block
    exact = run(step.module, step.inputs)
    for one, other in zip(run(new, step.inputs), exact, strict=True):
        error = torch.linalg.vector_norm((one - other).double())
        assert error <= 2e-3 * torch.linalg.vector_norm(other.double()) + 1e-5
