"""What is recognized as layer norm or RMS norm with its surroundings, and what it becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import decomposition_table

from kitsune.capture.trace import trace
from kitsune.fusion import norms, rms_norm
from tests.kitsune.fusion.running import always, assert_alike, fuse, fused, never, operators, run
from tests.kitsune.fusion.transformer_steps import (
    assert_close_to_the_original,
    bert_step,
    gpt2_step,
    llama_step,
    vit_step,
)
from tests.kitsune.kernels.interpreter import error, normal
from tests.kitsune.passes.running import calls
from tests.kitsune.steps import TracedStep

TEMPLATES = (norms.backward, rms_norm.backward, norms.forward, rms_norm.forward)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = (2, 3, 8)
EPS = 1e-5

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
Function = Callable[..., list[Tensor | None]]


def inputs(device: str = "cpu", shape: Sequence[int] = SHAPE) -> list[Tensor]:
    """Input, residual, weight, bias and two gradients, exact in bfloat16 and half precision."""
    shapes = [shape, shape, shape[-1:], shape[-1:], shape, shape]
    return [normal(tuple(one), torch.bfloat16, device, place).float() for place, one in enumerate(shapes)]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def own_rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS) + 0 * bias.sum()


def written_rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)) + 0 * bias.sum()


def squared_rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.mean(x.square(), dim=x.dim() - 1, keepdim=True) + EPS) * weight + 0 * bias.sum()


def alone(norm: Norm) -> Function:
    """Results and gradients of `norm`."""

    def function(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, __: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        y = norm(*leaves)
        return [y.detach(), *torch.autograd.grad([y], leaves, [grad])]

    return function


def in_a_stream(norm: Norm, half: torch.dtype, *, stream: torch.dtype | None = None) -> Function:
    """A residual stream of another type, which is normalized in that of the inputs for a layer in `half`.

    The layer gives the gradient, which joins that of the stream.
    """

    def function(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, grad_total: Tensor
    ) -> list[Tensor | None]:
        wide, kept = x.dtype, stream or x.dtype
        leaves = [x.to(half), residual.to(kept), weight, bias]
        leaves = [tensor.detach().requires_grad_() for tensor in leaves]
        total = leaves[0] + leaves[1]
        y = norm(total.to(wide), *leaves[2:]).flatten(0, -2).to(half)
        after = (total * 2).to(kept)
        grads = [grad.to(half).view_as(y), grad_total.to(kept)]
        return [y.detach(), after.detach(), *torch.autograd.grad([y, after], leaves, grads)]

    return function


def assert_precise(module: fx.GraphModule, new: fx.GraphModule, exact: Function, half: torch.dtype) -> None:
    """Of the kinds of the original's results, and not further from float64's."""
    tensors = inputs(str(next(node.meta["val"].device for node in module.graph.nodes if node.op == "placeholder")))
    wide = [tensor.double() for tensor in tensors]
    wanted = run(trace(exact, wide), wide)
    for one, other, right in zip(run(new, tensors), run(module, tensors), wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert error(one, right) <= 2 * error(other, right) + torch.finfo(half).eps


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_in_a_residual_stream(dtype: torch.dtype, device: str) -> None:
    module, new = fused(in_a_stream(layer_norm, dtype), inputs(device), TEMPLATES)
    assert operators(new) == {"layer_norm": 1, "layer_norm_backward": 1}
    (forward,) = calls(new, torch.ops.kitsune.layer_norm.default)
    (backward,) = calls(new, torch.ops.kitsune.layer_norm_backward.default)
    assert forward.args[1] is not None
    assert forward.kwargs["dtype"] == dtype
    assert backward.args[1] is not None
    assert backward.args[0].meta["val"].dtype == dtype
    assert not operators(new, "aten").keys() & {"add", "native_layer_norm", "native_layer_norm_backward"}
    assert_precise(module, new, in_a_stream(layer_norm, torch.float64), dtype)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("norm", [layer_norm, own_rms_norm, written_rms_norm, squared_rms_norm])
def test_a_stream_in_half_precision(norm: Norm, dtype: torch.dtype, device: str) -> None:
    module, new = fused(in_a_stream(norm, dtype, stream=dtype), inputs(device), TEMPLATES)
    name = "layer_norm" if norm is layer_norm else "rms_norm"
    assert operators(new) == {name: 1, f"{name}_backward": 1}
    (backward,) = calls(new, getattr(torch.ops.kitsune, f"{name}_backward").default)
    assert backward.args[1] is not None
    assert backward.args[2].meta["val"].dtype == dtype
    assert_precise(module, new, in_a_stream(norm, torch.float64, stream=torch.float64), dtype)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [own_rms_norm, written_rms_norm, squared_rms_norm])
def test_rms_norm_in_a_residual_stream(norm: Norm, dtype: torch.dtype, device: str) -> None:
    module, new = fused(in_a_stream(norm, dtype), inputs(device), TEMPLATES)
    assert operators(new) == {"rms_norm": 1, "rms_norm_backward": 1}
    (forward,) = calls(new, torch.ops.kitsune.rms_norm.default)
    (backward,) = calls(new, torch.ops.kitsune.rms_norm_backward.default)
    assert forward.args[1] is not None
    assert backward.args[1] is not None
    assert not operators(new, "aten").keys() & {"rsqrt", "pow", "mean", "div"}
    assert_precise(module, new, in_a_stream(norm, torch.float64), dtype)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("norm", [layer_norm, own_rms_norm, written_rms_norm, squared_rms_norm])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (1, 5)], ids=str)
def test_norms_alone(norm: Norm, shape: tuple[int, ...], device: str) -> None:
    module, new = fused(alone(norm), inputs(device, shape), TEMPLATES)
    name = "layer_norm" if norm is layer_norm else "rms_norm"
    assert operators(new) == {name: 1, f"{name}_backward": 1}
    assert_alike(run(new, inputs(device, shape)), run(module, inputs(device, shape)))


@pytest.fixture
def rms_norm_as_one_operator() -> Iterator[None]:
    """PyTorch's RMS norm is one operator, as on CUDA: on the CPU there is none, so that it is traced as others."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for operator in (torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default):
            library.impl(operator, decomposition_table[operator], "CPU")
        yield


@pytest.mark.usefixtures("rms_norm_as_one_operator")
@pytest.mark.parametrize("eps", [EPS, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorchs_own_operator(dtype: torch.dtype, eps: float | None) -> None:
    def norm(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def function(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, grad_total: Tensor
    ) -> list[Tensor | None]:
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in (x, residual, weight)]
        total = leaves[0] * 1 + leaves[1] * 1
        y = norm(total, leaves[2], bias)
        return [y.detach(), *torch.autograd.grad([y, total], leaves, [grad.to(dtype), grad_total.to(dtype)])]

    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(module, "aten").keys() >= {"_fused_rms_norm", "_fused_rms_norm_backward"}
    assert operators(new) == {"rms_norm": 1, "rms_norm_backward": 1}
    (forward,) = calls(new, torch.ops.kitsune.rms_norm.default)
    (backward,) = calls(new, torch.ops.kitsune.rms_norm_backward.default)
    assert forward.args[1] is not None
    assert forward.kwargs["eps"] == eps or eps is None
    assert backward.args[1] is not None
    rtol = max(1e-5, 2 * torch.finfo(dtype).eps)
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=rtol, atol=rtol)


def test_without_weight_and_bias() -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) + 0 * (weight + bias)

    module, new = fused(alone(norm), inputs(), TEMPLATES)
    (backward,) = calls(new, torch.ops.kitsune.layer_norm_backward.default)
    assert backward.kwargs == {"weight_dtype": None, "bias_dtype": None, "copy_dtype": None}
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_a_frozen_weight() -> None:
    def function(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, __: Tensor) -> list[Tensor | None]:
        leaf = x.detach().requires_grad_()
        ys = layer_norm(leaf, weight, bias), written_rms_norm(leaf, weight, bias)
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, [leaf], [grad, grad])]

    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(new) == {"layer_norm": 1, "layer_norm_backward": 1, "rms_norm": 1, "rms_norm_backward": 1}
    (backward,) = calls(new, torch.ops.kitsune.rms_norm_backward.default)
    assert backward.kwargs == {"weight_dtype": None, "copy_dtype": None}
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_casts_for_several_layers_are_made_once() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor | None]:
        y = layer_norm(x + residual, weight, bias)
        return [y.bfloat16().sin(), y.bfloat16().view(6, 8).cos(), y.transpose(0, 1).bfloat16().exp()]

    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(new) == {"layer_norm": 1}
    assert not operators(new, "aten").keys() & {"_to_copy", "add"}
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0, atol=0)


def test_a_cast_input_that_others_use_is_kept() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor | None]:
        total = x.bfloat16() + residual.bfloat16()
        wide, others = total.float(), x.bfloat16().float()
        ys = layer_norm(wide, weight, bias), layer_norm(others, weight, bias)
        return [*ys, wide.sin(), others.sin()]

    module, new = fused(function, inputs(), TEMPLATES)
    nodes = calls(new, torch.ops.kitsune.layer_norm.default)
    assert [node.args[0].meta["val"].dtype for node in nodes] == [torch.bfloat16] * 2
    assert sum(node.args[1] is not None for node in nodes) == 1
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_evenly_spaced_are_copied() -> None:
    """As PyTorch's own operators do."""

    def function(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, grad_total: Tensor
    ) -> list[Tensor | None]:
        x, residual = (tensor.detach().requires_grad_() for tensor in (x, residual))
        total = x.transpose(0, 1) + residual.transpose(0, 1)
        y = layer_norm(total, weight, bias)
        outputs = [y, total * 2]
        grads = [grad.transpose(0, 1), grad_total.transpose(0, 1)]
        return [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, [x, residual], grads)]

    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(new) == {"layer_norm": 1, "layer_norm_backward": 1}
    assert_alike(run(new, inputs()), run(module, inputs()))


def scaled(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor | None]:
    return [layer_norm(torch.add(x, residual, alpha=2), weight, bias)]


def repeated(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor | None]:
    return [layer_norm(x + residual[:1], weight, bias)]


def doubled(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, *__: Tensor) -> list[Tensor | None]:
    return [layer_norm(x + x, weight, bias)]


def a_number(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, *__: Tensor) -> list[Tensor | None]:
    return [layer_norm(x + 1, weight, bias)]


@pytest.mark.parametrize("function", [scaled, repeated, doubled, a_number], ids=lambda f: f.__name__)
def test_additions_that_stay(function: Function) -> None:
    module, new = fused(function, inputs(), TEMPLATES)
    (node,) = calls(new, torch.ops.kitsune.layer_norm.default)
    assert node.args[1] is None
    assert operators(new, "aten")["add"] == 1
    assert_alike(run(new, inputs()), run(module, inputs()))


def one_cast(y: Tensor) -> list[Tensor | None]:
    return [y.half() @ y.half().transpose(1, 2), y.sin()]


def two_casts(y: Tensor) -> list[Tensor | None]:
    return [y.bfloat16().exp(), y.sin(), y.bfloat16().cos(), y[0]]


def itself(y: Tensor) -> list[Tensor | None]:
    return [y, y.bfloat16()]


def cast_as_it_is_and_as_a_view(y: Tensor) -> list[Tensor | None]:
    return [y.bfloat16() * 2, y.view(-1, y.shape[-1]).bfloat16() * 3]


def cast_whole_and_in_part(y: Tensor) -> list[Tensor | None]:
    return [y.bfloat16() * 2, y[:, 0].bfloat16() * 3]


def cast_in_two_layouts(y: Tensor) -> list[Tensor | None]:
    turned = torch.ops.aten._to_copy.default(y.transpose(0, 1), dtype=torch.bfloat16)
    return [y.bfloat16() * 2, turned, y.sin()]


@pytest.mark.parametrize(
    ("use", "types"),
    [
        (cast_as_it_is_and_as_a_view, (torch.bfloat16, None)),
        (cast_whole_and_in_part, (torch.float32, torch.bfloat16)),
        (cast_in_two_layouts, (torch.float32, torch.bfloat16)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_result_is_written_once_in_each_precision(
    use: Callable[[Tensor], list[Tensor | None]], types: tuple[torch.dtype, torch.dtype | None]
) -> None:
    def function(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, *__: Tensor) -> list[Tensor | None]:
        return use(layer_norm(x, weight, bias))

    module, new = fused(function, inputs(), TEMPLATES)
    (node,) = calls(new, torch.ops.kitsune.layer_norm.default)
    assert (node.kwargs["dtype"], node.kwargs["copy_dtype"]) == types
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0.02, atol=0.02)


def plain_rms_norm(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("norm", [layer_norm, plain_rms_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("use", [one_cast, two_casts, itself], ids=lambda f: f.__name__)
def test_a_result_that_is_read_in_two_precisions(
    use: Callable[[Tensor], list[Tensor | None]], norm: Callable[..., Tensor], device: str
) -> None:
    """As after a post-norm: the residual stream in float32, and the next layer's input under autocast."""

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor | None]:
        return use(norm(x + residual, weight, bias))

    module, new = fused(function, inputs(device), TEMPLATES)
    (name,) = operators(new)
    (node,) = calls(new, getattr(torch.ops.kitsune, name).default)
    assert node.kwargs["dtype"] == torch.float32
    assert node.kwargs["copy_dtype"] == (torch.float16 if use is one_cast else torch.bfloat16)
    assert operators(new, "aten")["_to_copy"] == 0
    assert_alike(run(new, inputs(device)), run(module, inputs(device)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("norm", [layer_norm, plain_rms_norm], ids=lambda f: f.__name__)
def test_a_gradient_that_is_read_in_two_precisions(norm: Callable[..., Tensor], device: str) -> None:
    """As before a residual branch: the stream's gradient in float32, and that of the layer before under autocast."""

    def function(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, stream: Tensor
    ) -> list[Tensor | None]:
        leaf = x.detach().requires_grad_()
        y = norm(leaf, weight, bias)
        (grad_x,) = torch.autograd.grad([y, leaf * 1], [leaf], [grad, stream])
        return [y.detach(), grad_x.bfloat16().cos(), grad_x.sin()]

    module, new = fused(function, inputs(device), TEMPLATES)
    (name,) = [name for name in operators(new) if name.endswith("backward")]
    (node,) = calls(new, getattr(torch.ops.kitsune, name).default)
    assert node.kwargs["copy_dtype"] == torch.bfloat16
    assert node.args[1] is not None, "the stream's gradient is added first"
    assert operators(new, "aten")["_to_copy"] == 0
    assert_alike(run(new, inputs(device)), run(module, inputs(device)), rtol=0.02, atol=0.02)


def of_two_types(y: Tensor) -> list[Tensor | None]:
    return [y.bfloat16(), y.half()]


def to_double(y: Tensor) -> list[Tensor | None]:
    return [y.double()]


def overwritten(y: Tensor) -> list[Tensor | None]:
    one = y.bfloat16()
    return [one.view(-1)[:2].mul_(2), one, y.bfloat16()]


def overwritten_beside(y: Tensor) -> list[Tensor | None]:
    return [*overwritten(y), y.sin()]


def of_two_types_beside(y: Tensor) -> list[Tensor | None]:
    return [*of_two_types(y), y.sin()]


@pytest.mark.parametrize(
    "use",
    [of_two_types, to_double, overwritten, overwritten_beside, of_two_types_beside],
    ids=lambda f: f.__name__,
)
def test_casts_of_the_result_that_stay(use: Callable[[Tensor], list[Tensor | None]]) -> None:
    def function(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, *__: Tensor) -> list[Tensor | None]:
        return use(layer_norm(x, weight, bias))

    module, new = fused(function, inputs(), TEMPLATES)
    (node,) = calls(new, torch.ops.kitsune.layer_norm.default)
    assert node.kwargs["dtype"] == torch.float32
    assert operators(new, "aten")["_to_copy"] == operators(module, "aten")["_to_copy"]
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_an_input_that_is_overwritten_after_its_cast_is_read_there() -> None:
    def function(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, __: Tensor) -> list[Tensor | None]:
        half = x.bfloat16()
        wide = half.float().detach().requires_grad_()
        y = layer_norm(wide, weight, bias)
        (grad_x,) = torch.autograd.grad([y], [wide], [grad])
        kept = half.view(-1)
        kept[:3].mul_(2)
        return [y.detach(), grad_x, kept]

    module, new = fused(function, inputs(), TEMPLATES)
    (forward,) = calls(new, torch.ops.kitsune.layer_norm.default)
    assert forward.args[0].meta["val"].dtype == torch.float32
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_a_gradient_whose_cast_others_use_is_read_there() -> None:
    def function(x: Tensor, _: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, __: Tensor) -> list[Tensor | None]:
        leaf = x.detach().requires_grad_()
        wide = grad.bfloat16().float()
        return [wide.sin(), *torch.autograd.grad([layer_norm(leaf, weight, bias)], [leaf], [wide])]

    module, new = fused(function, inputs(), TEMPLATES)
    (backward,) = calls(new, torch.ops.kitsune.layer_norm_backward.default)
    assert backward.args[0].meta["val"].dtype == torch.float32
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_over_two_dimensions_stays() -> None:
    def function(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        y = F.layer_norm(leaves[0], SHAPE[1:], leaves[1])
        return [y.detach(), *torch.autograd.grad([y], leaves, [grad])]

    tensors = [torch.randn(SHAPE), torch.randn(SHAPE[1:]), torch.randn(SHAPE)]
    module, new = fused(function, tensors, TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, tensors), run(module, tensors))


def not_squared(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS)


def over_other_rows(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS)


def of_another_tensor(x: Tensor) -> Tensor:
    return x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def of_the_mean_of_all(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + EPS)


@pytest.mark.parametrize(
    "normalize", [not_squared, over_other_rows, of_another_tensor, of_the_mean_of_all], ids=lambda f: f.__name__
)
def test_what_is_no_rms_norm_stays(normalize: Callable[[Tensor], Tensor]) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normalize(x) * weight + 0 * bias

    module, new = fused(alone(norm), inputs(), TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_an_rms_norm_with_a_weight_for_each_element_stays() -> None:
    def function(x: Tensor, weight: Tensor, *rest: Tensor) -> list[Tensor | None]:
        return alone(written_rms_norm)(x, x, weight, *rest)

    x, weight, _, bias, *grads = inputs()
    module, new = fused(function, [x, weight, bias, *grads], TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, [x, weight, bias, *grads]), run(module, [x, weight, bias, *grads]))


def test_the_forward_stays_where_what_is_normalized_is_needed() -> None:
    def function(x: Tensor, _: Tensor, weight: Tensor, *__: Tensor) -> list[Tensor | None]:
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return [normalized * weight, normalized.sin()]

    _, new = fused(function, inputs(), TEMPLATES)
    assert not operators(new)


def assert_fused(step: TracedStep, dtype: torch.dtype, expected: dict[str, int]) -> None:
    new, _ = fuse(step.module, TEMPLATES, always)
    assert operators(new) == expected
    assert_close_to_the_original(run(new, step.inputs), run(step.module, step.inputs), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gpt2(dtype: torch.dtype) -> None:
    step = gpt2_step(dtype)
    new, fusions = fuse(step.module, TEMPLATES)
    names = [fusion.template for fusion in fusions]
    cast, copy = ("", "") if dtype == torch.float32 else (" + cast", " + copy")
    backward = Counter(name for name in names if name.startswith("layer norm backward + residual"))
    between = Counter({f"layer norm backward + residual{copy}": 3})  # layers, which read gradients in both precisions
    assert backward == between + Counter(["layer norm backward + residual"])
    assert names.count(f"residual + layer norm{cast}") == 4
    assert operators(new) == {"layer_norm": 5, "layer_norm_backward": 5}
    assert_close_to_the_original(run(new, step.inputs), run(step.module, step.inputs), dtype)


@pytest.mark.parametrize("make", [gpt2_step, bert_step], ids=lambda make: make.__name__)
def test_dropout_does_not_stand_in_between(make: Callable[..., TracedStep]) -> None:
    new, fusions = fuse(make(torch.bfloat16, dropout=0.1).module, TEMPLATES)
    assert operators(new) == {"layer_norm": 5, "layer_norm_backward": 5}
    assert sum(fusion.template.startswith("residual") for fusion in fusions if fusion.refusal is None) == 4


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("make", [bert_step, vit_step], ids=lambda make: make.__name__)
def test_models_with_layer_norm(make: Callable[[torch.dtype], TracedStep], dtype: torch.dtype) -> None:
    assert_fused(make(dtype), dtype, {"layer_norm": 5, "layer_norm_backward": 5})


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_llama(dtype: torch.dtype) -> None:
    step = llama_step(dtype)
    assert_fused(step, dtype, {"rms_norm": 5, "rms_norm_backward": 5})


def test_nothing_changes_where_the_judge_refuses() -> None:
    module = trace(in_a_stream(layer_norm, torch.bfloat16), inputs())
    new, fusions = fuse(module, TEMPLATES, never)
    assert len(fusions) > 2
    assert not operators(new)
    assert all(map(torch.equal, run(new, inputs()), run(module, inputs())))
