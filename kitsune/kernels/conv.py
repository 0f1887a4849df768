"""`kitsune::conv` and its gradients: convolutions of stride 1 in half precision, of images in channels last.

They take the place of `aten.convolution` (+ `aten.relu`), of `aten.convolution_backward`, and of both together with the
batch norm beside them (`kitsune::batch_norm`, `kitsune::batch_norm_backward`): the sums that it takes over all images
are taken of tiles that are on the chip anyway, which saves reading them once more.

Products are added up in float32, and results are rounded once, as a library's convolution does.

A convolution is a matrix product over the taps of its kernel, whose patches are gathered while they are multiplied and
never stored (implicit GEMM; Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014). On CUDA tiles are
fetched by the bulk copy engine, which puts zeros where the padding is; that takes compute capability 9.0, as
`kitsune.device.refuse_bulk_copies` says. Zeros of the padding count as factors: times an infinite weight they give NaN;
where channels fill no multiple of 64, so do zeros in the place of further ones, anywhere.

Images are (N, C, H, W), weights (O, C, kh, kw), both channels last, in bfloat16 or float16, their numbers of channels
multiples of 8. What belongs to channels of a batch norm is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels import batch_norm as norms
from kitsune.kernels import batch_norm_reference
from kitsune.kernels.conv_forms import Images, has_exact_tiles, has_runs_of_pixels
from kitsune.kernels.images import check_images, dense, windows

DTYPES = (torch.bfloat16, torch.float16)
CHANNELS_MULTIPLE = 8
"""Of elements: the bulk copy engine takes rows of 16 bytes and their multiples."""

_MOST_PIXELS = 2**30  # of a batch in one channel: the kernels number them in 32 bits

WEIGHT_GRAD_KERNELS = (1, 3)
"""Widths of kernels for which there is a gradient of the weight."""

torch.library.define("kitsune::conv", "(Tensor x, Tensor weight, Tensor? bias, int[2] padding, *, bool relu) -> Tensor")
torch.library.define("kitsune::conv_input_grad", "(Tensor grad, Tensor weight, int[2] size, int[2] padding) -> Tensor")
torch.library.define("kitsune::conv_weight_grad", "(Tensor grad, Tensor x, int[2] kernel, int[2] padding) -> Tensor")
torch.library.define(
    "kitsune::conv_batch_norm",
    "(Tensor x, Tensor conv_weight, int[2] padding, Tensor? residual, Tensor? weight, Tensor? bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, *, float momentum, float eps, bool relu) "
    "-> (Tensor conv, Tensor y, Tensor save_mean, Tensor save_invstd)",
)
torch.library.define(
    "kitsune::conv_input_grad_batch_norm_backward",
    "(Tensor grad, Tensor conv_weight, int[2] padding, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, "
    "Tensor save_mean, Tensor save_invstd, *, bool relu, Tensor? added_grad_y=None) "
    "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
)


def cut_images(source: Tensor, size: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> Images:
    """What is cut into tiles of a result of `size`: all pixels are one row where no tap lies beside another."""
    num_images, (height, width) = source.shape[0], size
    is_flat = (*kernel, *padding) == (1, 1, 0, 0) and source.is_contiguous(memory_format=torch.channels_last)
    if is_flat:
        return Images(1, (1, num_images * height * width), is_row=True)
    return Images(num_images, (height, width))


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], *, relu: bool) -> Tensor:
    """y[n, o, h, w] = relu?(bias[o] + sum over c, i, j of weight[o, c, i, j] x[n, c, h - p + i, w - p + j]).

    Args:
        x: (N, C, H, W); images and rows may be apart, as in a part of the channels of other images.
        weight: (O, C, kh, kw), dense.
        bias: (O,) in the dtype of `x`, or None.
        padding: along height and width.

    Returns:
        (N, O, H', W'), dense.

    Raises:
        ValueError: dtypes, devices, shapes or layouts are not as above.
    """
    result: Tensor = torch.ops.kitsune.conv.default(x, weight, bias, list(padding), relu=relu)
    return result


def conv_input_grad(grad: Tensor, weight: Tensor, size: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The gradient of `conv` without ReLU with respect to its input.

    Args:
        grad: (N, O, H', W'), as `x` of `conv`.
        weight, padding: as for `conv`.
        size: height and width of the convolution's input.

    Returns:
        (N, C, *size), dense.

    Raises:
        ValueError: as `conv`, or the shapes do not belong together.
    """
    result: Tensor = torch.ops.kitsune.conv_input_grad.default(grad, weight, list(size), list(padding))
    return result


def conv_weight_grad(grad: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The gradient of `conv` without ReLU with respect to its weight.

    The sums over the batch are taken in a fixed order, part by part and then over the parts.

    Args:
        grad: (N, O, H', W'), as `x` of `conv`, but dense.
        x: as for `conv`.
        kernel: height and width of the weight; the width is 1 or 3.
        padding: as for `conv`; it leaves the size of images as it is.

    Returns:
        (O, C, *kernel), dense and channels last, in the dtype of `x`.

    Raises:
        ValueError: as `conv`, or the shapes do not belong together.
    """
    result: Tensor = torch.ops.kitsune.conv_weight_grad.default(grad, x, list(kernel), list(padding))
    return result


def conv_batch_norm(
    x: Tensor,
    conv_weight: Tensor,
    padding: Sequence[int],
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kitsune::batch_norm` of a `conv` without bias and ReLU.

    Args:
        x, conv_weight, padding: as for `conv`.
        others: as for `kitsune.kernels.batch_norm.batch_norm`; statistics are those of the rounded convolution.

    Returns:
        The convolution's result, and those of `kitsune.kernels.batch_norm.batch_norm`.

    Raises:
        ValueError: as both.
    """
    return torch.ops.kitsune.conv_batch_norm.default(  # type: ignore[no-any-return]
        x, conv_weight, list(padding), residual, weight, bias, running_mean, running_var,
        momentum=momentum, eps=eps, relu=relu,
    )  # fmt: skip


def conv_input_grad_batch_norm_backward(
    grad: Tensor,
    conv_weight: Tensor,
    padding: Sequence[int],
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    *,
    relu: bool,
    added_grad_y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kitsune::batch_norm_backward` of a `conv_input_grad`, whose result it rounds as that does.

    Args:
        grad, conv_weight, padding: as for `conv_input_grad`.
        others: as for `kitsune.kernels.batch_norm.batch_norm_backward`; `y` may be of a batch norm with a residual.

    Returns:
        grad_x, grad_residual: like `x`; the latter is the gradient behind the ReLU, which is that of a residual.
        grad_weight, grad_bias: (C,) of the batch norm.

    Raises:
        ValueError: as both.
    """
    return torch.ops.kitsune.conv_input_grad_batch_norm_backward.default(  # type: ignore[no-any-return]
        grad, conv_weight, list(padding), x, y, weight, bias, save_mean, save_invstd,
        relu=relu, added_grad_y=added_grad_y,
    )  # fmt: skip


# What checks the arguments and allocates the results: for tracing, that is all.


def _check_images(name: str, images: Tensor, like: Tensor) -> None:
    """Raises ValueError unless `images` are as the bulk copy engine takes them, in the dtype of `like`."""
    check_images(name, images, like.device)
    if images.dtype not in DTYPES or images.dtype != like.dtype:
        raise ValueError(
            f"conv takes images and weights of one dtype, bfloat16 or float16: {name} is {images.dtype}, "
            f"and another operand {like.dtype}"
        )
    if images.numel() == 0 or images.shape[1] % CHANNELS_MULTIPLE:
        raise ValueError(
            f"conv takes images with a number of channels that is a multiple of {CHANNELS_MULTIPLE}: "
            f"{name} is {tuple(images.shape)}"
        )
    rows = [step for size, step in zip(images.shape, images.stride(), strict=True) if size > 1]
    is_aligned = all(step > 0 and step % CHANNELS_MULTIPLE == 0 for step in rows if step != 1)
    if images.stride(1) != 1 or not is_aligned or rows.count(1) != 1:
        raise ValueError(
            "conv takes images in channels last whose rows begin at multiples of 16 bytes: "
            f"{name} of shape {tuple(images.shape)} has strides {images.stride()}"
        )


def _check_weight(weight: Tensor, like: Tensor) -> None:
    _check_images("weight", weight, like)
    if not weight.is_contiguous(memory_format=torch.channels_last) or weight.shape[0] % CHANNELS_MULTIPLE:
        raise ValueError(
            f"conv takes weights dense in channels last, of a multiple of {CHANNELS_MULTIPLE} channels on both sides: "
            f"got {tuple(weight.shape)} with strides {weight.stride()}"
        )


def _shape(x: Sequence[int], weight: Sequence[int], padding: Sequence[int]) -> list[int]:
    """That of a convolution's result, of the shapes of its operands."""
    if x[1] != weight[1] or min(padding) < 0:
        raise ValueError(
            "conv takes weights of as many channels as its input and paddings from 0: "
            f"got {list(weight)} for {list(x)}, padded by {list(padding)}"
        )
    sizes = windows(x[2:], weight[2:], (1, 1), padding)
    if x[0] * max(math.prod(x[2:]), math.prod(sizes)) > _MOST_PIXELS:
        raise ValueError(f"conv takes 2**30 pixels: got {list(x)}, which gives {sizes}")
    if min(sizes) < 1:
        raise ValueError(f"no kernel of {list(weight[2:])} padded by {list(padding)} fits into images of {list(x[2:])}")
    return [x[0], weight[0], *sizes]


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], *, relu: bool) -> Tensor:
    _check_images("x", x, x)
    _check_weight(weight, x)
    if bias is not None and (bias.dtype, bias.shape, bias.stride()) != (x.dtype, weight.shape[:1], (1,)):
        raise ValueError(
            f"conv takes biases of shape {list(weight.shape[:1])} in {x.dtype}, dense in memory: "
            f"got {list(bias.shape)} in {bias.dtype}"
        )
    return dense(x, _shape(x.shape, weight.shape, padding), x.dtype, channels_last=True)


def _output_input_grad(grad: Tensor, weight: Tensor, size: list[int], padding: list[int]) -> Tensor:
    _check_images("grad", grad, grad)
    _check_weight(weight, grad)
    shape = [grad.shape[0], weight.shape[1], *size]
    _check_grad(grad, _shape(shape, weight.shape, padding))
    return dense(grad, shape, grad.dtype, channels_last=True)


def _output_weight_grad(grad: Tensor, x: Tensor, kernel: list[int], padding: list[int]) -> Tensor:
    _check_images("grad", grad, grad)
    _check_images("x", x, grad)
    shape = [grad.shape[1], x.shape[1], *kernel]
    _check_grad(grad, _shape(x.shape, shape, padding))
    if kernel[1] not in WEIGHT_GRAD_KERNELS or grad.shape[2:] != x.shape[2:]:
        raise ValueError(
            "conv_weight_grad takes kernels whose width is 1 or 3, padded so that images stay as large as they are: "
            f"got {kernel} padded by {padding}"
        )
    cut = cut_images(x, x.shape[2:], kernel, padding)
    if not has_runs_of_pixels(cut):
        raise ValueError(f"conv_weight_grad has no tiles of pixels that follow one another in {list(x.shape)}")
    if not grad.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"conv_weight_grad takes gradients dense in memory: got strides {grad.stride()}")
    return dense(grad, shape, grad.dtype, channels_last=True)


def _check_grad(grad: Tensor, shape: list[int]) -> None:
    if list(grad.shape) != shape:
        raise ValueError(f"the gradient of the convolution's result has the shape {shape}: got {list(grad.shape)}")


def _outputs_batch_norm(
    x: Tensor,
    conv_weight: Tensor,
    padding: list[int],
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    result = _output(x, conv_weight, None, padding, relu=False)
    _check_for_sums(result, cut_images(x, result.shape[2:], conv_weight.shape[2:], padding))
    others = norms.outputs_of_batch_norm(result, residual, weight, bias, running_mean, running_var, **options)
    return result, *others


def _outputs_batch_norm_backward(
    grad: Tensor,
    conv_weight: Tensor,
    padding: list[int],
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    *,
    relu: bool,
    added_grad_y: Tensor | None = None,
) -> tuple[Tensor, ...]:
    grad_y = _output_input_grad(grad, conv_weight, list(x.shape[2:]), padding)
    _check_for_sums(grad_y, cut_images(grad, x.shape[2:], conv_weight.shape[2:], padding))
    grad_x, grad_weight, grad_bias = norms.outputs_of_batch_norm_backward(
        grad_y, x, y, weight, bias, save_mean, save_invstd, relu=relu, added_grad_y=added_grad_y
    )
    return grad_x, grad_y, grad_weight, grad_bias


def _check_for_sums(images: Tensor, cut: Images) -> None:
    """Raises ValueError where sums over `images` cannot be made of tiles."""
    if not has_exact_tiles(cut):
        raise ValueError(f"conv has no tiles that fill images of shape {list(images.shape)}, to sum them up for a norm")


# On the CPU: plain PyTorch.


def _on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], *, relu: bool) -> Tensor:
    result = _output(x, weight, bias, padding, relu=relu)
    y = torch.ops.aten.convolution.default(x, weight, bias, [1, 1], padding, [1, 1], False, [0, 0], 1)
    return result.copy_(y.relu() if relu else y)


def _on_cpu_input_grad(grad: Tensor, weight: Tensor, size: list[int], padding: list[int]) -> Tensor:
    result = _output_input_grad(grad, weight, size, padding)
    return result.copy_(_convolution_backward(grad, torch.empty_like(result), weight, padding, 0))


def _on_cpu_weight_grad(grad: Tensor, x: Tensor, kernel: list[int], padding: list[int]) -> Tensor:
    result = _output_weight_grad(grad, x, kernel, padding)
    return result.copy_(_convolution_backward(grad, x, torch.empty_like(result), padding, 1))


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, padding: list[int], place: int) -> Tensor:
    wanted = [other == place for other in range(3)]
    found = torch.ops.aten.convolution_backward.default(
        grad, x, weight, [0], [1, 1], padding, [1, 1], False, [0, 0], 1, wanted
    )
    gradient: Tensor = found[place]
    return gradient


def _on_cpu_batch_norm(
    x: Tensor, conv_weight: Tensor, padding: list[int], *of_norm: Any, **options: Any
) -> tuple[Tensor, ...]:
    outputs = _outputs_batch_norm(x, conv_weight, padding, *of_norm, **options)
    outputs[0].copy_(_on_cpu(x, conv_weight, None, padding, relu=False))
    batch_norm_reference.batch_norm(outputs[1:], outputs[0], *of_norm, **options)
    return outputs


def _on_cpu_batch_norm_backward(
    grad: Tensor, conv_weight: Tensor, padding: list[int], x: Tensor, y: Tensor | None, *of_norm: Any, **options: Any
) -> tuple[Tensor, ...]:
    outputs = _outputs_batch_norm_backward(grad, conv_weight, padding, x, y, *of_norm, **options)
    grad_x, grad_residual, grad_weight, grad_bias = outputs
    grad_y = _on_cpu_input_grad(grad, conv_weight, list(x.shape[2:]), padding)
    batch_norm_reference.batch_norm_backward(
        (grad_x, grad_weight, grad_bias), grad_y, x, y, *of_norm, **options, grad_residual=grad_residual
    )
    return outputs


# On CUDA.


def _on_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], *, relu: bool) -> Tensor:
    from kitsune.kernels import conv_triton  # Triton is optional

    result = _output(x, weight, bias, padding, relu=relu)
    with torch.cuda.device(x.device):
        conv_triton.conv(result, x, weight, bias, padding, relu=relu)
    return result


def _on_cuda_input_grad(grad: Tensor, weight: Tensor, size: list[int], padding: list[int]) -> Tensor:
    from kitsune.kernels import conv_triton  # Triton is optional

    result = _output_input_grad(grad, weight, size, padding)
    with torch.cuda.device(grad.device):
        conv_triton.conv_input_grad(result, grad, weight, padding)
    return result


def _on_cuda_weight_grad(grad: Tensor, x: Tensor, kernel: list[int], padding: list[int]) -> Tensor:
    from kitsune.kernels import conv_triton  # Triton is optional

    result = _output_weight_grad(grad, x, kernel, padding)
    with torch.cuda.device(grad.device):
        conv_triton.conv_weight_grad(result, grad, x, padding)
    return result


def _on_cuda_batch_norm(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    from kitsune.kernels import conv_triton  # Triton is optional

    outputs = _outputs_batch_norm(*arguments, **options)
    with torch.cuda.device(outputs[0].device):
        conv_triton.conv_batch_norm(outputs, *arguments, **options)
    return outputs


def _on_cuda_batch_norm_backward(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    from kitsune.kernels import conv_triton  # Triton is optional

    outputs = _outputs_batch_norm_backward(*arguments, **options)
    with torch.cuda.device(outputs[0].device):
        conv_triton.conv_input_grad_batch_norm_backward(outputs, *arguments, **options)
    return outputs


for _name, _fake, _cpu, _cuda in (
    ("conv", _output, _on_cpu, _on_cuda),
    ("conv_input_grad", _output_input_grad, _on_cpu_input_grad, _on_cuda_input_grad),
    ("conv_weight_grad", _output_weight_grad, _on_cpu_weight_grad, _on_cuda_weight_grad),
    ("conv_batch_norm", _outputs_batch_norm, _on_cpu_batch_norm, _on_cuda_batch_norm),
    (
        "conv_input_grad_batch_norm_backward", _outputs_batch_norm_backward,
        _on_cpu_batch_norm_backward, _on_cuda_batch_norm_backward,
    ),
):  # fmt: skip
    torch.library.register_fake(f"kitsune::{_name}", _fake)
    torch.library.impl(f"kitsune::{_name}", "CPU", _cpu)
    torch.library.impl(f"kitsune::{_name}", "CUDA", _cuda)


# As PyTorch counts operations: of shapes, two for each product and its addition.

_ops = torch.ops.kitsune


@register_flop_formula(_ops.conv)
def _conv_flops(x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


@register_flop_formula(_ops.conv_batch_norm)
def _conv_batch_norm_flops(
    x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Sequence[Sequence[int]], **__: Any
) -> int:
    return 2 * math.prod(out_shape[0]) * math.prod(weight[1:])


@register_flop_formula([_ops.conv_input_grad, _ops.conv_input_grad_batch_norm_backward])
def _conv_input_grad_flops(grad: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(grad) * math.prod(weight[1:])


@register_flop_formula(_ops.conv_weight_grad)
def _conv_weight_grad_flops(grad: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return 2 * math.prod(grad) * math.prod(out_shape[1:])
