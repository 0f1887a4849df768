"""The launches of `kitsune.kernels.conv` on CUDA. To be imported where Triton is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kitsune.kernels.batch_norm_triton import Gradients, Norm, Training, normalize, normalize_gradient
from kitsune.kernels.conv import CHANNELS_MULTIPLE, cut_images
from kitsune.kernels.conv_forms import (
    Form,
    GradForm,
    Images,
    Tile,
    forms,
    grad_forms,
    num_tiles,
    run_of_pixels,
    tiling,
)
from kitsune.kernels.implicit_gemm_triton import (
    add_parts,
    convolve,
    convolve_gradient,
    convolve_weight_gradient,
    merge_statistics,
    merge_sums,
)
from kitsune.kernels.tuning import choose

_of_thread = threading.local()

_ALIGNMENT_BYTES = 16  # of where the bulk copy engine begins
_MERGED_AT_ONCE = 2**12
_MERGED_CHANNELS = 8  # a sector of 32 bytes of each tile's sums
_BLOCK_OF_PARTS = 1024
_INTERPRETED_PROCESSORS = 1


def conv(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], *, relu: bool) -> None:
    """Like all below: launches on the current stream what `kitsune.kernels.conv` says and checks."""
    geometry = _Geometry.of(result, x, weight, padding)

    def run(form: Form) -> None:
        y, of_x, factors = geometry.operands(form, result, x, weight, transposed=False)
        convolve[geometry.grid(form)](
            y, of_x, factors, bias, None, *geometry.arguments(form), relu=relu, **geometry.options(form)
        )

    run(geometry.choose("conv", run, exact=False))


def conv_input_grad(result: Tensor, grad: Tensor, weight: Tensor, padding: Sequence[int]) -> None:
    geometry = _Geometry.of(result, grad, weight, padding)

    def run(form: Form) -> None:
        to, of_grad, factors = geometry.operands(form, result, grad, weight, transposed=True)
        nothing = (None,) * 5
        convolve_gradient[geometry.grid(form)](
            to, of_grad, factors, *nothing, *geometry.arguments(form), relu=False, **geometry.options(form)
        )

    run(geometry.choose("conv_input_grad", run, exact=False))


def conv_batch_norm(
    outputs: tuple[Tensor, ...],
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
) -> None:
    result, y, save_mean, save_invstd = outputs
    geometry = _Geometry.of(result, x, conv_weight, padding)
    norm = Norm(result, weight, bias, save_mean, save_invstd)

    def run(form: Form, partials: Tensor) -> None:
        to, of_x, factors = geometry.operands(form, result, x, conv_weight, transposed=False)
        convolve[geometry.grid(form)](
            to, of_x, factors, None, partials, *geometry.arguments(form), relu=False, **geometry.options(form)
        )

    form = geometry.choose("conv", lambda form: run(form, geometry.partials(form)), exact=True)
    partials = geometry.partials(form)
    run(form, partials)
    merge_statistics[geometry.grid_of_channels()](
        partials, tuple(norm), Training(running_mean, running_var, momentum, eps).arguments(),
        geometry.num_tiles(form), form.pixels, geometry.num_channels, **geometry.merging(form),
    )  # fmt: skip
    normalize(y, residual, norm, relu)


def conv_input_grad_batch_norm_backward(
    outputs: tuple[Tensor, ...],
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
) -> None:
    grad_x, grad_residual, grad_weight, grad_bias = outputs
    geometry = _Geometry.of(grad_residual, grad, conv_weight, padding)
    norm, grads = Norm(x, weight, bias, save_mean, save_invstd), Gradients(grad_x, grad_weight, grad_bias)

    def run(form: Form, partials: Tensor) -> None:
        to, of_grad, factors = geometry.operands(form, grad_residual, grad, conv_weight, transposed=True)
        others = [None if one is None else geometry.fetched(one, form) for one in (x, y, added_grad_y)]
        convolve_gradient[geometry.grid(form)](
            to, of_grad, factors, partials, *others, tuple(norm),
            *geometry.arguments(form), relu=relu, **geometry.options(form),
        )  # fmt: skip

    form = geometry.choose("conv_input_grad", lambda form: run(form, geometry.partials(form)), exact=True)
    partials = geometry.partials(form)
    run(form, partials)
    merge_sums[geometry.grid_of_channels()](
        partials, save_invstd, tuple(grads), geometry.num_tiles(form), geometry.num_channels, **geometry.merging(form)
    )
    normalize_gradient(grad_residual, norm, grads)


def conv_weight_grad(result: Tensor, grad: Tensor, x: Tensor, padding: Sequence[int]) -> None:
    num_out, channels, kernel_h, kernel_w = result.shape
    cut = cut_images(x, x.shape[2:], result.shape[2:], padding)
    of_grad, of_x = (_Operand.of(one, cut) for one in (grad, x))

    def run(form: GradForm) -> None:
        _bring_context(x.device)
        tile = run_of_pixels(cut, form.pixels)
        assert tile is not None
        tiles = num_tiles(cut, tile)
        blocks_out, blocks_in = triton.cdiv(num_out, form.block_out), triton.cdiv(channels, form.block_in)
        parts = result if form.parts == 1 else result.new_empty(form.parts, result.numel(), dtype=torch.float32)
        convolve_weight_gradient[(kernel_h * blocks_out * blocks_in, form.parts)](
            parts,
            of_grad.rows(form.pixels, form.block_out),
            of_x.fetched(tile, form.block_in),
            *(triton.cdiv(length, side) for length, side in zip(cut.size, tile[1:], strict=True)),
            tiles, blocks_in, channels, num_out, kernel_h, *padding,
            kernel_w=kernel_w, tile_n=tile.images, tile_h=tile.rows, tile_w=tile.columns,
            block_out=form.block_out, block_in=form.block_in, loads_ahead=form.loads_ahead, num_warps=form.num_warps,
        )  # fmt: skip
        if form.parts > 1:
            grid = (triton.cdiv(result.numel(), _BLOCK_OF_PARTS),)
            add_parts[grid](result, parts, form.parts, result.numel(), block=_BLOCK_OF_PARTS)

    key = f"conv_weight_grad {x.dtype} {tuple(x.shape)} {tuple(result.shape)} {tuple(padding)} {cut}"
    found = grad_forms(cut, (num_out, channels), kernel_h, _num_processors(x.device))
    run(choose(key, found, run, x.device))


class _Operand(NamedTuple):
    """Images as the bulk copy engine takes them: (N, H, W, C), with their strides."""

    tensor: Tensor
    shape: list[int]
    strides: list[int]

    @classmethod
    def of(cls, images: Tensor, cut: Images) -> _Operand:
        """All pixels of dense images are one row, where that is what is `cut`."""
        _bring_context(images.device)
        if images.data_ptr() % _ALIGNMENT_BYTES:
            images = images.clone()  # with the same strides, at an address of the allocator's
        channels, order = images.shape[1], (0, 2, 3, 1)
        if cut.is_row:
            shape = [1, 1, images.numel() // channels, channels]
            return cls(images, shape, [CHANNELS_MULTIPLE, CHANNELS_MULTIPLE, channels, 1])
        # The stride of a dimension of one place may be anything, and the engine takes no other than multiples.
        steps = [images.stride(dim) if images.shape[dim] > 1 else CHANNELS_MULTIPLE for dim in order]
        return cls(images, [images.shape[dim] for dim in order], [*steps[:3], 1])

    def fetched(self, tile: Tile, channels: int) -> TensorDescriptor:
        """In tiles of so many channels."""
        return TensorDescriptor(self.tensor, self.shape, self.strides, [*tile, channels])

    def rows(self, pixels: int, channels: int) -> TensorDescriptor:
        """As a matrix of all pixels, of dense images, in blocks."""
        num_channels = self.shape[3]
        shape = [self.tensor.numel() // num_channels, num_channels]
        return TensorDescriptor(self.tensor, shape, [num_channels, 1], [pixels, channels])


class _Geometry(NamedTuple):
    """The shapes of a convolution of stride 1, or of the gradient of its input, which is one.

    Attributes:
        cut: the images of the result, as they are cut into tiles.
        channels, num_channels: of what is convolved, and of the result.
        key: tells apart what takes other times.
    """

    cut: Images
    channels: int
    num_channels: int
    kernel: tuple[int, int]
    padding: tuple[int, int]
    key: str
    device: torch.device

    @classmethod
    def of(cls, result: Tensor, source: Tensor, weight: Tensor, padding: Sequence[int]) -> _Geometry:
        kernel = (weight.shape[2], weight.shape[3])
        cut = cut_images(source, result.shape[2:], kernel, padding)
        key = f"{result.dtype} {tuple(source.shape)} {tuple(result.shape)} {kernel} {tuple(padding)} {cut}"
        pads = (padding[0], padding[1])
        return cls(cut, source.shape[1], result.shape[1], kernel, pads, key, result.device)

    def choose(self, name: str, run: Callable[[Form], None], *, exact: bool) -> Form:
        every, found = (
            forms(self.cut, self.num_channels, _num_processors(self.device), only) for only in (False, exact)
        )
        key = f"{name} {self.key}" if found == every else f"{name} exact {self.key}"
        return choose(key, found, run, self.device)

    def tile_of(self, form: Form) -> Tile:
        found = tiling(self.cut, form.pixels, exact=False)
        assert found is not None
        return found

    def fetched(self, images: Tensor, form: Form) -> TensorDescriptor:
        """Images like the result, in tiles as a program has them."""
        return _Operand.of(images, self.cut).fetched(self.tile_of(form), form.block_out)

    def operands(
        self, form: Form, result: Tensor, source: Tensor, weight: Tensor, *, transposed: bool
    ) -> tuple[TensorDescriptor, ...]:
        block = [form.block_out, form.block_in]
        aligned = weight.clone() if weight.data_ptr() % _ALIGNMENT_BYTES else weight
        matrix = aligned.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
        return (
            self.fetched(result, form),
            _Operand.of(source, self.cut).fetched(self.tile_of(form), form.block_in),
            TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], block[::-1] if transposed else block),
        )

    def grid(self, form: Form) -> tuple[int]:
        return (self.num_tiles(form) * triton.cdiv(self.num_channels, form.block_out),)

    def partials(self, form: Form) -> Tensor:
        """Room for two sums of each tile."""
        return torch.empty(2, self.num_tiles(form), self.num_channels, device=self.device)

    def grid_of_channels(self) -> tuple[int]:
        return (triton.cdiv(self.num_channels, _MERGED_CHANNELS),)

    def merging(self, form: Form) -> dict[str, int]:
        """How the sums of tiles are merged."""
        block_partials = min(triton.next_power_of_2(self.num_tiles(form)), _MERGED_AT_ONCE // _MERGED_CHANNELS)
        return {"block_channels": _MERGED_CHANNELS, "block_partials": block_partials, "num_warps": 4}

    def arguments(self, form: Form) -> tuple[int, ...]:
        tile, (height, width) = self.tile_of(form), self.cut.size
        return (
            triton.cdiv(height, tile.rows), triton.cdiv(width, tile.columns),
            triton.cdiv(self.num_channels, form.block_out),
            self.channels, self.num_channels, *self.kernel, *self.padding,
        )  # fmt: skip

    def options(self, form: Form) -> dict[str, Any]:
        tile = self.tile_of(form)
        return {
            "tile_n": tile.images,
            "tile_h": tile.rows,
            "tile_w": tile.columns,
            "block_out": form.block_out,
            "block_in": form.block_in,
            "loads_ahead": form.loads_ahead,
            "num_warps": form.num_warps,
        }

    def num_tiles(self, form: Form) -> int:
        return num_tiles(self.cut, self.tile_of(form))


def _bring_context(device: torch.device) -> None:
    """Descriptors are made by the driver, which has no context on a thread that has not asked anything of CUDA yet."""
    known = _of_thread.__dict__.setdefault("devices", set())
    if device.type == "cuda" and device not in known:
        torch.cuda.mem_get_info(device)
        known.add(device)


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
