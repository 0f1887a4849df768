"""What is recognized as cross-entropy over a vocabulary and as embeddings, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.fusion import head, linear, norms, vocabulary
from tests.kitsune.fusion.running import always, assert_alike, fuse, fused, never, operators, run, told
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

TEMPLATES = (vocabulary.cross_entropy, vocabulary.embedding, vocabulary.embedding_backward)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOSS = {"_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data"}
NUM_CLASSES = 37

Loss = Callable[[Tensor, Tensor], Tensor]
Function = Callable[..., list[Tensor | None]]


def inputs(device: str = "cpu") -> list[Tensor]:
    """Input and weight of the last layer of a language model, targets, and the gradient of the loss.

    One target is to be ignored. The numbers are exact in bfloat16 and half precision.
    """
    x, weight = [
        normal(shape, torch.bfloat16, device, place).float() for place, shape in enumerate([(2, 4, 6), (37, 6)])
    ]
    targets = torch.tensor([[3, 0, -100, 36], [5, 36, 1, 2]], device=device)
    return [x, weight, targets, torch.full((), 3.0, device=device)]


def gradients(loss_fn: Loss, dtype: torch.dtype = torch.float32) -> Function:
    """The loss of logits in `dtype`, and the gradients of the layer that makes them."""

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Tensor | None]:
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in (x, weight)]
        loss = loss_fn(F.linear(*leaves), targets)
        return [loss.detach(), *torch.autograd.grad([loss], leaves, [scale.to(loss.dtype)])]

    return function


def of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())


def of_flat_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten())


def of_shifted_labels(logits: Tensor, targets: Tensor) -> Tensor:
    """As in transformers."""
    labels = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(wide(logits).view(-1, NUM_CLASSES), labels.view(-1), ignore_index=-100)


def of_shifted_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """As in earlier releases of transformers."""
    shifted = wide(logits)[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, NUM_CLASSES), targets[..., 1:].reshape(-1))


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """As where the number of tokens is that of several batches."""
    return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=36, reduction="sum") / 11


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "loss_fn",
    [of_all, of_flat_logits, of_shifted_labels, of_shifted_logits, summed],
    ids=lambda f: f.__name__,
)
def test_cross_entropy_in_place(loss_fn: Loss, dtype: torch.dtype, device: str) -> None:
    tensors = inputs(device)
    if loss_fn is summed:
        tensors[2] = tensors[2].abs() % NUM_CLASSES
    module, new = fused(gradients(loss_fn, dtype), tensors, TEMPLATES)
    assert operators(new) == {"cross_entropy": 1, "cross_entropy_backward_": 1}
    (forward,) = calls(new, torch.ops.kitsune.cross_entropy.default)
    assert forward.args[0].meta["val"].dtype == dtype
    assert not operators(new, "aten").keys() & LOSS
    assert operators(new, "aten")["mm"] == 3
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    wanted = run(trace(gradients(loss_fn, torch.float64), exact), exact)
    for one, other, right in zip(run(new, tensors), run(module, tensors), wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if right.is_floating_point():
            assert error(one, right) <= 2 * error(other, right) + torch.finfo(dtype).eps


def of_a_softmax_in_half_precision(logits: Tensor, targets: Tensor) -> Tensor:
    """Autocast on GPUs casts what it gives, not what it takes."""
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), 1).float(), targets.flatten())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_softmax_in_half_precision(dtype: torch.dtype) -> None:
    module, new = fused(gradients(of_a_softmax_in_half_precision, dtype), inputs(), TEMPLATES)
    assert operators(new) == {"cross_entropy": 1, "cross_entropy_backward_": 1}, told(new)
    assert not operators(new, "aten").keys() & LOSS
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0.03, atol=0.03)


def read_by_others(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Tensor | None]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    logits = F.linear(*leaves)
    loss = of_all(logits, targets)
    return [loss.detach(), logits.argmax(-1), *torch.autograd.grad([loss], leaves, [scale])]


def given(logits: Tensor, _: Tensor, targets: Tensor, scale: Tensor) -> list[Tensor | None]:
    leaf = logits.flatten(0, 1).detach().requires_grad_()
    loss = F.cross_entropy(leaf, targets.flatten() % 6)
    return [loss.detach(), *torch.autograd.grad([loss], [leaf], [scale])]


@pytest.mark.parametrize("function", [read_by_others, given], ids=lambda f: f.__name__)
def test_logits_that_others_need_are_not_overwritten(function: Function) -> None:
    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(new) == {"cross_entropy": 1, "cross_entropy_backward": 1}
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_logits_of_a_fused_layer_that_others_need_are_not_overwritten() -> None:
    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        logits = F.linear(*(leaf.bfloat16() for leaf in leaves), weight[:, 0].bfloat16())
        loss = of_all(logits, targets)
        return [*torch.autograd.grad([loss], leaves, [scale]), logits.view(-1).sin()]

    module, new = fused(function, inputs(), (linear.forward, *TEMPLATES))
    assert operators(new) == {"linear_activation": 1, "cross_entropy": 1, "cross_entropy_backward": 1}
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0.05, atol=1e-2)


def test_logits_in_float32_that_others_need() -> None:
    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Tensor | None]:
        leaves = [tensor.bfloat16().detach().requires_grad_() for tensor in (x, weight)]
        logits = F.linear(*leaves).float()
        loss = of_all(logits, targets)
        return [loss.detach(), logits.sin(), *torch.autograd.grad([loss], leaves, [scale])]

    module, new = fused(function, inputs(), TEMPLATES)
    (forward,) = calls(new, torch.ops.kitsune.cross_entropy.default)
    assert forward.args[0].meta["val"].dtype == torch.float32
    assert operators(new)["cross_entropy_backward"] == 1
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0.05, atol=1e-3)


def test_a_loss_that_is_one_of_several() -> None:
    """What scales its gradient is computed after the sum of the losses."""

    def function(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        logits = F.linear(*leaves)
        loss = of_all(logits, targets) * scale + 0.5 * of_all(logits * 2, targets) + leaves[1].square().sum()
        return [loss.detach(), *torch.autograd.grad([loss], leaves)]

    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(new) == {"cross_entropy": 2, "cross_entropy_backward": 1, "cross_entropy_backward_": 1}
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_a_gradient_that_depends_on_the_loss() -> None:
    def function(x: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        loss = of_all(F.linear(*leaves), targets)
        return [loss.detach(), *torch.autograd.grad([loss.exp().sqrt()], leaves)]

    module, new = fused(function, inputs(), TEMPLATES)
    assert operators(new) == {"cross_entropy": 1, "cross_entropy_backward_": 1}
    assert_alike(run(new, inputs()), run(module, inputs()))


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=logits.detach().flatten(0, 1)[0].exp())


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def of_each_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").square().sum()


def with_the_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    normalized = F.log_softmax(logits.flatten(0, 1), 1)
    return F.nll_loss(normalized, targets.flatten()) + normalized.square().mean()


def over_the_first_dimension(logits: Tensor, targets: Tensor) -> Tensor:
    normalized = F.log_softmax(logits.flatten(0, 1), 0)
    return F.nll_loss(normalized, targets.flatten())


def of_classes_in_the_middle(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


@pytest.mark.parametrize(
    "loss_fn",
    [weighted, smoothed, of_each_token, with_the_softmax, over_the_first_dimension, of_classes_in_the_middle],
    ids=lambda f: f.__name__,
)
def test_losses_that_stay(loss_fn: Loss) -> None:
    module, new = fused(gradients(loss_fn), inputs(), TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs()), run(module, inputs()))


def test_logits_whose_rows_are_not_contiguous_are_refused_with_the_reason() -> None:
    def function(x: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> list[Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        logits = (leaves[1] @ leaves[0].flatten(0, 1).t()).t()
        loss = F.cross_entropy(logits, targets.flatten())
        return [loss.detach(), *torch.autograd.grad([loss], leaves)]

    new, fusions = fuse(trace(function, inputs()), TEMPLATES)
    assert not operators(new)
    assert fusions
    assert all("contiguous, evenly spaced rows" in (fusion.refusal or "") for fusion in fusions)


def test_a_loss_in_bfloat16_stays() -> None:
    """The kernel's is in float32."""
    module, new = fused(
        gradients(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()), torch.bfloat16),
        inputs(),
        TEMPLATES,
    )
    assert operators(module, "aten")["_log_softmax"] == 1
    assert not operators(new)


def test_the_forward_alone_stays() -> None:
    _, new = fused(lambda x, weight, targets, _: [of_all(F.linear(x, weight), targets)], inputs(), TEMPLATES)
    assert not operators(new)


def tables(device: str = "cpu") -> list[Tensor]:
    """Two tables, tokens, positions and a gradient; the first token is for padding."""
    shapes = [(11, 6), (4, 6), (2, 4, 6)]
    token_table, position_table, grad = [
        normal(shape, torch.bfloat16, device, n).float() for n, shape in enumerate(shapes)
    ]
    tokens = torch.tensor([[0, 3, 10, 3], [1, 0, 0, 3]], device=device)
    return [token_table, position_table, tokens, torch.arange(4, device=device), grad]


Embed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def embedded(embed: Embed, dtype: torch.dtype = torch.float32) -> Function:
    """What `embed` gives, in `dtype`, and the gradients of the tables."""

    def function(
        table: Tensor, position_table: Tensor, tokens: Tensor, positions: Tensor, grad: Tensor
    ) -> list[Tensor | None]:
        leaves = [one.detach().requires_grad_() for one in (table, position_table)]
        y = embed(*leaves, tokens, positions).to(dtype)
        return [y.detach(), *torch.autograd.grad([y], leaves, [grad.to(dtype)], allow_unused=True)]

    return function


def with_positions(table: Tensor, position_table: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(tokens, table, padding_idx=0) + F.embedding(positions, position_table)


def with_positions_first(table: Tensor, position_table: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(positions[None], position_table) + F.embedding(tokens, table)


def with_types(table: Tensor, type_table: Tensor, tokens: Tensor, _: Tensor) -> Tensor:
    return F.embedding(tokens, table) + F.embedding(tokens % 2, type_table)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("embed", [with_positions, with_positions_first, with_types], ids=lambda f: f.__name__)
def test_two_embeddings(embed: Embed, dtype: torch.dtype, device: str) -> None:
    module, new = fused(embedded(embed, dtype), tables(device), TEMPLATES)
    assert operators(new) == {"embedding": 1, "embedding_backward": 2}
    assert not operators(new, "aten").keys() & {"embedding", "embedding_dense_backward"}
    first, _ = calls(new, torch.ops.kitsune.embedding_backward.default)
    assert first.kwargs["dtype"] == torch.float32
    tolerance = 2 * torch.finfo(dtype).eps  # of the sum over the batch
    assert_alike(run(new, tables(device)), run(module, tables(device)), rtol=max(1e-5, tolerance), atol=tolerance)


def test_a_gradient_is_read_before_its_cast() -> None:
    function = embedded(lambda table, _, tokens, __: F.embedding(tokens, table, padding_idx=0), torch.bfloat16)
    module, new = fused(function, tables(), TEMPLATES)
    (backward,) = calls(new, torch.ops.kitsune.embedding_backward.default)
    assert backward.args[0].meta["val"].dtype == torch.bfloat16
    assert backward.kwargs["padding_idx"] == 0
    assert_alike(run(new, tables()), run(module, tables()))


def tied(table: Tensor, hidden: Tensor, tokens: Tensor, logits_grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of a table that is the weight of the last layer too, from its rows and from products."""
    rows_grad = torch.ops.aten.embedding_dense_backward(hidden, tokens, len(table), 0, False)
    weight_grad = (logits_grad.to(dtype).t() @ hidden.flatten(0, 1).to(dtype)).float()
    return [rows_grad, weight_grad]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_first", [True, False])
def test_the_gradient_of_a_tied_table(rows_first: bool, dtype: torch.dtype, device: str) -> None:
    table, _, tokens, _, hidden = tables(device)
    logits_grad = normal((tokens.numel(), len(table)), torch.float32, device, 5)

    def function(table: Tensor, hidden: Tensor, tokens: Tensor, logits_grad: Tensor) -> list[Tensor | None]:
        one, other = tied(table, hidden, tokens, logits_grad, dtype)
        return [one + other if rows_first else other + one]

    tensors = [table, hidden, tokens, logits_grad]
    module, new = fused(function, tensors, TEMPLATES)
    (call,) = calls(new, torch.ops.kitsune.embedding_backward.default)
    assert call.args[2].meta["val"].dtype == dtype, "it is read before its cast"
    assert operators(new, "aten")["add"] == 0
    assert operators(new, "aten")["embedding_dense_backward"] == 0
    assert_alike(run(new, tensors), run(module, tensors))


@pytest.mark.parametrize(
    "use",
    [
        lambda one, other: [torch.add(one, other, alpha=2)],
        lambda one, other: [one + other, one],
        lambda one, _: [one + one],
        lambda one, _: [one + 1],
        lambda one, other: [one + other[:1]],
        lambda one, other: [one + other.half()],
    ],
    ids=["scaled", "used otherwise", "twice", "a number", "one row", "another type"],
)
def test_what_a_gradient_of_a_table_is_not_added_to(use: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    table, _, tokens, _, hidden = tables()
    tensors = [table, hidden, tokens, normal((tokens.numel(), len(table)), torch.float32, "cpu", 5)]
    module, new = fused(lambda *given: use(*tied(*given, torch.float32)), tensors, TEMPLATES)
    (call,) = calls(new, torch.ops.kitsune.embedding_backward.default)
    assert len(call.args) == 2
    assert_alike(run(new, tensors), run(module, tensors))


def scaled(table: Tensor, position_table: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return torch.add(F.embedding(tokens, table), F.embedding(positions, position_table), alpha=2)


def with_a_table(table: Tensor, position_table: Tensor, tokens: Tensor, _: Tensor) -> Tensor:
    return F.embedding(tokens, table) + position_table


def used_otherwise(table: Tensor, position_table: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    rows = F.embedding(tokens, table)
    return (rows + F.embedding(positions, position_table)) * rows


def twice_the_same(table: Tensor, _: Tensor, tokens: Tensor, __: Tensor) -> Tensor:
    rows = F.embedding(tokens, table)
    return rows + rows


@pytest.mark.parametrize("embed", [scaled, with_a_table, used_otherwise, twice_the_same], ids=lambda f: f.__name__)
def test_embeddings_that_stay(embed: Embed) -> None:
    module, new = fused(embedded(embed), tables(), TEMPLATES)
    assert operators(new)["embedding"] == 0
    assert_alike(run(new, tables()), run(module, tables()))


def test_gradients_that_are_scaled_by_frequency_stay() -> None:
    def embed(table: Tensor, _: Tensor, tokens: Tensor, __: Tensor) -> Tensor:
        return F.embedding(tokens, table, scale_grad_by_freq=True)

    _, new = fused(embedded(embed), tables(), TEMPLATES)
    assert not operators(new)


def check(
    step: TracedStep, dtype: torch.dtype, templates: Sequence[Callable[..., object]] = TEMPLATES
) -> tuple[fx.GraphModule, dict[str, int]]:
    new, fusions = fuse(step.module, templates, always)
    assert_close_to_the_original(run(new, step.inputs), run(step.module, step.inputs), dtype)
    names: dict[str, int] = {}
    for fusion in fusions:
        if fusion.refusal is None:
            names[fusion.template] = names.get(fusion.template, 0) + 1
    return new, names


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("own_loss", [False, True])
def test_gpt2(own_loss: bool, dtype: torch.dtype) -> None:
    new, names = check(gpt2_step(dtype, own_loss=own_loss), dtype)
    backward = {"embedding backward": 1, "embedding backward + gradient": 1}  # the table of words is the head's, too
    assert names == {"cross-entropy in place": 1, "embedding + embedding": 1, **backward}
    assert not operators(new, "aten").keys() & {*LOSS, "embedding", "embedding_dense_backward"}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_llama(dtype: torch.dtype) -> None:
    new, names = check(llama_step(dtype), dtype)
    assert names == {"cross-entropy in place": 1, "embedding backward": 1}
    assert not operators(new, "aten").keys() & {*LOSS, "embedding_dense_backward"}


def test_bert() -> None:
    """The smaller head is another template's, which takes the layer with it."""
    new, names = check(bert_step(torch.bfloat16), torch.bfloat16, (head.forward_and_backward, *TEMPLATES))
    assert names.keys() == {"linear + cross-entropy + tanh backward", "embedding + embedding", "embedding backward"}
    assert operators(new, "aten")["embedding"] == 1
    assert not operators(new, "aten").keys() & {*LOSS, "embedding_dense_backward"}


def test_vit() -> None:
    _, names = check(vit_step(torch.bfloat16), torch.bfloat16)
    assert names == {"cross-entropy in place": 1}


@pytest.mark.slow
def test_logits_in_place_can_still_be_made_by_a_fused_layer() -> None:
    templates = (*TEMPLATES, norms.backward, norms.forward, linear.forward, linear.backward)
    new, names = check(gpt2_step(torch.bfloat16), torch.bfloat16, templates)
    assert names["cross-entropy in place"] == 1
    (backward,) = calls(new, torch.ops.kitsune.cross_entropy_backward_.default)
    assert not operators(new, "aten").keys() & {*LOSS, "native_layer_norm"}
    assert backward.args[1].meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("function", [gradients(of_all), embedded(with_positions)], ids=["loss", "embeddings"])
def test_nothing_changes_where_the_judge_refuses(function: Function) -> None:
    tensors = inputs() if function.__qualname__.startswith("gradients") else tables()
    module = trace(function, tensors)
    new, fusions = fuse(module, TEMPLATES, never)
    assert len(fusions) > 1
    assert not operators(new)
    assert all(map(torch.equal, run(new, tensors), run(module, tensors)))
