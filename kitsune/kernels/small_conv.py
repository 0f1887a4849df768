"""`kitsune::small_conv` and its gradients: convolutions of few channels and small kernels, each in one or two launches.

They take the place of `aten.convolution` (+ `aten.relu`) and `aten.convolution_backward` (+ `aten.threshold_backward`)
where a library's convolution costs more in preparation than in arithmetic. As with autocast, inputs are rounded to
`dtype` when they are read, products are added up in float32, and results are rounded once.

A convolution is a matrix product over the taps (channel and offset in the kernel) of the patches of its input, which
are gathered while they are multiplied and never stored (implicit GEMM; Chetlur et al., "cuDNN: Efficient Primitives for
Deep Learning", 2014). Hence zeros of the padding count as factors: times an infinite weight they give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kitsune.kernels.images import FLOATS, check_images, dense, windows

MOST_CHANNELS = 64
"""On either side."""

_MOST_KERNEL = 7
_MOST_STRIDE = 2
_MOST_PIXELS = 2**30  # of a batch in one channel: the kernels number them in 32 bits

torch.library.define(
    "kitsune::small_conv",
    "(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, *, ScalarType dtype, bool relu, "
    "bool channels_last, bool allow_tf32) -> Tensor",
)
torch.library.define(
    "kitsune::small_conv_input_grad",
    "(Tensor grad, Tensor weight, Tensor? activation, int[2] size, int[2] stride, int[2] padding, *, ScalarType dtype, "
    "bool channels_last, bool allow_tf32) -> Tensor",
)
torch.library.define(
    "kitsune::small_conv_weight_grad",
    "(Tensor grad, Tensor x, int[2] kernel, int[2] stride, int[2] padding, *, ScalarType dtype, "
    "ScalarType result_dtype, bool channels_last, bool allow_tf32) -> (Tensor, Tensor)",
)


def small_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    dtype: torch.dtype,
    relu: bool,
    channels_last: bool,
    allow_tf32: bool,
) -> torch.Tensor:
    """y[n, o, h, w] = relu?(bias[o] + sum over c, i, j of weight[o, c, i, j] x[n, c, h s - p + i, w s - p + j]).

    Args:
        x: (N, C, H, W) in `dtype` or float32, C from 1 to 64, with any strides.
        weight: (O, C, kh, kw) in `dtype` or float32, O from 1 to 64, kernels of 1x1 to 7x7, with any strides.
        bias: (O,) in `dtype` or float32, or None.
        stride, padding: along height and width; strides of 1 or 2.
        dtype: of the factors and of the result: float32, bfloat16 or float16.
        channels_last: the layout of the result, whatever those of the inputs; contiguous otherwise.
        allow_tf32: whether float32 factors may be rounded to TF32.

    Returns:
        (N, O, H', W') in `dtype`.

    Raises:
        ValueError: dtypes, devices or shapes are not as above, one image spans more than 2**30 elements, or the
            batch has more than 2**30 pixels.
    """
    result: torch.Tensor = torch.ops.kitsune.small_conv.default(
        x,
        weight,
        bias,
        list(stride),
        list(padding),
        dtype=dtype,
        relu=relu,
        channels_last=channels_last,
        allow_tf32=allow_tf32,
    )
    return result


def small_conv_input_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    activation: torch.Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    dtype: torch.dtype,
    channels_last: bool,
    allow_tf32: bool,
) -> torch.Tensor:
    """The gradient of `small_conv` without ReLU with respect to its input, 0 where `activation` <= 0.

    Args:
        grad: (N, O, H', W'), of the convolution's result, in `dtype` or float32, with any strides.
        weight: as for `small_conv`.
        activation: (N, C, *size) in `dtype` or float32, with any strides: the convolution's input, if that is the
            output of a ReLU whose gradient is to be taken too; or None.
        size: height and width of the convolution's input.
        stride, padding, dtype, channels_last, allow_tf32: as for `small_conv`.

    Returns:
        (N, C, *size) in `dtype`.

    Raises:
        ValueError: as `small_conv`, or the shapes do not belong together.
    """
    result: torch.Tensor = torch.ops.kitsune.small_conv_input_grad.default(
        grad,
        weight,
        activation,
        list(size),
        list(stride),
        list(padding),
        dtype=dtype,
        channels_last=channels_last,
        allow_tf32=allow_tf32,
    )
    return result


def small_conv_weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    dtype: torch.dtype,
    result_dtype: torch.dtype,
    channels_last: bool,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `small_conv` without ReLU with respect to its weight and bias.

    The sums over the batch are taken in a fixed order, part by part and then over the parts.

    Args:
        grad: (N, O, H', W'), of the convolution's result, in `dtype` or float32, with any strides.
        x: as for `small_conv`.
        kernel: height and width of the weight.
        stride, padding, dtype, allow_tf32: as for `small_conv`.
        result_dtype: of the results: `dtype`, or float32, which the kernels do not round to `dtype` before.
        channels_last: the layout of the weight's gradient; contiguous otherwise.

    Returns:
        (O, C, *kernel) and (O,).

    Raises:
        ValueError: as `small_conv`, or the shapes do not belong together.
    """
    weight_grad, bias_grad = torch.ops.kitsune.small_conv_weight_grad.default(
        grad,
        x,
        list(kernel),
        list(stride),
        list(padding),
        dtype=dtype,
        result_dtype=result_dtype,
        channels_last=channels_last,
        allow_tf32=allow_tf32,
    )
    return weight_grad, bias_grad


def _check(input_shape: Sequence[int], weight_shape: Sequence[int], stride: list[int], padding: list[int]) -> list[int]:
    """The shape of the convolution's result, or ValueError."""
    if len(weight_shape) != 4 or input_shape[1] != weight_shape[1]:
        raise ValueError(
            "small_conv takes weights of shape (O, C, kh, kw) for inputs of shape (N, C, H, W): "
            f"got {list(weight_shape)} for {list(input_shape)}"
        )
    channels, kernel = weight_shape[:2], weight_shape[2:]
    if not (min(channels) >= 1 and max(channels) <= MOST_CHANNELS and min(kernel) >= 1 and max(kernel) <= _MOST_KERNEL):
        raise ValueError(f"small_conv takes 1 to 64 channels and kernels of 1 to 7: got weights {list(weight_shape)}")
    if not (min(stride) >= 1 and max(stride) <= _MOST_STRIDE and min(padding) >= 0):
        raise ValueError(f"small_conv takes strides of 1 or 2 and paddings from 0: got {stride} and {padding}")
    sizes = windows(input_shape[2:], kernel, stride, padding)
    if min(*input_shape[2:], *sizes) < 1:
        raise ValueError(f"no kernel of {list(kernel)} with padding {padding} fits into images of {input_shape[2:]}")
    if input_shape[0] * max(sizes[0] * sizes[1], input_shape[2] * input_shape[3]) > _MOST_PIXELS:
        raise ValueError(f"small_conv takes 2**30 pixels: got {list(input_shape)}, which gives {sizes}")
    return [input_shape[0], weight_shape[0], *sizes]


def _check_tensors(dtype: torch.dtype, device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless the factors are in `dtype` or float32, and on one device."""
    if dtype not in FLOATS:
        raise ValueError(f"small_conv computes in float32, bfloat16 or float16: got {dtype}")
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype not in (dtype, torch.float32) or tensor.device != device):
            raise ValueError(
                f"{name} must be {dtype} or torch.float32 on {device}: got {tensor.dtype} on {tensor.device}"
            )


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    channels_last: bool,
    **_: bool,
) -> torch.Tensor:
    _check_tensors(dtype, x.device, x=x, weight=weight, bias=bias)
    check_images("x", x, x.device)
    shape = _check(x.shape, weight.shape, stride, padding)
    if bias is not None and list(bias.shape) != shape[1:2]:
        raise ValueError(f"small_conv takes biases of shape {shape[1:2]}: got {list(bias.shape)}")
    return dense(x, shape, dtype, channels_last)


def _fake_input_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    activation: torch.Tensor | None,
    size: list[int],
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    channels_last: bool,
    **_: bool,
) -> torch.Tensor:
    _check_tensors(dtype, grad.device, grad=grad, weight=weight, activation=activation)
    check_images("grad", grad, grad.device)
    shape = [grad.shape[0], *weight.shape[1:2], *size]
    _check_grad(grad, _check(shape, weight.shape, stride, padding))
    if activation is not None:
        check_images("activation", activation, grad.device)
        if list(activation.shape) != shape:
            raise ValueError(f"activation must have the shape of the result, {shape}: got {list(activation.shape)}")
    return dense(grad, shape, dtype, channels_last)


def _fake_weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    result_dtype: torch.dtype,
    channels_last: bool,
    **_: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_tensors(dtype, grad.device, grad=grad, x=x)
    check_images("grad", grad, grad.device)
    check_images("x", x, grad.device)
    if result_dtype not in (dtype, torch.float32):
        raise ValueError(f"small_conv_weight_grad gives {dtype} or torch.float32: asked for {result_dtype}")
    shape = [grad.shape[1], x.shape[1], *kernel]
    _check_grad(grad, _check(x.shape, shape, stride, padding))
    return dense(grad, shape, result_dtype, channels_last), grad.new_empty(shape[:1], dtype=result_dtype)


def _check_grad(grad: torch.Tensor, shape: list[int]) -> None:
    if list(grad.shape) != shape:
        raise ValueError(f"the gradient of the convolution's result has the shape {shape}: got {list(grad.shape)}")


def _on_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    relu: bool,
    **options: Any,
) -> torch.Tensor:
    result = _fake(x, weight, bias, stride, padding, dtype=dtype, **options)
    factors = (x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    y = torch.ops.aten.convolution.default(*factors, stride, padding, [1, 1], False, [0, 0], 1)
    return result.copy_(y.relu() if relu else y)


def _on_cpu_input_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    activation: torch.Tensor | None,
    size: list[int],
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    **options: Any,
) -> torch.Tensor:
    result = _fake_input_grad(grad, weight, activation, size, stride, padding, dtype=dtype, **options)
    input_grad, _, _ = _convolution_backward(
        grad.to(dtype), torch.empty_like(result), weight.to(dtype), stride, padding, [True, False, False]
    )
    return result.copy_(input_grad if activation is None else input_grad.masked_fill(activation <= 0, 0))


def _on_cpu_weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    weight_grad, bias_grad = _fake_weight_grad(grad, x, kernel, stride, padding, dtype=dtype, **options)
    _, weight_sum, bias_sum = _convolution_backward(
        grad.to(dtype), x.to(dtype), torch.empty_like(weight_grad, dtype=dtype), stride, padding, [False, True, True]
    )
    return weight_grad.copy_(weight_sum), bias_grad.copy_(bias_sum)


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward.default(
        grad, x, weight, [weight.shape[0]], stride, padding, [1, 1], False, [0, 0], 1, wanted
    )
    return found


def _on_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    *,
    relu: bool,
    allow_tf32: bool,
    **options: Any,
) -> torch.Tensor:
    from kitsune.kernels import small_conv_triton  # Triton is optional

    result = _fake(x, weight, bias, stride, padding, **options)
    with torch.cuda.device(x.device):
        small_conv_triton.launch(x, weight, bias, result, stride, padding, relu=relu, allow_tf32=allow_tf32)
    return result


def _on_cuda_input_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    activation: torch.Tensor | None,
    size: list[int],
    stride: list[int],
    padding: list[int],
    *,
    allow_tf32: bool,
    **options: Any,
) -> torch.Tensor:
    from kitsune.kernels import small_conv_triton  # Triton is optional

    result = _fake_input_grad(grad, weight, activation, size, stride, padding, **options)
    with torch.cuda.device(grad.device):
        small_conv_triton.launch_input_grad(grad, weight, activation, result, stride, padding, allow_tf32=allow_tf32)
    return result


def _on_cuda_weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    dtype: torch.dtype,
    allow_tf32: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    from kitsune.kernels import small_conv_triton  # Triton is optional

    results = _fake_weight_grad(grad, x, kernel, stride, padding, dtype=dtype, **options)
    with torch.cuda.device(grad.device):
        small_conv_triton.launch_weight_grad(grad, x, *results, stride, padding, dtype=dtype, allow_tf32=allow_tf32)
    return results


torch.library.register_fake("kitsune::small_conv", _fake)
torch.library.register_fake("kitsune::small_conv_input_grad", _fake_input_grad)
torch.library.register_fake("kitsune::small_conv_weight_grad", _fake_weight_grad)
torch.library.impl("kitsune::small_conv", "CPU", _on_cpu)
torch.library.impl("kitsune::small_conv_input_grad", "CPU", _on_cpu_input_grad)
torch.library.impl("kitsune::small_conv_weight_grad", "CPU", _on_cpu_weight_grad)
torch.library.impl("kitsune::small_conv", "CUDA", _on_cuda)
torch.library.impl("kitsune::small_conv_input_grad", "CUDA", _on_cuda_input_grad)
torch.library.impl("kitsune::small_conv_weight_grad", "CUDA", _on_cuda_weight_grad)
