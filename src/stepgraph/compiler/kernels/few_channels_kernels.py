"""Convolutions of images with few channels, channels last, in half precision, and the gradient of their weights.

    y[q, o] = b[o] + Σ x[q, k] w[k, o],    dw[o, k] = Σ g[q, o] x[q, k]        over pixels q and numbers k of a window

With its channels last, a row of a window is contiguous in memory. So a window is a list of `k = row · size + place`,
and each program multiplies the windows of some pixels, a rectangle of one image, by matrices. `size` is a multiple of
what a GPU reads at once, and the rows of windows begin there: the numbers that this adds in front of and behind a
window meet weights of 0, and become 0 themselves, in case they are not finite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from stepgraph.compiler.triton_launch import launch, operator

Array = torch.Tensor
BYTES = 16  # that a GPU reads at once, at most
PIXELS, WIDEST = 128, 128  # of a tile: windows, and outputs at most
NUMBERS = (64, 32)  # of a window that are multiplied at once, the first of which leaves least over
SUMMED, STAGES = 64, 3  # of the gradient: windows that are summed up at once, and how many times they are in memory
HELD = 160 * 64  # sums that four warps hold
PROGRAMS, STEPS = 2, 8  # of the gradient: per processor of the GPU; rectangles that each sums up at least


class Windows(NamedTuple):
    """Sizes of images and windows, in numbers along a row. All of them are constants of the kernels."""

    height: int
    width: int
    rows: int
    columns: int
    high: int
    down: int
    above: int
    step: int
    start: int
    size: int
    first: int
    last: int

    @property
    def numbers(self) -> int:
        """The numbers of a window."""
        return self.high * self.size


def windows(shape: list[int], kernel: list[int], stride: list[int], padding: list[int]) -> Windows:
    """The windows over images of this shape."""
    _, channels, height, width = shape
    extents = zip((height, width), kernel, stride, padding, strict=True)
    rows, columns = ((extent + 2 * added - size) // step + 1 for extent, size, step, added in extents)
    at_once = math.gcd(BYTES // 2, stride[1] * channels, width * channels)
    first = -padding[1] * channels % at_once
    last = first + kernel[1] * channels
    size = triton.cdiv(last, at_once) * at_once
    return Windows(
        height, width * channels, rows, columns, kernel[0], stride[0], padding[0],
        stride[1] * channels, -padding[1] * channels - first, size, first, last,
    )  # fmt: skip


@triton.jit
def _seen(
    x, row, column, top, left, k, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, ABOVE: tl.constexpr,
    STEP: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """`[pixels, k]`: numbers of the windows of pixels, whose rows and columns count from the corner of a rectangle."""
    h, w = top * DOWN - ABOVE, left * STEP + START
    high, wide = (row * DOWN)[:, None] + (k // SIZE)[None, :], (column * STEP)[:, None] + (k % SIZE)[None, :]
    inside = (high + h >= 0) & (high + h < HEIGHT) & (wide + w >= 0) & (wide + w < WIDTH)
    return tl.load(x + (h * WIDTH + w) + (high * WIDTH + wide), inside, 0.0)


@triton.jit
def _corner(at, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """The image of a rectangle of pixels, and its first row and column."""
    DOWN: tl.constexpr = (ROWS + TALL - 1) // TALL
    ACROSS: tl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    return tl.cast(at // (DOWN * ACROSS), tl.int64), at // ACROSS % DOWN * TALL, at % ACROSS * WIDE


@triton.jit
def _forward(
    x, w, b, y, outputs,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIGH: tl.constexpr,
    DOWN: tl.constexpr, ABOVE: tl.constexpr, STEP: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    NUMBERS: tl.constexpr, CHUNKS: tl.constexpr, OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The result for a rectangle of pixels and some outputs."""
    image, top, left = _corner(tl.program_id(0), ROWS, COLUMNS, TALL, WIDE)
    row, column = tl.arange(0, TALL * WIDE) // WIDE, tl.arange(0, TALL * WIDE) % WIDE
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    x += image * (HEIGHT * WIDTH)
    w += o[None, :]
    total = tl.zeros((TALL * WIDE, OUTPUTS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        k = chunk * NUMBERS + tl.arange(0, NUMBERS)
        seen = _seen(x, row, column, top, left, k, HEIGHT, WIDTH, DOWN, ABOVE, STEP, START, SIZE)
        if FIRST > 0 or LAST < SIZE or CHUNKS * NUMBERS > HIGH * SIZE:
            own = (k % SIZE >= FIRST) & (k % SIZE < LAST) & (k < HIGH * SIZE)
            seen = tl.where(own[None, :], seen, 0.0)
        total = tl.dot(seen, tl.load(w + k[:, None] * (tl.num_programs(1) * OUTPUTS)), total)
    if HAS_BIAS:
        total += tl.load(b + o, o < outputs, 0.0).to(tl.float32)[None, :]
    y += (image * (ROWS * COLUMNS) + top * COLUMNS + left) * outputs
    there = ((row < ROWS - top) & (column < COLUMNS - left))[:, None] & (o < outputs)[None, :]
    tl.store(y + (row * COLUMNS + column)[:, None] * outputs + o[None, :], total.to(y.dtype.element_ty), there)


@triton.jit
def _gradients(
    g, x, sums, tiles, outputs,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIGH: tl.constexpr,
    DOWN: tl.constexpr, ABOVE: tl.constexpr, STEP: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, MOST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """`[outputs, k]` of some rectangles of pixels. `k` is divided in two, because tiles are powers of 2."""
    o = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * (MOST + REST)
    k, further = first + tl.arange(0, MOST), first + MOST + tl.arange(0, REST if REST > 0 else 1)
    row, column = tl.arange(0, TALL * WIDE) // WIDE, tl.arange(0, TALL * WIDE) % WIDE
    place = (row * COLUMNS + column)[:, None] * outputs + o[None, :]
    total = tl.zeros((OUTPUTS, MOST), tl.float32)
    if REST > 0:
        rest = tl.zeros((OUTPUTS, REST), tl.float32)
    for at in range(tl.program_id(0), tiles, tl.num_programs(0)):
        image, top, left = _corner(at, ROWS, COLUMNS, TALL, WIDE)
        there = (row < ROWS - top) & (column < COLUMNS - left)
        of = g + (image * (ROWS * COLUMNS) + top * COLUMNS + left) * outputs
        given = tl.trans(tl.load(of + place, there[:, None] & (o < outputs)[None, :], 0.0))
        if ROWS % TALL > 0 or COLUMNS % WIDE > 0:
            seeing = tl.where(there, column, WIDTH)  # a pixel beyond the borders sees nothing, where it might meet NaN
        else:
            seeing = column
        own = x + image * (HEIGHT * WIDTH)
        seen = _seen(own, row, seeing, top, left, k, HEIGHT, WIDTH, DOWN, ABOVE, STEP, START, SIZE)
        total = tl.dot(given, seen, total)
        if REST > 0:
            seen = _seen(own, row, seeing, top, left, further, HEIGHT, WIDTH, DOWN, ABOVE, STEP, START, SIZE)
            rest = tl.dot(given, seen, rest)
    width = tl.num_programs(1) * (MOST + REST)
    sums += (tl.program_id(0) * (tl.num_programs(2) * OUTPUTS) + o)[:, None] * width
    tl.store(sums + k[None, :], total)
    if REST > 0:
        tl.store(sums + further[None, :], rest)


@operator
def convolve_few(
    x: Array, w: Array, b: Array | None, outputs: int, kernel: list[int], stride: list[int], padding: list[int]
) -> Array:
    """`[n, outputs, rows, columns]`, channels last in memory; `w` is what `arranged` returns."""
    x, w = x.contiguous(memory_format=torch.channels_last), w.contiguous()
    of = windows(list(x.shape), kernel, stride, padding)
    shape = len(x), outputs, of.rows, of.columns
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    numbers, wide, tile = _numbers(of), _wide(outputs), _rectangle(PIXELS, of)
    tiles = len(x) * _tiles(tile, of)
    launch(
        _forward, (tiles, triton.cdiv(outputs, wide)), x, w, w if b is None else b, y, outputs, *of, *tile,
        numbers, triton.cdiv(of.numbers, numbers), wide, b is not None, num_warps=_warps(wide),
    )  # fmt: skip
    return y


@operator
def weight_gradient_of_few(g: Array, x: Array, kernel: list[int], stride: list[int], padding: list[int]) -> Array:
    """`[programs, outputs, k]`: what each program has summed up, for at least as many outputs and `k` as there are."""
    g, x = (one.contiguous(memory_format=torch.channels_last) for one in (g, x))
    of, outputs = windows(list(x.shape), kernel, stride, padding), g.shape[1]
    wide, tile = _wide(outputs), _rectangle(SUMMED, of)
    most, rest = _divided(of.numbers, wide)
    across = triton.cdiv(of.numbers, most + rest), triton.cdiv(outputs, wide)
    tiles = len(x) * _tiles(tile, of)
    programs = min(triton.cdiv(tiles, STEPS), max(1, PROGRAMS * _processors(x.device) // math.prod(across)))
    shape = programs, across[1] * wide, across[0] * (most + rest)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch(
        _gradients, (programs, *across), g, x, sums, tiles, outputs, *of, *tile, wide, most, rest,
        num_warps=_warps(wide), num_stages=STAGES,
    )  # fmt: skip
    return sums


def arranged(w: Array, of: Windows) -> Array:
    """Weights `[outputs, channels, high, wide]` as a matrix `[k, outputs]` of whole tiles."""
    outputs, _, high, _ = w.shape
    rows = w.permute(2, 3, 1, 0).reshape(high, of.last - of.first, outputs)
    wide = _wide(outputs)
    more = triton.cdiv(outputs, wide) * wide - outputs
    rows = torch.nn.functional.pad(rows, (0, more, of.first, of.size - of.last)).flatten(0, 1)
    numbers = _numbers(of)
    return torch.nn.functional.pad(rows, (0, 0, 0, triton.cdiv(of.numbers, numbers) * numbers - of.numbers))


def gathered(sums: Array, shape: list[int], of: Windows) -> Array:
    """The gradient of weights of this shape, channels last in memory, from what programs have summed up."""
    outputs, channels, high, wide = shape
    total = sums.sum(0)[:outputs, : of.numbers].unflatten(1, (high, of.size))[:, :, of.first : of.last]
    return total.unflatten(2, (wide, channels)).permute(0, 3, 1, 2)


def _numbers(of: Windows) -> int:
    """How many numbers of a window are multiplied at once."""
    return min(NUMBERS, key=lambda size: triton.cdiv(of.numbers, size) * size)


def _wide(outputs: int) -> int:
    """How many outputs a program computes."""
    return min(WIDEST, max(16, triton.next_power_of_2(outputs)))


def _warps(wide: int) -> int:
    return 4 if wide <= 64 else 8


def _rectangle(pixels: int, of: Windows) -> tuple[int, int]:
    """Rows and columns of a tile: those that reach least beyond the borders, and of these nearly a square."""
    shapes = [(pixels >> bits, 1 << bits) for bits in range(pixels.bit_length())]
    return min(shapes, key=lambda tile: (_tiles(tile, of), abs(tile[1] - 2 * tile[0])))


def _tiles(tile: tuple[int, int], of: Windows) -> int:
    """How many tiles cover an image."""
    return triton.cdiv(of.rows, tile[0]) * triton.cdiv(of.columns, tile[1])


def _divided(count: int, wide: int) -> tuple[int, int]:
    """Two powers of 2, the second of which may be 0: how many `k` a program sums up."""
    held = HELD * _warps(wide) // 4 // wide
    share = max(16, triton.cdiv(count, triton.cdiv(count, held)))
    most = 1 << (share.bit_length() - 1)
    rest = share - most and max(16, triton.next_power_of_2(share - most))
    return (2 * most, 0) if rest == most else (most, rest)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
