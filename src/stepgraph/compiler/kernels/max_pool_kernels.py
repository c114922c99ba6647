"""Max pools of images with their channels last: each program computes some pixels of a row, for some channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepgraph.compiler.triton_launch import launch, operator

Array = torch.Tensor
CHANNELS = 64  # of a tile, at most
FORWARD, BACKWARD = (512, 4), (1024, 2)  # numbers of a tile, and warps


@triton.jit
def _maxima(
    x, y, places, height, width, channels, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ABOVE: tl.constexpr, LEFT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The first of the largest numbers of each window, or its last NaN, as PyTorch chooses."""
    image, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    column = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (column < columns)[:, None] & (c < channels)[None, :]
    x += image.to(tl.int64) * (height * width * channels)
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    place = tl.full((PIXELS, CHANNELS), -1, tl.int32)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            h, w = row * DOWN - ABOVE + i, column * ACROSS - LEFT + j
            there = inside & ((w >= 0) & (w < width) & (h >= 0) & (h < height))[:, None]
            seen = tl.load(x + (h * width + w)[:, None] * channels + c[None, :], there, float("-inf")).to(tl.float32)
            better = there & ((place < 0) | (seen > best) | (seen != seen))  # noqa: PLR0124 (NaN)
            best, place = tl.where(better, seen, best), tl.where(better, i * COLUMNS + j, place)
    to = tl.program_id(0).to(tl.int64) * (columns * channels) + column[:, None] * channels + c[None, :]
    tl.store(y + to, best.to(y.dtype.element_ty), inside)
    tl.store(places + to, place.to(tl.uint8), inside)


@triton.jit
def _gradients(
    g, places, dx, height, width, channels, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ABOVE: tl.constexpr, LEFT: tl.constexpr, WINDOWS_DOWN: tl.constexpr, WINDOWS_ACROSS: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sum over the windows that a pixel is in, of those whose maximum it is."""
    image, h = tl.program_id(0) // height, tl.program_id(0) % height + ABOVE
    w = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (w < width)[:, None] & (c < channels)[None, :]
    first = image.to(tl.int64) * (rows * columns * channels)
    g += first
    places += first
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for a in tl.static_range(WINDOWS_DOWN):
        row, i = h // DOWN - a, h % DOWN + a * DOWN
        for b in tl.static_range(WINDOWS_ACROSS):
            column, j = (w + LEFT) // ACROSS - b, (w + LEFT) % ACROSS + b * ACROSS
            known = (column >= 0) & (column < columns) & (j < COLUMNS) & (row >= 0) & (row < rows) & (i < ROWS)
            there = inside & known[:, None]
            at = (row * columns + column)[:, None] * channels + c[None, :]
            is_there = tl.load(places + at, there, 255).to(tl.int32) == (i * COLUMNS + j)[:, None]
            total += tl.where(is_there, tl.load(g + at, there, 0.0).to(tl.float32), 0.0)
    to = tl.program_id(0).to(tl.int64) * (width * channels) + w[:, None] * channels + c[None, :]
    tl.store(dx + to, total.to(dx.dtype.element_ty), inside)


@operator
def max_pool(
    x: Array, extents: list[int], window: list[int], stride: list[int], padding: list[int]
) -> tuple[Array, Array]:
    """`[n, channels, *extents]`: the maxima, and their positions in the windows, row by row."""
    x = x.contiguous(memory_format=torch.channels_last)
    (count, channels, height, width), (rows, columns) = x.shape, extents
    y, places = (
        torch.empty((count, channels, *extents), dtype=kind, device=x.device, memory_format=torch.channels_last)
        for kind in (x.dtype, torch.uint8)
    )
    size, warps = FORWARD
    grid, tile = _tiles(size, count * rows, columns, channels)
    launch(
        _maxima, grid, x, y, places, height, width, channels, rows, columns, *window, *stride, *padding, *tile,
        num_warps=warps,
    )  # fmt: skip
    return y, places


@operator
def max_pool_gradient(
    g: Array, places: Array, shape: list[int], window: list[int], stride: list[int], padding: list[int]
) -> Array:
    """The gradient of a source of this shape."""
    g, places = (one.contiguous(memory_format=torch.channels_last) for one in (g, places))
    count, channels, height, width = shape
    dx = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    size, warps = BACKWARD
    grid, tile = _tiles(size, count * height, width, channels)
    windows = (triton.cdiv(extent, step) for extent, step in zip(window, stride, strict=True))
    launch(
        _gradients, grid, g, places, dx, height, width, channels, *g.shape[2:], *window, *stride, *padding, *windows,
        *tile, num_warps=warps,
    )  # fmt: skip
    return dx


def _tiles(size: int, rows: int, pixels: int, channels: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """How many programs, and the pixels and channels of each."""
    wide = min(CHANNELS, triton.next_power_of_2(channels))
    long = min(size // wide, triton.next_power_of_2(pixels))
    return (rows, triton.cdiv(pixels, long), triton.cdiv(channels, wide)), (long, wide)
