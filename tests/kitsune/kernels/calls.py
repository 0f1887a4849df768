"""Calls of every operator that has a kernel: small, of odd sizes, strides and addresses, for all of its variants.

They are made of tensors on the CPU, the same in each process. Sizes are such that among the forms of a kernel none is
left out that the tuner would try for larger ones, where that takes no more than a few thousand values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kitsune.fusion.templates  # noqa: F401 - defines the operators
from kitsune.kernels.batch_norm import num_counters
from kitsune.kernels.images import FLOATS
from kitsune.kernels.linear import ACTIVATIONS, OF_PREACTIVATION
from tests.kitsune.kernels.interpreter import as_laid_out, normal

FLOAT32, BFLOAT16, FLOAT16 = FLOATS
HAND_OUT = "kitsune_tests::hand_out"
"""The kernel that is no operator of a graph, as one."""

torch.library.define(HAND_OUT, "(Tensor value, Tensor(a!) row, int place) -> Tensor next_place")


class Call(NamedTuple):
    operator: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        """Like Python's, with types, shapes, strides and offsets in the place of tensors."""
        options = [f"{name}={_described(value)}" for name, value in self.options.items()]
        return f"{self.operator}({', '.join([*map(_described, self.arguments), *options])})"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}{value.stride()}+{value.storage_offset()}"
    if isinstance(value, list):
        return f"[{', '.join(map(_described, value))}]"
    return str(value)


def call(operator: str, *arguments: Any, **options: Any) -> Call:
    return Call(f"kitsune::{operator}", arguments, options)


def overload(operator: str) -> Any:
    """What is called by the name of an operator, of which there is one overload."""
    namespace, _, name = operator.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


def of(operator: str, *arguments: Any, **options: Any) -> Any:
    """What the reference returns."""
    return overload(f"kitsune::{operator}")(*arguments, **options)


class Random:
    """Values that are drawn one tensor after another."""

    def __init__(self) -> None:
        self._seeds = itertools.count()

    def __call__(self, *shape: int, dtype: torch.dtype = FLOAT32, scale: float = 1.0) -> Tensor:
        return normal(shape, dtype, "cpu", next(self._seeds), scale)

    def positive(self, *shape: int) -> Tensor:
        return self(*shape).abs() + 0.1

    def below(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        generator = torch.Generator().manual_seed(next(self._seeds))
        return torch.randint(end, shape, generator=generator).to(dtype)


def shifted(tensor: Tensor) -> Tensor:
    """The same values in the same strides, one element after the beginning of their memory: at an odd address."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_zeros(2 + sum(steps) if tensor.numel() else 1)
    return memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def sliced(tensor: Tensor) -> Tensor:
    return as_laid_out(tensor, "sliced")


def transposed(tensor: Tensor) -> Tensor:
    return as_laid_out(tensor, "transposed")


def channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


# Updates, casts, counters


def adam() -> Iterator[Call]:
    for dtype, (decay, decoupled, maximize), laid_out, count in (
        (FLOAT32, (0.0, False, False), unchanged, 8),
        (FLOAT32, (0.1, True, True), shifted, 8),
        (BFLOAT16, (0.1, False, False), unchanged, 35),
        (FLOAT16, (0.0, True, False), shifted, 35),
    ):
        for amsgrad, found_inf in ((False, None), (True, torch.zeros(())), (True, torch.ones(()))):
            random = Random()
            params, averages = (_parameters(random, count, laid_out) for _ in range(2))
            squares, largest = (_parameters(random.positive, count, laid_out) for _ in range(2))
            grads = [one.to(dtype) for one in _parameters(random, count, laid_out)]
            steps = [torch.tensor(float(number % 3 + 1)) for number in range(count)]
            yield call(
                "adam_", params, grads, averages, squares, largest if amsgrad else [], steps, lr=torch.tensor(1e-3),
                beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=decay, decoupled=decoupled, maximize=maximize,
                found_inf=found_inf,
            )  # fmt: skip


def _parameters(draw: Callable[..., Tensor], count: int, laid_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
    sizes = itertools.cycle(((1,), (511,), (512,), (513,), (0,), (1500,), (7, 11)))
    drawn = [draw(*size) for size in itertools.islice(sizes, count - 1)]
    return [laid_out(one) for one in [channels_last(draw(3, 5, 2, 3)), *drawn]]


def grouped_updates() -> Iterator[Call]:
    for dtype, of_inputs, laid_out, allow_tf32 in (
        (BFLOAT16, BFLOAT16, unchanged, False),
        (BFLOAT16, FLOAT32, sliced, False),
        (FLOAT16, FLOAT16, shifted, False),
        (FLOAT32, FLOAT32, unchanged, False),
        (FLOAT32, FLOAT32, sliced, True),
    ):
        random, batch, widths = Random(), 261, ((131, 133), (10, 133), (131, 133))
        grad_outputs = [laid_out(random(batch, rows, dtype=dtype)) for rows, _ in widths]
        inputs = [laid_out(random(batch, cols, dtype=of_inputs)) for _, cols in widths]
        shapes = [shape for rows, cols in widths for shape in ((rows, cols), (rows,))]
        layers = [0, 0, 1, 1, 2, 2]
        dense = shifted if laid_out is shifted else unchanged
        params, averages, grads = ([dense(random(*shape)) for shape in shapes] for _ in range(3))
        squares, largest = ([dense(random.positive(*shape)) for shape in shapes] for _ in range(2))
        shadows = [dense(random(*shape, dtype=BFLOAT16)) for shape in shapes]
        is_full = laid_out is not unchanged
        rest = {"lr": torch.tensor(1e-3), "found_inf": torch.zeros(()) if is_full else None, "allow_tf32": allow_tf32}
        steps = [torch.tensor(3.0)] * len(params)
        yield call(
            "linear_adam_", grad_outputs, inputs, layers, params, averages, squares, largest if is_full else [], steps,
            grads if is_full else [], shadows if is_full else [], beta1=0.9, beta2=0.999, eps=1e-8,
            weight_decay=0.1 if is_full else 0.0, decoupled=True, maximize=is_full, **rest,
        )  # fmt: skip
        yield call(
            "linear_sgd_", grad_outputs, inputs, layers, params, averages if is_full else [],
            grads if is_full else [], shadows if is_full else [], momentum=0.9 if is_full else 0.0, dampening=0.0,
            weight_decay=0.1 if is_full else 0.0, nesterov=is_full, maximize=is_full, **rest,
        )  # fmt: skip


def casts() -> Iterator[Call]:
    sizes = (1, 3, 1023, 1024, 1025, 0, 4097, 9000)
    for source, dtype, laid_out, count in (
        (FLOAT32, BFLOAT16, unchanged, 8),
        (FLOAT32, FLOAT16, shifted, 17),
        (BFLOAT16, FLOAT32, shifted, 65),
        (FLOAT16, BFLOAT16, unchanged, 130),
    ):
        random = Random()
        drawn = [random(sizes[n % 8] if n < 8 else n, dtype=source) for n in range(count)]
        images = channels_last(random(2, 3, 5, 7, dtype=source))
        yield call("cast_many", [images, *map(laid_out, drawn)], dtype)


def scalars() -> Iterator[Call]:
    for dtype, count, laid_out in (
        (FLOAT32, 1, unchanged),
        (torch.int64, 7, shifted),
        (torch.float64, 20, shifted),
        (torch.int32, 300, unchanged),
    ):
        numbers = [laid_out(torch.tensor(number, dtype=dtype)) for number in range(count)]
        yield call("add_to_scalars_", numbers, 3)


def hand_out() -> Iterator[Call]:
    for dtype, place in ((FLOAT32, 0), (torch.float64, 2), (BFLOAT16, 4)):
        value = torch.tensor(2.5, dtype=dtype)
        yield Call(HAND_OUT, (shifted(value), torch.zeros(5, dtype=dtype), place), {})
    images = torch.randn(5, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    yield Call(HAND_OUT, (images, torch.zeros(301), 0), {})
    yield Call(HAND_OUT, (shifted(torch.randn(7, 9).bfloat16()), torch.zeros(70, dtype=BFLOAT16), 3), {})
    yield Call(HAND_OUT, (shifted(torch.randn(128, 31)), torch.zeros(3980), 11), {})  # by several warps


# Matrix products


LINEAR_SHAPES = ((131, 133, 515), (19, 37, 45), (1, 1, 1))  # M, N, K; all forms fit into the first one


def linears() -> Iterator[Call]:
    few, one, full = ["silu", "tanh"], ["relu"], list(ACTIVATIONS)
    for dtype, of_weight, allow_tf32, of_shapes in (
        (BFLOAT16, BFLOAT16, False, (["none", "gelu"], full, one)),
        (FLOAT32, FLOAT32, False, (["gelu", "none"], full, one)),
        (FLOAT32, FLOAT32, True, (["relu"], few, [])),
        (BFLOAT16, FLOAT32, False, ([], few, one)),
        (FLOAT16, FLOAT32, False, ([], few, one)),
    ):
        options = {"dtype": dtype, "allow_tf32": allow_tf32}
        for shape, activations in zip(LINEAR_SHAPES, of_shapes, strict=True):
            for activation, laid_out in zip(activations, itertools.cycle((shifted, sliced, transposed)), strict=False):
                yield from _linear(shape, activation, laid_out, of_weight, options)


def _linear(
    shape: tuple[int, int, int],
    activation: str,
    laid_out: Callable[[Tensor], Tensor],
    of_weight: torch.dtype,
    options: dict[str, Any],
) -> Iterator[Call]:
    (rows, cols, depth), dtype, random = shape, options["dtype"], Random()
    x = laid_out(random(rows, depth, dtype=dtype))
    weight = laid_out(random(cols, depth, dtype=of_weight, scale=depth**-0.5))
    bias = None if activation == "none" else random(2 * cols, dtype=of_weight)[::2]
    keep = activation in OF_PREACTIVATION
    yield call("linear_activation", x, weight, bias, activation, keep_preactivation=keep, **options)
    grad = laid_out(random(rows, cols, dtype=dtype, scale=cols**-0.5))
    saved = None if activation == "none" else laid_out(random(rows, depth, dtype=dtype).clamp(-0.9, 0.9))
    yield call("linear_input_gradient", grad, weight, saved, activation, **options)


def heads() -> Iterator[Call]:
    shapes = ((45, 10, 515), (19, 128, 45), (1, 1, 1))  # M, N, K
    for dtype, of_weight, allow_tf32 in (
        (BFLOAT16, FLOAT32, False),
        (FLOAT32, FLOAT32, False),
        (FLOAT32, FLOAT32, True),
        (FLOAT16, FLOAT16, False),
    ):
        for (rows, classes, depth), activation, laid_out in zip(
            shapes, ("relu", "none", "gelu"), (sliced, transposed, shifted), strict=True
        ):
            random = Random()
            x = laid_out(random(rows, depth, dtype=dtype))
            weight = laid_out(random(classes, depth, dtype=of_weight, scale=depth**-0.5))
            targets = random.below(classes, 2 * rows)[1::2]
            targets[1::3] = -100
            saved = None if activation == "none" else laid_out(random(rows, depth, dtype=dtype))
            bias = None if activation == "none" else shifted(random(classes, dtype=of_weight))
            scale = torch.tensor(8.0) if activation == "relu" else None
            yield call(
                "cross_entropy_head", x, weight, bias, targets, saved, activation,
                dtype=dtype, scale=scale, allow_tf32=allow_tf32,
            )  # fmt: skip


# Normalizations


def batch_norms() -> Iterator[Call]:
    for dtype, shape, laid_out, is_full, has_residual, relu, is_joined in (
        (BFLOAT16, (3, 70, 9, 7), channels_last, True, True, True, True),
        (BFLOAT16, (5, 13, 31, 33), channels_last, False, False, True, True),
        (BFLOAT16, (5, 3, 61, 33), unchanged, True, True, True, True),
        (FLOAT32, (3, 7, 9, 7), unchanged, False, True, True, False),
        (FLOAT32, (3, 7, 43, 47), lambda images: shifted(channels_last(images)), True, False, True, True),
        (FLOAT32, (37, 19), unchanged, False, True, False, False),
        (FLOAT16, (3, 17, 9, 7), shifted, True, False, False, False),
    ):
        random = Random()
        a, b, residual, grad, added = (laid_out(random(*shape, dtype=dtype)) for _ in range(5))
        norms = [_Norm.drawn(random, x, is_full) for x in (a, b)]
        rest = {"added_grad_y": added if is_full else None}
        yield from _batch_norm(norms[0], residual if has_residual else None, grad, relu, rest)
        if is_joined:
            yield from _joined_batch_norms(*norms, grad, rest)


class _Norm(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    @classmethod
    def drawn(cls, random: Random, x: Tensor, is_full: bool) -> _Norm:
        if not is_full:
            return cls(x, None, None, None, None)
        channels = x.shape[1]
        means = (shifted(random(channels)) for _ in range(3))
        return cls(x, *means, shifted(random.positive(channels)))

    def counters(self, branches: int = 1) -> Tensor | None:
        """Where there is no weight, operators make their own."""
        if self.weight is None:
            return None
        return torch.zeros(num_counters(self.x.shape[1], branches), dtype=torch.int32)


def _batch_norm(
    norm: _Norm, residual: Tensor | None, grad: Tensor, relu: bool, rest: dict[str, Tensor | None]
) -> Iterator[Call]:
    x, weight, bias = norm[:3]
    options = {"momentum": 0.1, "eps": 1e-5, "relu": relu}
    yield call("batch_norm", x, residual, *norm[1:], counters=norm.counters(), **options)
    y, *saved = of("batch_norm", x, residual, weight, bias, None, None, **options)
    y, rest = torch.empty_like(x).copy_(y), {**rest, "counters": norm.counters()}
    if residual is not None and relu:
        yield call("batch_norm_residual_backward", grad, x, y, weight, *saved, **rest)
    mask = y if residual is not None and relu else None
    yield call("batch_norm_backward", grad, x, mask, weight, bias, *saved, relu=relu, **rest)


def _joined_batch_norms(a: _Norm, b: _Norm, grad: Tensor, rest: dict[str, Tensor | None]) -> Iterator[Call]:
    options = {"momentum_a": 0.1, "eps_a": 1e-5, "momentum_b": 0.2, "eps_b": 1e-3}
    yield call("batch_norm_join", *a, *b, counters=a.counters(2), **options)
    y, *saved = of("batch_norm_join", *a[:3], None, None, *b[:3], None, None, **options)
    mask = None if a.weight is None else y
    yield call(
        "batch_norm_join_backward", grad, mask, *a[:3], *saved[:2], *b[:3], *saved[2:], counters=a.counters(), **rest
    )


def row_norms() -> Iterator[Call]:
    for dtype, shape, laid_out, is_full in (
        (BFLOAT16, (37, 768), unchanged, True),
        (BFLOAT16, (3, 20001), sliced, True),
        (FLOAT32, (2, 5, 45), sliced, True),
        (FLOAT32, (3, 9001), shifted, False),
        (FLOAT16, (300, 33), shifted, False),
        (FLOAT32, (1, 1), unchanged, False),
    ):
        random, cols = Random(), shape[-1]
        x, residual, grad, grad_total = (laid_out(random(*shape, dtype=dtype)) for _ in range(4))
        weight, bias = (shifted(random(cols)) for _ in range(2))
        copy_dtype = FLOAT32 if is_full else None
        eps = (
            1e-5 if cols > 1 else 0.5
        )  # of a single column, whose root mean square it is, rounding alone would be left
        rest = {"dtype": dtype, "copy_dtype": copy_dtype, "eps": eps}
        of_backward = {"weight_dtype": FLOAT32 if is_full else dtype, "copy_dtype": copy_dtype}
        of_mean = {**of_backward, "bias_dtype": dtype if is_full else None}
        if not is_full:
            residual, grad_total, weight, bias = None, None, None, None
        yield call("layer_norm", x, residual, weight, bias, **rest)
        yield call("rms_norm", x, residual, weight, **rest)
        mean, rstd = of("layer_norm", x, None, weight, bias, **rest)[2:4]
        yield call("layer_norm_backward", grad, grad_total, x, mean, rstd, weight, **of_mean)
        rstd = of("rms_norm", x, None, weight, **rest)[2]
        yield call("rms_norm_backward", grad, grad_total, x, rstd, weight, **of_backward)


# Images


def pools() -> Iterator[Call]:
    for dtype, shape, (kernel, stride, padding), laid_out, last, of_positions, relu in (
        (BFLOAT16, (2, 7, 14, 13), ([3, 3], [2, 2], [1, 1]), channels_last, True, None, True),
        (FLOAT32, (2, 7, 14, 13), ([2, 2], [2, 2], [0, 0]), unchanged, False, True, True),
        (FLOAT32, (3, 5, 9, 11), ([3, 2], [1, 2], [1, 0]), sliced, True, None, False),
        (FLOAT16, (1, 3, 5, 4), ([2, 3], [3, 1], [0, 1]), shifted, False, False, True),
    ):
        random, windows = Random(), (kernel, stride, padding)
        x = laid_out(random(*shape, dtype=dtype))
        options = {"relu": relu, "channels_last": last}
        yield call("max_pool", x, *windows, position_channels_last=of_positions, **options)
        y, position = of("max_pool", x, *windows, position_channels_last=of_positions, **options)
        grad = laid_out(random(*y.shape, dtype=dtype))
        yield call("max_pool_backward", grad, shifted(position), shape[2:], *windows, channels_last=not last)


def small_convs() -> Iterator[Call]:
    for dtype, of_weight, (batch, channels, size), (outputs, *kernel), (stride, padding), laid_out, last, tf32 in (
        (BFLOAT16, FLOAT32, (3, 6, (14, 13)), (16, 5, 5), ([1, 1], [0, 0]), unchanged, False, False),
        (FLOAT32, FLOAT32, (3, 6, (14, 13)), (16, 5, 5), ([1, 1], [2, 2]), channels_last, True, False),
        (FLOAT32, FLOAT32, (2, 9, (11, 9)), (7, 3, 4), ([2, 1], [1, 0]), sliced, False, True),
        (FLOAT16, FLOAT16, (2, 1, (7, 5)), (5, 7, 1), ([2, 2], [3, 0]), shifted, True, False),
        (BFLOAT16, BFLOAT16, (1, 33, (6, 5)), (37, 1, 1), ([1, 2], [0, 0]), sliced, True, False),
    ):
        random, windows = Random(), (stride, padding)
        x = laid_out(random(batch, channels, *size, dtype=dtype))
        weight = shifted(random(outputs, channels, *kernel, dtype=of_weight, scale=0.2))
        bias = random(outputs, dtype=of_weight) if last else None
        options = {"dtype": dtype, "channels_last": last, "allow_tf32": tf32}
        yield call("small_conv", x, weight, bias, *windows, relu=last, **options)
        grad = laid_out(random(*of("small_conv", x, weight, None, *windows, relu=False, **options).shape, dtype=dtype))
        activation = x if last else None
        yield call("small_conv_input_grad", grad, weight, activation, size, *windows, **options)
        result_dtype = FLOAT32 if last else dtype
        yield call("small_conv_weight_grad", grad, x, kernel, *windows, result_dtype=result_dtype, **options)


def part_of_channels(images: Tensor) -> Tensor:
    """The same values as a part of the channels of wider images."""
    num, channels, height, width = images.shape
    wide = channels_last(images.new_zeros(num, channels + 24, height, width))
    return wide[:, 16 : 16 + channels].copy_(images)


def convs() -> Iterator[Call]:
    for dtype, (batch, channels, size), (outputs, *kernel), padding, laid_out in (
        (BFLOAT16, (8, 40, [4, 4]), (72, 3, 3), [1, 1], part_of_channels),
        (BFLOAT16, (18, 72, [8, 8]), (136, 3, 3), [1, 1], channels_last),
        (FLOAT16, (3, 48, [5, 3]), (32, 1, 1), [0, 0], channels_last),
        (BFLOAT16, (1, 32, [9, 6]), (48, 5, 2), [2, 0], channels_last),
        (BFLOAT16, (2, 32, [8, 8]), (64, 1, 3), [0, 1], lambda images: shifted(channels_last(images))),
    ):
        random = Random()
        x, weight = (
            laid_out(random(batch, channels, *size, dtype=dtype)),
            random(outputs, channels, *kernel, dtype=dtype),
        )
        weight = channels_last(weight * 0.1)
        bias = random(outputs, dtype=dtype) if kernel[0] == kernel[1] else None
        yield call("conv", x, weight, bias, padding, relu=bias is None)
        y = of("conv", x, weight, None, padding, relu=False)
        grad = channels_last(random(*y.shape, dtype=dtype))
        yield call("conv_input_grad", laid_out(grad), weight, size, padding)
        if grad.shape[2:] == x.shape[2:] and size[0] & (size[0] - 1) == 0:
            yield call("conv_weight_grad", grad, x, kernel, padding)


def convs_with_batch_norms() -> Iterator[Call]:
    for dtype, (batch, channels, size), kernel, is_full in (
        (BFLOAT16, (8, 40, [4, 4]), 3, False),
        (BFLOAT16, (18, 72, [8, 8]), 3, True),
        (BFLOAT16, (64, 32, [3, 3]), 1, True),
    ):
        random, padding = Random(), [kernel // 2] * 2
        x, residual, grad, added = (channels_last(random(batch, channels, *size, dtype=dtype)) for _ in range(4))
        weight = channels_last(random(channels, channels, kernel, kernel, dtype=dtype) * 0.1)
        of_channels = [random.positive(channels) for _ in range(4)] if is_full else [None] * 4
        yield call(
            "conv_batch_norm", x, weight, padding, residual if is_full else None, *of_channels,
            momentum=0.3, eps=1e-3, relu=is_full,
        )  # fmt: skip
        mean, var = x.float().mean((0, 2, 3)), x.float().var((0, 2, 3), unbiased=False)
        invstd = (var + 1e-3).rsqrt()
        for y in (residual, None) if is_full else (None,):
            yield call(
                "conv_input_grad_batch_norm_backward", grad, weight, padding, x, y, *of_channels[:2], mean, invstd,
                relu=is_full, added_grad_y=added if y is not None else None,
            )  # fmt: skip


# Vocabularies


def losses() -> Iterator[Call]:
    for dtype, (rows, cols), laid_out, reduction, smoothing in (
        (BFLOAT16, (7, 8195), sliced, "mean", 0.1),
        (FLOAT32, (5, 5001), shifted, "sum", 0.0),
        (FLOAT16, (33, 37), unchanged, "mean", 0.0),
        (FLOAT32, (1, 1), unchanged, "mean", 0.1),
    ):
        random = Random()
        logits, targets = laid_out(random(rows, cols, dtype=dtype)), random.below(cols, 2 * rows)[::2]
        targets[1::3] = -100
        options = {"reduction": reduction, "ignore_index": -100, "label_smoothing": smoothing}
        yield call("cross_entropy", logits, targets, **options)
        statistics = of("cross_entropy", logits, targets, **options)[1:]
        for name in ("cross_entropy_backward", "cross_entropy_backward_"):
            yield call(name, torch.tensor(1.7), logits, targets, *statistics, **options)


def embeddings() -> Iterator[Call]:
    for dtype, cols, laid_out, of_indices, is_full in (
        (FLOAT32, 768, unchanged, torch.int64, False),
        (BFLOAT16, 1501, sliced, torch.int32, True),
        (FLOAT16, 33, shifted, torch.int64, True),
    ):
        random, batch, length, size = Random(), 3, 101, 11
        weight, others = (laid_out(random(rows, cols, dtype=dtype)) for rows in (size, length + 2))
        indices = transposed(random.below(size, batch, length, dtype=of_indices))
        indices[0] = 4
        positions = torch.arange(length).to(of_indices)
        yield call("embedding", weight, indices, *((others, positions) if is_full else (None, None)))
        indices = indices.clone()
        indices[1, :9] = size + 5 if is_full else 2
        grad = laid_out(random(batch * length, cols, dtype=dtype)).unflatten(0, (batch, length))
        yield call(
            "embedding_backward", grad, indices, laid_out(random(size, cols)) if is_full else None,
            num_embeddings=size, padding_idx=2 if is_full else -1, dtype=FLOAT32 if is_full else dtype,
        )  # fmt: skip


MAKERS: Sequence[Callable[[], Iterator[Call]]] = (
    adam, grouped_updates, casts, scalars, hand_out, linears, heads, batch_norms, row_norms, pools, small_convs, convs,
    convs_with_batch_norms, losses, embeddings,
)  # fmt: skip


def all_calls() -> list[Call]:
    """By operator, in one order always."""
    made = [one for make in MAKERS for one in make()]
    operators = dict.fromkeys(one.operator for one in made)
    return [one for operator in operators for one in made if one.operator == operator]


# The kernel that hands results out, as an operator


def _hand_out_on_cpu(value: Tensor, row: Tensor, place: int) -> Tensor:
    row[place:].as_strided(value.shape, value.stride()).copy_(value)
    return torch.tensor(place + value.numel() + 1)


def _hand_out_on_cuda(value: Tensor, row: Tensor, place: int) -> Tensor:
    from kitsune.kernels.hand_out_triton import hand_out  # Triton is optional

    cell = torch.tensor(row[place:].data_ptr(), device=row.device)
    hand_out(value, cell, value.numel() + 1)
    return (cell - row.data_ptr()) // row.element_size()


torch.library.impl(HAND_OUT, "CPU", _hand_out_on_cpu)
torch.library.impl(HAND_OUT, "CUDA", _hand_out_on_cuda)
