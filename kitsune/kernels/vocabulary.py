"""What models do over a large vocabulary, as operators of a graph: embeddings, and the cross-entropy of logits.

`kitsune::cross_entropy` and its backward read logits in their own precision and compute in float32: neither the logits
nor their softmax is ever held in float32. The gradient may take the place of the logits. `kitsune::embedding` gathers
rows, with those of a second table added, and `kitsune::embedding_backward` gives the dense gradient of a table, added
to the one that it has as the weight of another layer.
Here are the definitions and the checks. On the CPU the operators are the references below, in plain torch.

Tensors of values are float32, bfloat16 or float16; their rows are contiguous and evenly spaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitsune.kernels.rows import FLOATS, check_rows, check_vector

REDUCTIONS = ("mean", "sum")
_OF_INDICES = (torch.int32, torch.int64)

torch.library.define(
    "kitsune::cross_entropy",
    "(Tensor logits, Tensor targets, *, str reduction, int ignore_index, float label_smoothing) "
    "-> (Tensor loss, Tensor row_max, Tensor log_sum, Tensor num_counted)",
)
_BACKWARD_OPTIONS = (
    "Tensor targets, Tensor row_max, Tensor log_sum, Tensor num_counted, *, "
    "str reduction, int ignore_index, float label_smoothing"
)
torch.library.define(
    "kitsune::cross_entropy_backward", f"(Tensor grad_loss, Tensor logits, {_BACKWARD_OPTIONS}) -> Tensor"
)
torch.library.define(
    "kitsune::cross_entropy_backward_", f"(Tensor grad_loss, Tensor(a!) logits, {_BACKWARD_OPTIONS}) -> ()"
)
torch.library.define(
    "kitsune::embedding", "(Tensor weight, Tensor indices, Tensor? added_weight, Tensor? added_indices) -> Tensor"
)
torch.library.define(
    "kitsune::embedding_backward",
    "(Tensor grad, Tensor indices, Tensor? added=None, *, int num_embeddings, int padding_idx, ScalarType dtype) "
    "-> Tensor",
)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, reduction: str, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`torch.nn.functional.cross_entropy`, and what its backward needs.

    With s the label smoothing and n the number of targets that are not ignored, the loss of a row x with target t is
    `logsumexp(x) - (1 - s) * x[t] - s * mean(x)`, and that of all rows their sum, for "mean" divided by n. A row is
    read once: its sum of exponentials is scaled anew where a block of it has a larger maximum (Milakov and Gimelshein,
    "Online normalizer calculation for softmax", 2018).

    Args:
        logits: (M, V).
        targets: (M,), int64, with any stride, 0 to V - 1 or `ignore_index`. Others stop the program by a device
            assertion, as in PyTorch (on the CPU: IndexError).
        reduction: "mean" or "sum".
        label_smoothing: 0 to 1.

    Returns:
        loss: a float32 scalar; NaN for "mean" if every target is ignored.
        row_max, log_sum: (M,), float32, `max(x)` and `logsumexp(x) - max(x)`. They are not added up, because that
            would cost the digits in which a row differs that is predicted with confidence.
        num_counted: n, a float32 scalar.

    Raises:
        ValueError: shapes, dtypes, devices, layouts or options do not fit.
    """
    return torch.ops.kitsune.cross_entropy.default(  # type: ignore[no-any-return]
        logits, targets, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    num_counted: Tensor,
    *,
    reduction: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The gradient of `cross_entropy`: `(softmax(x) - (1 - s) * one_hot(t) - s / V) * grad_loss`, for "mean" over n.

    It is 0 in a row whose target is ignored (NaN where the row is not finite, as in PyTorch).

    Args:
        grad_loss: a float32 scalar.
        logits, targets, reduction, ignore_index, label_smoothing: as for `cross_entropy`.
        row_max, log_sum, num_counted: its results.

    Returns:
        (M, V), contiguous, of the dtype of `logits`.

    Raises:
        ValueError: as for `cross_entropy`.
    """
    return torch.ops.kitsune.cross_entropy_backward.default(  # type: ignore[no-any-return]
        grad_loss, logits, targets, row_max, log_sum, num_counted,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip


def cross_entropy_backward_(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    num_counted: Tensor,
    *,
    reduction: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    """`cross_entropy_backward`, written over `logits`, whose rows must not overlap."""
    torch.ops.kitsune.cross_entropy_backward_.default(
        grad_loss, logits, targets, row_max, log_sum, num_counted,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip


def embedding(
    weight: Tensor, indices: Tensor, added_weight: Tensor | None = None, added_indices: Tensor | None = None
) -> Tensor:
    """`weight[indices] + added_weight[added_indices]`, as of tokens and their positions.

    Args:
        weight: (V, N).
        indices: (*), int32 or int64, with any strides, 0 to V - 1. Others stop the program by a device assertion, as
            in PyTorch (on the CPU: IndexError).
        added_weight: (W, N), of the dtype of `weight`; None: nothing is added.
        added_indices: like `indices`, 0 to W - 1, of their shape or of the last of its dimensions: the same for all
            of the others, which may be there with size 1.

    Returns:
        (*, N), contiguous, of the dtype of `weight`; the sum is rounded once.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit, or one of the last two arguments is missing.
    """
    return torch.ops.kitsune.embedding.default(  # type: ignore[no-any-return]
        weight, indices, added_weight, added_indices
    )


def embedding_backward(
    grad: Tensor,
    indices: Tensor,
    added: Tensor | None = None,
    *,
    num_embeddings: int,
    padding_idx: int = -1,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a table: row v is the sum of `grad` where the index is v, in float32 and rounded once.

    It is deterministic: indices are sorted, and rows of one index added in an order that is fixed by their places.

    Args:
        grad: (*, N).
        indices: (*), int32 or int64, with any strides. Those that are out of range count for nothing.
        added: (V, N), to which the gradient is added; None for zeros.
        num_embeddings: rows of the table, V.
        padding_idx: the index that counts for nothing either; -1 for none.
        dtype: of the result.

    Returns:
        (V, N), contiguous.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit.
    """
    return torch.ops.kitsune.embedding_backward.default(  # type: ignore[no-any-return]
        grad, indices, added, num_embeddings=num_embeddings, padding_idx=padding_idx, dtype=dtype
    )


# What checks the arguments and allocates the results: for tracing, that is all.


def _check_cross_entropy(
    name: str, logits: Tensor, targets: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"{name} takes logits of two dimensions, (M, V): got {tuple(logits.shape)}")
    check_rows(name, "logits", logits, logits.shape, logits.device)
    if (targets.shape, targets.dtype, targets.device) != (logits.shape[:1], torch.int64, logits.device):
        raise ValueError(
            f"{name} takes {logits.shape[0]} targets of torch.int64 on {logits.device}: got {tuple(targets.shape)} of "
            f"{targets.dtype} on {targets.device}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name} knows the reductions {', '.join(REDUCTIONS)}: got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name} takes a label_smoothing of 0 to 1: got {label_smoothing}")


def _outputs_of_cross_entropy(
    logits: Tensor, targets: Tensor, *, reduction: str, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, ...]:
    _check_cross_entropy("cross_entropy", logits, targets, reduction, ignore_index, label_smoothing)
    rows, scalar = logits.shape[:1], ()
    return tuple(logits.new_empty(shape, dtype=torch.float32) for shape in (scalar, rows, rows, scalar))


def _check_cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    num_counted: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    name = "cross_entropy_backward"
    _check_cross_entropy(name, logits, targets, reduction, ignore_index, label_smoothing)
    for scalar, tensor in {"grad_loss": grad_loss, "num_counted": num_counted}.items():
        check_vector(name, scalar, tensor, (), (torch.float32,), logits.device)
    for statistic, tensor in {"row_max": row_max, "log_sum": log_sum}.items():
        check_vector(name, statistic, tensor, logits.shape[:1], (torch.float32,), logits.device)


def _outputs_of_cross_entropy_backward(grad_loss: Tensor, logits: Tensor, *rest: Any, **options: Any) -> Tensor:
    _check_cross_entropy_backward(grad_loss, logits, *rest, **options)
    return logits.new_empty(logits.shape)


def _check_in_place(grad_loss: Tensor, logits: Tensor, *rest: Any, **options: Any) -> None:
    _check_cross_entropy_backward(grad_loss, logits, *rest, **options)
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(
            f"cross_entropy_backward_ writes over logits whose rows do not overlap: got {tuple(logits.shape)} with "
            f"strides {logits.stride()}"
        )


def _check_indices(name: str, indices_name: str, indices: Tensor, device: torch.device) -> None:
    if indices.dtype not in _OF_INDICES or indices.device != device:
        raise ValueError(
            f"{name} takes {indices_name} in torch.int32 or torch.int64 on {device}: "
            f"got {indices.dtype} on {indices.device}"
        )


def _check_table(name: str, table: str, weight: Tensor, device: torch.device) -> None:
    if weight.dim() != 2:
        raise ValueError(f"{name} takes {table} of two dimensions, (V, N): got {tuple(weight.shape)}")
    check_rows(name, table, weight, weight.shape, device)


def _outputs_of_embedding(
    weight: Tensor, indices: Tensor, added_weight: Tensor | None, added_indices: Tensor | None
) -> Tensor:
    name = "embedding"
    _check_table(name, "weight", weight, weight.device)
    _check_indices(name, "indices", indices, weight.device)
    if (added_weight is None) != (added_indices is None):
        raise ValueError("embedding takes both added_weight and added_indices or none of them")
    if added_weight is not None and added_indices is not None:
        _check_table(name, "added_weight", added_weight, weight.device)
        _check_indices(name, "added_indices", added_indices, weight.device)
        if (added_weight.shape[1], added_weight.dtype) != (weight.shape[1], weight.dtype):
            raise ValueError(
                f"embedding takes added_weight of {weight.shape[1]} columns of {weight.dtype}: "
                f"got {tuple(added_weight.shape)} of {added_weight.dtype}"
            )
        if not _is_repeated(tuple(added_indices.shape), tuple(indices.shape)):
            raise ValueError(
                f"embedding takes added_indices of the shape of indices, {tuple(indices.shape)}, or of its last "
                f"dimensions: got {tuple(added_indices.shape)}"
            )
    return weight.new_empty(*indices.shape, weight.shape[1])


def _is_repeated(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether broadcasting `shape` to `whole` repeats all of it."""
    if len(shape) > len(whole):
        return False
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape == whole[len(whole) - len(shape) :]


def _outputs_of_embedding_backward(
    grad: Tensor,
    indices: Tensor,
    added: Tensor | None = None,
    *,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
) -> Tensor:
    name = "embedding_backward"
    _check_indices(name, "indices", indices, grad.device)
    check_rows(name, "grad", grad, (*indices.shape, *grad.shape[-1:]), indices.device)
    if num_embeddings < 1:
        raise ValueError(f"{name} takes a table of at least one row: got num_embeddings={num_embeddings}")
    if dtype not in FLOATS:
        raise ValueError(f"{name} gives results in float32, bfloat16 or float16: got {dtype}")
    if added is not None:
        check_rows(name, "added", added, (num_embeddings, grad.shape[-1]), indices.device)
    return grad.new_empty(num_embeddings, grad.shape[-1], dtype=dtype)


# The references: each writes the results of the operator of its name.


def _cross_entropy(
    outputs: tuple[Tensor, ...],
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    loss, row_max, log_sum, num_counted = outputs
    wide = logits.float()
    row_max.copy_(wide.amax(1))
    log_sum.copy_((wide - row_max[:, None]).exp().sum(1).log())
    num_counted.copy_((targets != ignore_index).sum())
    loss.copy_(
        functional.cross_entropy(
            wide, targets, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    )


def _cross_entropy_backward(
    result: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    num_counted: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    num_classes = logits.shape[1]
    factor = grad_loss / num_counted if reduction == "mean" else grad_loss
    factors = torch.where(targets == ignore_index, 0.0, factor)[:, None]
    probabilities = (logits.float() - row_max[:, None] - log_sum[:, None]).exp()
    is_target = targets[:, None] == torch.arange(num_classes, device=targets.device)
    expected = torch.where(is_target, 1 - label_smoothing, 0.0) + label_smoothing / num_classes
    result.copy_((probabilities - expected) * factors)


def _embedding(
    result: Tensor, weight: Tensor, indices: Tensor, added_weight: Tensor | None, added_indices: Tensor | None
) -> None:
    rows = functional.embedding(indices, weight)
    if added_weight is not None and added_indices is not None:
        rows = rows + functional.embedding(added_indices, added_weight)
    result.copy_(rows)


def _embedding_backward(
    result: Tensor,
    grad: Tensor,
    indices: Tensor,
    added: Tensor | None = None,
    *,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
) -> None:
    counted = (indices >= 0) & (indices < num_embeddings) & (indices != padding_idx)
    places = torch.where(counted, indices, num_embeddings).flatten()
    sums = result.new_zeros(num_embeddings + 1, grad.shape[-1], dtype=torch.float32)
    if added is not None:
        sums[:-1] = added
    sums.index_add_(0, places, grad.reshape(-1, grad.shape[-1]).float())
    result.copy_(sums[:-1])


def _implement(name: str, outputs_of: Callable[..., Any], reference: Callable[..., None]) -> None:
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        outputs = outputs_of(*arguments, **options)
        reference(outputs, *arguments, **options)
        return outputs

    def on_cuda(*arguments: Any, **options: Any) -> Any:
        from kitsune.kernels import vocabulary_triton  # Triton is optional

        outputs = outputs_of(*arguments, **options)
        with torch.cuda.device(arguments[0].device):
            getattr(vocabulary_triton, name)(outputs, *arguments, **options)
        return outputs

    torch.library.register_fake(f"kitsune::{name}", outputs_of)
    torch.library.impl(f"kitsune::{name}", "CPU", on_cpu)
    torch.library.impl(f"kitsune::{name}", "CUDA", on_cuda)


def _cross_entropy_backward_(_: None, grad_loss: Tensor, logits: Tensor, *rest: Any, **options: Any) -> None:
    _cross_entropy_backward(logits, grad_loss, logits, *rest, **options)


_implement("cross_entropy", _outputs_of_cross_entropy, _cross_entropy)
_implement("cross_entropy_backward", _outputs_of_cross_entropy_backward, _cross_entropy_backward)
_implement("cross_entropy_backward_", _check_in_place, _cross_entropy_backward_)
_implement("embedding", _outputs_of_embedding, _embedding)
_implement("embedding_backward", _outputs_of_embedding_backward, _embedding_backward)
