"""The gradient of ReLU together with the sums that a batch normalization in front of it needs.

    d[n, c] = where(y[n, c] <= 0, 0, g[n, c])        and by channel        Σ d,   Σ d (x - mean)

Where `d` is needed by a shortcut too, it must be written; its sums cost nothing while it passes by. Arrays are images
with their channels last in memory, a row each pixel. `g` may come as two terms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepgraph.compiler.tiles.launch import launch, operator

Array = torch.Tensor
ROWS, CHANNELS = 32, 64  # of a tile
PROGRAMS = 2048  # about so many


@triton.jit
def _mask_and_sum(
    g, h, y, x, mean, d, sums, rows, channels,
    STEPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, HAS_TWO: tl.constexpr,
):  # fmt: skip
    """Some rows of some channels, tile by tile."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    center = tl.load(mean + c, c < channels, 0.0)[None, :]
    plain, centered = tl.zeros((ROWS, CHANNELS), tl.float32), tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        at, there = row.to(tl.int64)[:, None] * channels + c, (row < rows)[:, None] & (c < channels)
        given = tl.load(g + at, there, 0.0)
        if HAS_TWO:
            given += tl.load(h + at, there, 0.0)
        given = tl.where(tl.load(y + at, there, 0.0) <= 0, 0.0, given)
        tl.store(d + at, given, there)
        plain += given
        centered += given * (tl.load(x + at, there, 0.0) - center)
    to = sums + tl.program_id(0) * 2 * channels + c
    tl.store(to, tl.sum(plain, 0), c < channels)
    tl.store(to + channels, tl.sum(centered, 0), c < channels)


@operator
def mask_and_sum(g: Array, h: Array | None, y: Array, x: Array, mean: Array) -> tuple[Array, Array]:
    """`d`, and `[programs, 2, channels]`: what each program has summed up."""
    channels = x.shape[1]
    g, y, x, *others = (
        one.contiguous(memory_format=torch.channels_last) for one in (g, y, x, *([] if h is None else [h]))
    )
    d, rows, across = torch.empty_like(x), x.numel() // channels, triton.cdiv(channels, CHANNELS)
    tiles = triton.cdiv(rows, ROWS)
    steps = max(1, tiles * across // PROGRAMS)
    sums = x.new_empty(triton.cdiv(tiles, steps), 2, channels)
    launch(
        _mask_and_sum, (len(sums), across),
        g, others[0] if others else g, y, x, mean, d, sums, rows, channels,
        steps, ROWS, CHANNELS, bool(others), num_warps=4,
    )  # fmt: skip
    return d, sums
