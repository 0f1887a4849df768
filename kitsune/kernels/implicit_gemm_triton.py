"""The Triton kernels of `kitsune.kernels.conv`: matrix products of weights and of tiles of images.

A tile is `tile_n` images by `tile_h` rows by `tile_w` columns, of some channels. Descriptors fetch it by the bulk copy
engine, shifted by a tap of the kernel, with zeros where it reaches beyond the images, which is what the padding is. The
matrix products read both operands from shared memory, where they came to lie; so products are transposed, channels by
pixels: of the second operand alone Triton sees that a tile of four dimensions is a matrix.

Sums over all images are made of the tiles that programs hold: each stores those of its tile, and a small kernel merges
all, which takes less time than that each program tells others that it is done. The order of sums is fixed.

A batch norm's tuples are as in its own kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kitsune.kernels.batch_norm_backward_triton import all_sums, store_of_channels
from kitsune.kernels.batch_norm_forward_triton import finished, known_values, merged
from kitsune.kernels.launch_triton import await_previous, launched

_COUNTS = ["tiles_h", "tiles_w", "blocks", "kernel_h", "kernel_w", "padding_h", "padding_w"]
"""Of these Triton need not know which are 1 or multiples of 16: it would compile a kernel for each."""


@triton.jit
def _corner(
    tile: tl.tensor,
    tiles_h: tl.tensor,
    tiles_w: tl.tensor,
    tile_n: tl.constexpr,
    tile_h: tl.constexpr,
    tile_w: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The first image, row and column of a tile."""
    image = tile // (tiles_w * tiles_h) * tile_n
    row = tile // tiles_w % tiles_h * tile_h
    return image, row, tile % tiles_w * tile_w


@triton.jit
def _products(
    images: tl.tensor,
    weight: tl.tensor,
    image: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    first: tl.tensor,
    channels: tl.tensor,
    weight_channels: tl.tensor,
    kernel_h: tl.tensor,
    kernel_w: tl.tensor,
    transposed: tl.constexpr,
    block_pixels: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> tl.tensor:
    """Sums over taps and channels of the images, for `block_out` channels from `first` on and the pixels of a tile.

    The weight is a matrix (O, taps x C). Where the convolution is `transposed`, O are the channels of the images.
    """
    sums = tl.zeros((block_out, block_pixels), tl.float32)
    row = first_row
    column = first_column
    channel = kernel_h * 0
    tap = kernel_h * 0
    left = kernel_w
    steps = kernel_h * kernel_w * tl.cdiv(channels, block_in)
    for _ in tl.range(steps, num_stages=loads_ahead):
        pixels = images.load([image, row, column, channel]).reshape(block_pixels, block_in)
        if transposed:
            factors = weight.load([channel, tap * weight_channels + first])
            sums = tl.dot(factors.T, pixels.T, sums)
        else:
            factors = weight.load([first, tap * weight_channels + channel])
            sums = tl.dot(factors, pixels.T, sums)
        channel += block_in
        ends = (channel >= channels).to(tl.int32)
        channel = channel * (1 - ends)
        tap += ends
        left -= ends
        ends_row = (left == 0).to(tl.int32)
        left += ends_row * kernel_w
        if transposed:
            column += ends_row * kernel_w - ends
            row -= ends_row
        else:
            column += ends - ends_row * kernel_w
            row += ends_row
    return sums


@triton.jit
def _store_sums(
    partials: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    tile: tl.tensor,
    num_tiles: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
) -> None:
    """Stores two sums of a tile, for the kernel that merges those of all."""
    mask = channels < num_channels
    tl.store(partials + tile * num_channels + channels, first, mask)
    tl.store(partials + (num_tiles + tile) * num_channels + channels, second, mask)


@launched(do_not_specialize=["num_tiles"])
def merge_statistics(
    partials: tl.tensor,
    norm: tl.tuple,
    training: tl.tuple,
    num_tiles: tl.tensor,
    pixels: tl.tensor,
    num_channels: tl.tensor,
    block_channels: tl.constexpr,
    block_partials: tl.constexpr,
) -> None:
    """The statistics of all tiles, of `pixels` each, for a block of channels."""
    await_previous()
    channels = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    rows = num_tiles * pixels
    mean, m2 = merged(partials, num_tiles, rows, pixels, channels, num_channels, block_partials)
    finished(norm, training, mean, m2, rows, channels, num_channels)


@launched(do_not_specialize=["num_tiles"])
def merge_sums(
    partials: tl.tensor,
    save_invstd: tl.tensor,
    grads: tl.tuple,
    num_tiles: tl.tensor,
    num_channels: tl.tensor,
    block_channels: tl.constexpr,
    block_partials: tl.constexpr,
) -> None:
    """The gradients of a norm's weight and bias, of the sums of all tiles, for a block of channels."""
    await_previous()
    channels = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    sums, products, _ = all_sums(partials, num_tiles, False, channels, num_channels, block_partials, block_channels)
    invstd = tl.load(save_invstd + channels, channels < num_channels, other=0.0)
    store_of_channels(grads, products * invstd, sums, channels, num_channels)


@launched(do_not_specialize=_COUNTS)
def convolve(
    y: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,
    tiles_h: tl.tensor,
    tiles_w: tl.tensor,
    blocks: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    kernel_h: tl.tensor,
    kernel_w: tl.tensor,
    padding_h: tl.tensor,
    padding_w: tl.tensor,
    relu: tl.constexpr,
    tile_n: tl.constexpr,
    tile_h: tl.constexpr,
    tile_w: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    """A convolution of `channels` to `num_channels`; where there are `partials`, statistics of each tile too."""
    await_previous()
    block = tl.program_id(0) % blocks
    tile = tl.program_id(0) // blocks
    image, row, column = _corner(tile, tiles_h, tiles_w, tile_n, tile_h, tile_w)
    block_pixels: tl.constexpr = tile_n * tile_h * tile_w
    first = block * block_out
    sums = _products(
        x, weight, image, row - padding_h, column - padding_w, first, channels, channels, kernel_h, kernel_w,
        False, block_pixels, block_out, block_in, loads_ahead,
    )  # fmt: skip
    of = first + tl.arange(0, block_out)
    if bias is not None:
        sums += tl.load(bias + of, of < num_channels, other=0.0).to(tl.float32)[:, None]
    if relu:
        sums = tl.where(sums <= 0, 0.0, sums)
    result = sums.to(y.dtype)
    y.store([image, row, column, first], result.T.reshape(tile_n, tile_h, tile_w, block_out))
    if partials is not None:
        rounded = result.to(tl.float32)
        mean = tl.sum(rounded, 1) / block_pixels
        deviation = rounded - mean[:, None]
        m2 = tl.sum(deviation * deviation, 1)
        _store_sums(partials, mean, m2, tile, tl.num_programs(0) // blocks, of, num_channels)


@triton.jit
def _tile_of(
    images: tl.tensor,
    image: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    first: tl.tensor,
    block_pixels: tl.constexpr,
    block_out: tl.constexpr,
) -> tl.tensor:
    """Channels by pixels of a tile."""
    return images.load([image, row, column, first]).reshape(block_pixels, block_out).T.to(tl.float32)


@launched(do_not_specialize=_COUNTS)
def convolve_gradient(
    grad_x: tl.tensor,
    grad: tl.tensor,
    weight: tl.tensor,
    partials: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    added: tl.tensor,
    norm: tl.tuple,
    tiles_h: tl.tensor,
    tiles_w: tl.tensor,
    blocks: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    kernel_h: tl.tensor,
    kernel_w: tl.tensor,
    padding_h: tl.tensor,
    padding_w: tl.tensor,
    relu: tl.constexpr,
    tile_n: tl.constexpr,
    tile_h: tl.constexpr,
    tile_w: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    """The gradient of a convolution's input, of `channels` to `num_channels`.

    Where there are `partials`, that input was the result of `norm`, with a ReLU or without: `grad_x` becomes the
    gradient behind the ReLU, to which `added` is added before, and sums of each tile for the norm's backward go there.
    """
    await_previous()
    block = tl.program_id(0) % blocks
    tile = tl.program_id(0) // blocks
    image, row, column = _corner(tile, tiles_h, tiles_w, tile_n, tile_h, tile_w)
    block_pixels: tl.constexpr = tile_n * tile_h * tile_w
    first = block * block_out
    sums = _products(
        grad, weight, image, row + padding_h, column + padding_w, first, channels, num_channels, kernel_h, kernel_w,
        True, block_pixels, block_out, block_in, loads_ahead,
    )  # fmt: skip
    result = sums.to(grad_x.dtype)
    if partials is not None:
        of = first + tl.arange(0, block_out)
        rounded = result.to(tl.float32)
        if added is not None:
            rounded += _tile_of(added, image, row, column, first, block_pixels, block_out)
            rounded = rounded.to(grad_x.dtype).to(tl.float32)
        values = known_values(norm, of, num_channels, block_out)
        centered = _tile_of(x, image, row, column, first, block_pixels, block_out) - values[0][:, None]
        if relu:
            if y is not None:
                output = _tile_of(y, image, row, column, first, block_pixels, block_out)
            else:
                scale = tl.broadcast_to(values[2][:, None], centered.shape)
                output = tl.fma(centered, scale, tl.broadcast_to(values[3][:, None], centered.shape))
                output = output.to(grad_x.dtype).to(tl.float32)  # as it was stored
            rounded = tl.where(output <= 0, 0.0, rounded)
        result = rounded.to(grad_x.dtype)
        products = tl.sum(rounded * centered, 1)
        _store_sums(partials, tl.sum(rounded, 1), products, tile, tl.num_programs(0) // blocks, of, num_channels)
    grad_x.store([image, row, column, first], result.T.reshape(tile_n, tile_h, tile_w, block_out))


@triton.jit
def _store_products(
    to: tl.tensor,
    sums: tl.tensor,
    o: tl.tensor,
    c: tl.tensor,
    tap: tl.tensor,
    num_out: tl.tensor,
    channels: tl.tensor,
    taps: tl.tensor,
) -> None:
    at = to + o[:, None] * (taps * channels) + (tap * channels + c)[None, :]
    tl.store(at, sums.to(to.dtype.element_ty), (o < num_out)[:, None] & (c < channels)[None, :])


@launched(do_not_specialize=["tiles_h", "tiles_w", "num_tiles", "blocks_in", "kernel_h", "padding_h", "padding_w"])
def convolve_weight_gradient(
    to: tl.tensor,
    grad: tl.tensor,
    x: tl.tensor,
    tiles_h: tl.tensor,
    tiles_w: tl.tensor,
    num_tiles: tl.tensor,
    blocks_in: tl.tensor,
    channels: tl.tensor,
    num_out: tl.tensor,
    kernel_h: tl.tensor,
    padding_h: tl.tensor,
    padding_w: tl.tensor,
    kernel_w: tl.constexpr,
    tile_n: tl.constexpr,
    tile_h: tl.constexpr,
    tile_w: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    """Products of the gradient and of the input at all taps of one row of the kernel, over a part of the tiles.

    The second axis of the grid is that of the parts, each of which has a matrix (O, taps x C) in `to`. `grad` is a
    matrix of pixels and channels, in which those of a tile follow one another.
    """
    await_previous()
    tap_row = tl.program_id(0) % kernel_h
    c0 = tl.program_id(0) // kernel_h % blocks_in * block_in
    o0 = tl.program_id(0) // (kernel_h * blocks_in) * block_out
    part = tl.program_id(1)
    block_pixels: tl.constexpr = tile_n * tile_h * tile_w
    left = tl.zeros((block_out, block_in), tl.float32)
    middle = tl.zeros((block_out, block_in), tl.float32)
    right = tl.zeros((block_out, block_in), tl.float32)
    for tile in tl.range(part, num_tiles, tl.num_programs(1), num_stages=loads_ahead):
        image, row, column = _corner(tile, tiles_h, tiles_w, tile_n, tile_h, tile_w)
        row += tap_row - padding_h
        column -= padding_w
        factors = grad.load([tile * block_pixels, o0]).T
        left = tl.dot(factors, x.load([image, row, column, c0]).reshape(block_pixels, block_in), left)
        if kernel_w == 3:
            middle = tl.dot(factors, x.load([image, row, column + 1, c0]).reshape(block_pixels, block_in), middle)
            right = tl.dot(factors, x.load([image, row, column + 2, c0]).reshape(block_pixels, block_in), right)
    o = o0 + tl.arange(0, block_out)
    c = c0 + tl.arange(0, block_in)
    taps = kernel_h * kernel_w
    to += part.to(tl.int64) * num_out * taps * channels
    _store_products(to, left, o, c, tap_row * kernel_w, num_out, channels, taps)
    if kernel_w == 3:
        _store_products(to, middle, o, c, tap_row * kernel_w + 1, num_out, channels, taps)
        _store_products(to, right, o, c, tap_row * kernel_w + 2, num_out, channels, taps)


@launched(do_not_specialize=["num_parts"])
def add_parts(result: tl.tensor, parts: tl.tensor, num_parts: tl.tensor, size: tl.tensor, block: tl.constexpr) -> None:
    await_previous()
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < size
    total = tl.load(parts + at, mask, other=0.0)
    for part in tl.range(1, num_parts, loop_unroll_factor=4):
        total += tl.load(parts + tl.cast(part, tl.int64) * size + at, mask, other=0.0)
    tl.store(result + at, total.to(result.dtype.element_ty), mask)
