"""A convolution of few numbers a window with its max pool and ReLU in one kernel, and its gradients in another.

    y[n, p, o] = relu(max over pixels q of window p of b[o] + Σ w[o, tap] x[n, q + tap])
    dw[o, tap] = Σ g[n, p, o] x[n, q(n, p, o) + tap],   db[o] = Σ g[n, p, o]       over windows with y > 0

Each pixel is read once for all channels. What lies between convolution and pool never reaches the GPU's memory; a byte
for each maximum says which pixel of its window it is, and whether ReLU lets it pass. `x` has its padding already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from stepgraph.compiler.triton_launch import launch, operator
from stepgraph.compiler.tuned.gpus import OFF

Array = torch.Tensor
Pair = Sequence[int]
FORWARD, BACKWARD = 32, 64  # windows that a program takes


@triton.jit
def _forward(
    x, w, b, y, places, count, outputs, xn,
    XC: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, STRIDE: tl.constexpr, RIGHT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, WINDOWS: tl.constexpr, OUTPUTS: tl.constexpr, OFF: tl.constexpr,
    PLACES: tl.constexpr, HAS_BIAS: tl.constexpr, RECTIFIES: tl.constexpr,
):  # fmt: skip
    """Maxima of some windows, for some channels."""
    at, o = tl.program_id(0) * WINDOWS + tl.arange(0, WINDOWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, PLACES)
    first = x + _first(at, xn, ROWS, COLUMNS, STRIDE * HIGH * XH, RIGHT * WIDE * XW)[None, :]
    first += ((place // WIDE) * (STRIDE * XH) + (place % WIDE) * (RIGHT * XW))[:, None]
    known = (place < HIGH * WIDE)[:, None] & (at < count)[None, :]
    total = tl.zeros((PLACES, WINDOWS, OUTPUTS), tl.float32)
    for c in tl.static_range(CHANNELS):
        for i in tl.static_range(DOWN):
            for j in tl.static_range(ACROSS):
                seen = tl.load(first + (c * XC + i * XH + j * XW), known, 0.0)
                weights = tl.load(w + o * (CHANNELS * DOWN * ACROSS) + ((c * DOWN + i) * ACROSS + j), o < outputs, 0.0)
                total += seen[:, :, None] * weights[None, None, :]
    total = tl.where((place < HIGH * WIDE)[:, None, None], total, float("-inf"))
    most, found = tl.reduce((total, tl.broadcast_to(place[:, None, None], total.shape)), 0, _higher)
    if HAS_BIAS:
        most += tl.load(b + o, o < outputs, 0.0)[None, :]
    if RECTIFIES:
        found = tl.where(most <= 0, OFF, found)
        most = tl.where(most <= 0, 0.0, most)
    to, there = at.to(tl.int64)[:, None] * outputs + o, (at < count)[:, None] & (o < outputs)
    tl.store(y + to, most, there)
    tl.store(places + to, found.to(tl.uint8), there)


# Not knowing that outputs are many, Triton gives each thread one channel, and sums over windows need no exchange.
@triton.jit(do_not_specialize=["outputs"])
def _gradients(
    g, places, x, sums, count, outputs, xn,
    XC: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, STRIDE: tl.constexpr, RIGHT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, WINDOWS: tl.constexpr, OUTPUTS: tl.constexpr, OFF: tl.constexpr,
):  # fmt: skip
    """`[taps + 1, outputs]` of some windows: `dw`, and `db` as of a tap that always meets 1."""
    at, o = tl.program_id(0) * WINDOWS + tl.arange(0, WINDOWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    there, here = (o < outputs)[:, None] & (at < count), at.to(tl.int64) * outputs + o[:, None]
    place = tl.load(places + here, there, OFF).to(tl.uint32)
    given = tl.load(g + here, there & (place != OFF), 0.0)
    place = tl.where(place == OFF, 0, place)  # whatever it meets is multiplied by 0
    first = x + _first(tl.minimum(at, count - 1), xn, ROWS, COLUMNS, STRIDE * HIGH * XH, RIGHT * WIDE * XW)
    first += (place // WIDE) * (STRIDE * XH) + (place % WIDE) * (RIGHT * XW)
    to = sums + tl.program_id(0).to(tl.int64) * ((CHANNELS * DOWN * ACROSS + 1) * outputs) + o
    for c in tl.static_range(CHANNELS):
        for i in tl.static_range(DOWN):
            for j in tl.static_range(ACROSS):
                seen = tl.load(first + (c * XC + i * XH + j * XW))
                tl.store(to, tl.sum(given * seen, 1), o < outputs)
                to += outputs
    tl.store(to, tl.sum(given, 1), o < outputs)


@triton.jit
def _first(at, image, ROWS: tl.constexpr, COLUMNS: tl.constexpr, down, across):
    """Where the pixels of a window begin."""
    at = at.to(tl.uint32)
    n, row, column = at // (ROWS * COLUMNS), at // COLUMNS % ROWS, at % COLUMNS
    return n.to(tl.int64) * image + (row * down + column * across)


@triton.jit
def _higher(a, i, b, j):
    """As PyTorch's pool has it: the first of equal numbers, the last NaN."""
    takes = (b > a) | ((b == a) & (j < i)) | ((b != b) & ((a == a) | (j > i)))  # noqa: PLR0124
    return tl.where(takes, b, a), tl.where(takes, j, i)


@operator
def convolve_and_pool(
    x: Array, w: Array, b: Array | None, stride: Pair, window: Pair, rectifies: bool
) -> tuple[Array, Array]:
    """Maxima and places, channels last in memory."""
    sizes = zip(x.shape[2:], w.shape[2:], stride, window, strict=True)
    rows, columns = (((extent - kernel) // step + 1) // size for extent, kernel, step, size in sizes)
    y = x.new_empty(len(x), rows, columns, len(w)).permute(0, 3, 1, 2)
    places = torch.empty_like(y, dtype=torch.uint8)
    count, tile = len(x) * rows * columns, _outputs(w)
    launch(
        _forward, (triton.cdiv(count, FORWARD), triton.cdiv(len(w), tile)),
        x, w.contiguous(), w if b is None else b, y, places, count, len(w), *x.stride(), rows, columns,
        *w.shape[1:], *stride, *window, FORWARD, tile, OFF,
        triton.next_power_of_2(math.prod(window)), b is not None, rectifies, num_warps=4,
    )  # fmt: skip
    return y, places


@operator
def gradient_sums(g: Array, places: Array, x: Array, w: Array, stride: Pair, window: Pair) -> Array:
    """`[programs, taps + 1, outputs]`: what each program has summed up, for `dw` and at last `db`."""
    g, places = (one.contiguous(memory_format=torch.channels_last) for one in (g, places))
    count, tile = g.numel() // len(w), _outputs(w)
    sums = g.new_empty(triton.cdiv(count, BACKWARD), w[0].numel() + 1, len(w))
    launch(
        _gradients, (len(sums), triton.cdiv(len(w), tile)),
        g, places, x, sums, count, len(w), *x.stride(), *g.shape[2:],
        *w.shape[1:], *stride, *window, BACKWARD, tile, OFF, num_warps=4,
    )  # fmt: skip
    return sums


def _outputs(w: Array) -> int:
    """Channels that a program computes."""
    return min(64, max(16, triton.next_power_of_2(len(w))))
