"""Where a vocabulary gets more entries, and that everything else stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.fusion import casts, padded_vocabulary, vocabulary
from kitsune.fusion.ahead import Foresight
from kitsune.fusion.engine import FusionEngine
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from kitsune.graph.values import wrong_value
from kitsune.passes import pipeline
from kitsune.passes.regions import fuse_regions
from tests.kitsune.fusion.running import always, assert_alike, fuse, fused, operators, run, told
from tests.kitsune.kernels.interpreter import error, normal
from tests.kitsune.passes.running import OPERATORS, calls

OWN = (vocabulary.cross_entropy, padded_vocabulary.logits)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.bfloat16, torch.float16]
NUM_CLASSES = 1301
"""So many values of 2 bytes fill no multiple of 16 bytes; the next multiple of 128 bytes holds 1344."""

PADDED = 1344

IN_PLACE = {"cross_entropy": 1, "cross_entropy_backward_": 1}

Loss = Callable[[Tensor, Tensor], Tensor]
Function = Callable[..., Sequence[Tensor | None]]


def inputs(device: str = "cpu", num_classes: int = NUM_CLASSES) -> list[Tensor]:
    """Input and weight of the last layer of a language model, targets, and the gradient of the loss."""
    shapes = [(2, 4, 6), (num_classes, 6)]
    x, weight = [normal(shape, torch.bfloat16, device, place).float() for place, shape in enumerate(shapes)]
    targets = torch.tensor([[3, 0, -100, 36], [5, 36, 1, num_classes - 1]], device=device)
    return [x, weight, targets, torch.full((), 3.0, device=device)]


def layer(loss_fn: Loss, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> Function:
    """The loss of logits in `dtype`, and the gradients of the layer that makes them."""

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Sequence[Tensor | None]:
        given = (x, weight, weight[:, 0].contiguous()) if bias else (x, weight)
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in given]
        loss = loss_fn(F.linear(*leaves), targets)
        return [loss.detach(), *torch.autograd.grad([loss], leaves, [scale.to(loss.dtype)])]

    return function


def row_length(module: fx.GraphModule) -> int | None:
    """How far the rows of logits lie apart whose loss is computed, and the gradient in their place; None for others."""
    if operators(module) != IN_PLACE:
        return None
    (forward,) = calls(module, torch.ops.kitsune.cross_entropy.default)
    (backward,) = calls(module, torch.ops.kitsune.cross_entropy_backward_.default)
    strides = {logits.meta["val"].stride() for logits in (forward.args[0], backward.args[1])}
    ((length, _),) = strides
    return int(length)


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).flatten(0, -2), targets.flatten())


def of_flat_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten())


def of_shifted_labels(logits: Tensor, targets: Tensor) -> Tensor:
    labels = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(wide(logits).view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten().abs(), ignore_index=36, reduction="sum") / 11


def scaled_by_itself(logits: Tensor, targets: Tensor) -> Tensor:
    return of_all(logits, targets).exp().sqrt()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "loss_fn", [of_all, of_flat_logits, of_shifted_labels, summed, scaled_by_itself], ids=lambda f: f.__name__
)
def test_logits_of_a_padded_vocabulary(loss_fn: Loss, bias: bool, dtype: torch.dtype, device: str) -> None:
    tensors = inputs(device)
    module, new = fused(layer(loss_fn, dtype, bias=bias), tensors, OWN)
    assert row_length(new) == PADDED, told(new)
    assert wrong_value(new.graph) is None
    padded = [tuple(node.meta["val"].shape) for node in calls(new, torch.ops.aten.constant_pad_nd.default)]
    assert padded.count((PADDED, 6)) == 1
    assert padded.count((PADDED,)) == bias
    products = {node.meta["val"].shape for node in calls(new, torch.ops.aten.mm.default)}
    assert products - {(8, PADDED)} == {(8, 6), (PADDED, 6)}
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    wanted = run(trace(layer(loss_fn, torch.float64, bias=bias), exact), exact)
    for one, other, right in zip(run(new, tensors), run(module, tensors), wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if right.is_floating_point():
            assert error(one, right) <= 2 * error(other, right) + torch.finfo(dtype).eps


def gradient_of(use: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]) -> Function:
    """The loss, and what `use` makes of the gradient of the logits, their logarithmic softmax, and the weight."""

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Sequence[Tensor | None]:
        weight = weight.to(torch.bfloat16)
        leaf = (x.flatten(0, 1).to(torch.bfloat16) @ weight.t()).detach().requires_grad_()
        normalized = F.log_softmax(leaf.float(), 1)
        loss = F.nll_loss(normalized, targets.flatten())
        (gradient,) = torch.autograd.grad([loss], [leaf], [scale])
        return [loss.detach(), *use(gradient, normalized.detach(), weight)]

    return function


def added_to_a_list(gradient: Tensor, _: Tensor, weight: Tensor) -> list[Tensor]:
    total = torch.zeros_like(gradient)
    torch._foreach_add_([total], [gradient])
    return [total, gradient @ weight]


@pytest.mark.parametrize(
    ("use", "wanted"),
    [
        (lambda gradient, _, weight: [gradient.t()[:, 1:] @ gradient[1:], gradient @ weight], PADDED),
        (lambda gradient, _, __: [gradient.sum(0), gradient.abs() + 1], PADDED),
        (lambda gradient, _, weight: [*torch.var_mean(gradient, 0), gradient @ weight], PADDED),
        (lambda gradient, _, weight: [gradient.split(4)[1].sum(0), gradient @ weight], PADDED),
        (lambda gradient, _, weight: [gradient[4:].cumsum(1), gradient @ weight], PADDED),
        (added_to_a_list, PADDED),
        (
            lambda gradient, _, weight: [gradient.as_strided((1,), (1,), NUM_CLASSES) + 0, gradient @ weight],
            NUM_CLASSES,
        ),
        (lambda gradient, _, weight: [gradient, gradient @ weight], NUM_CLASSES),
        (lambda gradient, _, weight: [gradient[2], gradient @ weight], NUM_CLASSES),
        (lambda gradient, _, weight: [gradient.bernoulli(0.5), gradient @ weight], NUM_CLASSES),
        (lambda gradient, _, weight: [gradient.split(4)[1] @ weight, gradient @ weight], NUM_CLASSES),
        (lambda gradient, _, weight: [weight.t().abs(), gradient @ weight], NUM_CLASSES),
        (lambda gradient, _, weight: [weight, gradient @ weight], NUM_CLASSES),
        (lambda gradient, _, weight: [gradient @ weight.abs(), gradient @ weight], NUM_CLASSES),
        (lambda gradient, normalized, weight: [(gradient * normalized).sum(), gradient @ weight], None),
    ],
    ids=[
        "views",
        "sums",
        "pair",
        "pieces",
        "cumulative",
        "list",
        "by strides",
        "returned",
        "returned in part",
        "random",
        "part by the weight",
        "the weight itself",
        "weight returned",
        "another product",
        "softmax",
    ],
)
def test_whoever_reads_the_gradient(use: Callable[..., Sequence[Tensor]], wanted: int | None) -> None:
    tensors = [tensor.abs() if not tensor.is_floating_point() else tensor for tensor in inputs()]
    tensors[2] %= NUM_CLASSES
    module = trace(gradient_of(use), tensors)
    new, _ = fuse(module, OWN)
    assert row_length(new) == wanted, told(new)
    assert wrong_value(new.graph) is None
    torch.manual_seed(0)
    found = run(new, tensors)
    torch.manual_seed(0)
    assert_alike(found, run(module, tensors), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda gradient, normalized, _: [(gradient * normalized).sum()], set()),
        (added_to_a_list, {"cross-entropy in place", "logits of a padded vocabulary"}),
    ],
    ids=["softmax", "list"],
)
def test_what_fusing_will_meet_can_be_foreseen(use: Callable[..., Sequence[Tensor]], names: set[str]) -> None:
    module = pipeline.run(trace(gradient_of(use), inputs()), pipeline.CLEARING)
    _, fusions = FusionEngine(OWN, Foresight(lambda _: None)).fuse(module)
    assert {fusion.template for fusion in fusions} == names


def written_through_a_view(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Sequence[Tensor | None]:
    """Of one token. The view says nowhere that it is one."""
    weight = weight.to(torch.bfloat16)
    leaf = (x[0, :1].to(torch.bfloat16) @ weight.t()).detach().requires_grad_()
    loss = F.cross_entropy(leaf.float(), targets[0, :1])
    (gradient,) = torch.autograd.grad([loss], [leaf], [scale])
    before = gradient.sum(0)
    torch.ops.aten._unsafe_view(gradient, [NUM_CLASSES]).add_(1)
    return [before, gradient @ weight]


def test_what_is_written_through_a_view_is_seen() -> None:
    tensors = inputs()
    module, new = fused(written_through_a_view, tensors, OWN)
    assert_alike(run(new, tensors), run(module, tensors), rtol=0.02, atol=0.02)


def with_bias(bias_of: Callable[[Tensor], Tensor], **options: int) -> Function:
    """The loss of logits to which the bias is added that `bias_of` makes for the weight, and gradients."""

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Sequence[Tensor | None]:
        leaves = [tensor.to(torch.bfloat16).detach().requires_grad_() for tensor in (x, weight)]
        logits = torch.addmm(bias_of(leaves[1].detach()), leaves[0].flatten(0, 1), leaves[1].t(), **options)
        loss = F.cross_entropy(logits.float(), targets.flatten())
        return [loss.detach(), *torch.autograd.grad([loss], leaves, [scale])]

    return function


def of_itself(operands: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Function:
    """The loss of logits whose input or bias may be a view of the weight, and its gradient."""

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Sequence[Tensor | None]:
        rows, weight, bias = operands(x.flatten(0, 1).to(torch.bfloat16), weight.to(torch.bfloat16))
        leaf = torch.addmm(bias, rows, weight.t()).detach().requires_grad_()
        loss = F.cross_entropy(leaf.float(), targets.flatten())
        (gradient,) = torch.autograd.grad([loss], [leaf], [scale])
        return [loss.detach(), gradient @ weight]

    return function


@pytest.mark.parametrize(
    ("function", "num_classes", "wanted"),
    [
        (layer(of_all, torch.bfloat16), 1304, 1304),
        (layer(of_all, torch.bfloat16), 1300, PADDED),
        (layer(of_all, torch.bfloat16), 37, 37),
        (layer(of_all), NUM_CLASSES, NUM_CLASSES),
        (with_bias(lambda weight: torch.linspace(-1, 1, len(weight), dtype=weight.dtype)), NUM_CLASSES, PADDED),
        (
            with_bias(lambda weight: torch.linspace(-1, 1, len(weight), dtype=weight.dtype), alpha=2),
            NUM_CLASSES,
            NUM_CLASSES,
        ),
        (with_bias(lambda weight: weight[:8, :1]), NUM_CLASSES, NUM_CLASSES),
        (with_bias(lambda weight: weight[0, :1]), NUM_CLASSES, NUM_CLASSES),
        (of_itself(lambda x, weight: (x, weight, weight[:, 0])), NUM_CLASSES, NUM_CLASSES),
        (of_itself(lambda x, weight: (weight[:8], weight, x[0, :1])), NUM_CLASSES, NUM_CLASSES),
    ],
    ids=[
        "aligned",
        "aligned by half",
        "few",
        "not cast",
        "bias",
        "with alpha",
        "a bias for each row",
        "one bias for all",
        "a bias of the weight",
        "an input of the weight",
    ],
)
def test_which_rows_become_longer(function: Function, num_classes: int, wanted: int) -> None:
    """Of few classes the space would be much of the whole; 1300 of 2 bytes are 8 too many for a multiple of 16."""
    tensors = inputs(num_classes=num_classes)
    module, new = fused(function, tensors, OWN)
    assert row_length(new) == wanted, told(new)
    assert_alike(run(new, tensors), run(module, tensors), rtol=0.02, atol=0.02)


def test_it_is_compared_with_rows_that_lie_close() -> None:
    """What the loss saves by being fused is not counted in favour of longer rows."""
    compared: list[Alone] = []

    def judge(alone: Alone) -> Verdict:
        compared.append(alone)
        return always(alone)

    fuse(trace(layer(of_all, torch.bfloat16), inputs()), OWN, judge)
    before, after = (row_length(module) for module in compared[-1][:2])
    assert before == NUM_CLASSES
    assert after == PADDED


def test_a_region_casts_and_pads_at_once() -> None:
    """The cast of the weight stays beside its padding, in place of going with those of other parameters."""
    tensors = [*inputs(), *inputs()[:2]]

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, *others: Tensor) -> Sequence[Tensor | None]:
        return [*layer(of_all, torch.bfloat16)(x, weight, targets, scale), *(one.to(torch.bfloat16) for one in others)]

    _, new = fused(function, tensors, (*OWN, casts.parameters))
    assert operators(new)["cast_many"] == 1
    (padding,) = calls(new, torch.ops.aten.constant_pad_nd.default)
    (cast,) = calls(new, torch.ops.aten._to_copy.default)
    assert padding.args[0] is cast
    regions = fuse_regions(new, OPERATORS).regions
    assert (cast.name, padding.name) in [region.nodes for region in regions]
