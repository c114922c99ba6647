"""The gradient of a convolution's weights, of 3×3 taps with stride 1, for images with their channels last.

    dw[i, j, o, c] = Σ g[n, r + 1 - i, s, o] x[n, r, s + j - 1, c]        over images n and pixels (r, s)

Each program sums some pixels up, for some channels and all nine taps, so that three rows of gradients and three shifts
of the source make nine products. Their operands lie along the other axis than Hopper's own TF32 instructions ask for;
tiles of 32 rows make Triton take those of Ampere, which do not mind.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from stepgraph.compiler.triton_launch import launch, operator

Array = torch.Tensor
PIXELS, OUTPUTS, INPUTS = 16, 32, 64  # of a tile
PROGRAMS = 2  # a processor of the GPU
STEPS = 16  # at least, so that what a program writes does not outweigh what it reads


@triton.jit
def _gradients(
    g, x, sums, pixels, outputs, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    PIXELS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """`[9, outputs, inputs]` of some pixels."""
    o, c = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(2) * INPUTS + tl.arange(0, INPUTS)
    first = tl.program_id(0) * (STEPS * PIXELS)
    g += first.to(tl.int64) * outputs + o[:, None]
    x += first.to(tl.int64) * inputs + c[None, :]
    zeros = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    above, middle, below = (zeros, zeros, zeros), (zeros, zeros, zeros), (zeros, zeros, zeros)
    for step in range(STEPS):
        at = step * PIXELS + tl.arange(0, PIXELS)
        there, row, column = first + at < pixels, (first + at) // COLUMNS % ROWS, (first + at) % COLUMNS
        seen = (
            tl.load(x + (at - 1)[:, None] * inputs, (there & (column > 0))[:, None], 0.0),
            tl.load(x + at[:, None] * inputs, there[:, None], 0.0),
            tl.load(x + (at + 1)[:, None] * inputs, (there & (column < COLUMNS - 1))[:, None], 0.0),
        )
        given = tl.load(g + (at + COLUMNS)[None, :] * outputs, (there & (row < ROWS - 1))[None, :], 0.0)
        above = _products(given, seen, above)
        middle = _products(tl.load(g + at[None, :] * outputs, there[None, :], 0.0), seen, middle)
        given = tl.load(g + (at - COLUMNS)[None, :] * outputs, (there & (row > 0))[None, :], 0.0)
        below = _products(given, seen, below)
    size = outputs * inputs
    to = sums + tl.program_id(0).to(tl.int64) * (9 * size) + (o[:, None] * inputs + c[None, :])
    for j in tl.static_range(3):
        tl.store(to + j * size, above[j])
        tl.store(to + (3 + j) * size, middle[j])
        tl.store(to + (6 + j) * size, below[j])


@triton.jit
def _products(given, seen, totals):
    """One row of taps."""
    return (
        tl.dot(given, seen[0], totals[0]),
        tl.dot(given, seen[1], totals[1]),
        tl.dot(given, seen[2], totals[2]),
    )


@operator
def weight_gradient_sums(g: Array, x: Array) -> Array:
    """`[programs, 3, 3, outputs, inputs]`: what each program has summed up."""
    g, x = (one.contiguous(memory_format=torch.channels_last) for one in (g, x))
    (_, inputs, *extents), outputs = x.shape, g.shape[1]
    pixels, tile = x.numel() // inputs, INPUTS if inputs % INPUTS == 0 else INPUTS // 2
    across = outputs // OUTPUTS, inputs // tile
    programs = max(1, PROGRAMS * _processors(x.device) // math.prod(across))
    steps = max(STEPS, triton.cdiv(pixels, programs * PIXELS))
    sums = x.new_empty(triton.cdiv(pixels, steps * PIXELS), 3, 3, outputs, inputs)
    launch(
        _gradients, (len(sums), *across),
        g, x, sums, pixels, outputs, inputs, *extents, steps, PIXELS, OUTPUTS, tile, num_warps=4, num_stages=4,
    )  # fmt: skip
    return sums


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
