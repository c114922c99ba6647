"""The operators of `label_losses.py` on a GPU, each in one kernel.

Loads are as wide as the hardware allows where Triton can prove that rows are aligned: their length and distance have to
be multiples of 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stepgraph.compiler.launch import launch

Array = torch.Tensor
TILE = 4096  # numbers that a program computes at a time
MOST_ROWS = 64  # in a tile, where the classes of a row are neighbors in memory
FEW_CLASSES = 16  # in a tile, where they are not
# A program that reads a long row twice has more threads, so that fewer rows are in use at a time and stay in the cache:
# two rows of 64 KiB per processor, or one that is longer, take a third of an H100's.
LONG, LONGER, LONGEST = 2 * TILE, 4 * TILE, 1 << 15


@triton.jit
def _losses(
    y, t, losses, kept, rows, classes, inner, left_out, smoothing, yn, yc, yi,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The losses of some rows, and what their gradients need."""
    row, of_row = _rows(rows, inner, yn, yi, ROWS)
    inside = row < rows
    label = tl.load(t + row, inside, 0)
    of_label = _of_label(y, of_row, label, inside, classes, yc)
    base, logarithm, plain = _sums(y, of_row, inside, classes, classes, yc, SMOOTH, ROWS, CLASSES)
    loss = _loss(base, logarithm, plain, of_label, classes, smoothing, SMOOTH)
    tl.store(losses + row, tl.where(label == left_out, 0.0, loss), inside)
    tl.store(kept + row, base, inside)
    tl.store(kept + rows + row, logarithm, inside)


@triton.jit
def _gradient(
    found, y, t, g, kept, rows, classes, inner, left_out, smoothing, share, yn, yc, yi, fn, fc, fi,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile; `found` may be `y`."""
    row, of_row = _rows(rows, inner, yn, yi, ROWS)
    _, to_row = _rows(rows, inner, fn, fi, ROWS)
    inside = row < rows
    at = (tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)).to(tl.int64)[None, :]
    there = inside[:, None] & (at < classes)
    label = tl.load(t + row, inside, 0)
    base = tl.load(kept + row, inside, 0.0)
    logarithm = tl.load(kept + rows + row, inside, 0.0)
    factor = tl.where(label == left_out, 0.0, tl.load(g + row, inside, 0.0))
    read = tl.load(y + of_row[:, None] + at * yc, there, 0.0).to(tl.float32)
    gradient = _of_tile(read, at, base, logarithm, label, factor, smoothing, share)
    tl.store(found + to_row[:, None] + at * fc, gradient, there)


@triton.jit
def _both(
    found, y, t, g, losses, rows, width, classes, inner, left_out, smoothing, share, yn, yc, yi, fn, fc, fi, gn, gi,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The losses of some rows and their gradients; `found` may be `y`. Behind the classes of a row is padding."""
    row, of_row = _rows(rows, inner, yn, yi, ROWS)
    _, to_row = _rows(rows, inner, fn, fi, ROWS)
    _, of_g = _rows(rows, inner, gn, gi, ROWS)
    inside = row < rows
    label = tl.load(t + row, inside, 0)
    of_label = _of_label(y, of_row, label, inside, classes, yc)
    base, logarithm, plain = _sums(y, of_row, inside, width, classes, yc, SMOOTH, ROWS, CLASSES)
    loss = _loss(base, logarithm, plain, of_label, classes, smoothing, SMOOTH)
    tl.store(losses + row, tl.where(label == left_out, 0.0, loss), inside)
    factor = tl.where(label == left_out, 0.0, tl.load(g + of_g, inside, 0.0))
    tl.debug_barrier()  # all threads have read the predictions before one of them overwrites any
    for start in range(0, width, CLASSES):
        at = (start + tl.arange(0, CLASSES)).to(tl.int64)[None, :]
        there = inside[:, None] & (at < width)
        read = tl.load(y + of_row[:, None] + at * yc, there, 0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = _of_tile(read, at, base, logarithm, label, factor, smoothing, share)
        tl.store(found + to_row[:, None] + at * fc, tl.where(at < classes, gradient, 0.0), there)


@triton.jit
def _rows(rows, inner, outer_step, inner_step, ROWS: tl.constexpr):
    """The rows of this program, and where each begins; large, since offsets may be."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, (row // inner) * outer_step + (row % inner) * inner_step


@triton.jit
def _of_label(y, of_row, label, inside, classes, yc):
    """The prediction of each row's label; 0 if it is no class."""
    valid = inside & (label >= 0) & (label < classes)
    return tl.load(y + of_row + label * yc, valid, 0.0).to(tl.float32)


@triton.jit
def _sums(
    y, of_row, inside, width, classes, yc, SMOOTH: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """By row: the greatest prediction, the logarithm of the sum of `exp(y - greatest)`, and the sum of `y`.

    The sums follow the greatest prediction so far. Each thread adds its own numbers, and only the end adds those.
    """
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    base = tl.zeros((ROWS,), tl.float32)
    plain = tl.zeros((ROWS,), tl.float32)
    totals = tl.zeros((ROWS, CLASSES), tl.float32)
    for start in range(0, width, CLASSES):
        at = (start + tl.arange(0, CLASSES)).to(tl.int64)[None, :]
        there, real = inside[:, None] & (at < width), inside[:, None] & (at < classes)
        found = tl.load(y + of_row[:, None] + at * yc, there, 0.0, eviction_policy="evict_last").to(tl.float32)
        masked = tl.where(real, found, float("-inf"))
        most = tl.maximum(most, tl.max(masked, 1))
        now = tl.where(most == float("-inf"), 0.0, most)  # masked predictions add nothing, also before any other
        totals = totals * tl.exp(base - now)[:, None] + tl.exp(masked - now[:, None])
        base = now
        if SMOOTH:
            plain += tl.sum(tl.where(real, found, 0.0), 1)
    return base, tl.log(tl.sum(totals, 1)), plain


@triton.jit
def _loss(base, logarithm, plain, of_label, classes, smoothing, SMOOTH: tl.constexpr):
    loss = base - of_label
    if SMOOTH:
        loss = (1 - smoothing) * loss + smoothing * (base - plain / classes)
    return loss + logarithm


@triton.jit
def _of_tile(read, at, base, logarithm, label, factor, smoothing, share):
    """The gradient of a tile of predictions."""
    shares = tl.exp(read - base[:, None] - logarithm[:, None])
    wanted = tl.where(at == label[:, None], 1 - smoothing, 0.0) + share
    return (shares - wanted) * factor[:, None]


def write_losses(y: Array, t: Array, losses: Array, kept: Array, left_out: int, smoothing: float) -> None:
    """`label_losses`, into arrays that are there."""
    n, classes, inner = y.shape
    rows, columns = _tile(y, whole_rows=True)
    if losses.numel():
        sizes = (n * inner, classes, inner, left_out, smoothing)
        grid = (triton.cdiv(n * inner, rows),)
        launch(
            _losses, grid, y, t.contiguous(), losses, kept, *sizes, *y.stride(), bool(smoothing), rows, columns,
            **_warps(rows * columns),
        )  # fmt: skip


def write_gradient(found: Array, y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> None:
    """`label_losses_gradient`, into an array that is there, or over `y`."""
    n, classes, inner = y.shape
    rows, columns = _tile(y)
    if found.numel():
        given = t.contiguous(), g.contiguous(), kept.contiguous()
        sizes = (n * inner, classes, inner, left_out, smoothing, smoothing / classes)
        grid = triton.cdiv(n * inner, rows), triton.cdiv(classes, columns)
        launch(
            _gradient, grid, found, y, *given, *sizes, *y.stride(), *found.stride(), rows, columns,
            **_warps(rows * columns),
        )  # fmt: skip


def write_both(
    found: Array, y: Array, t: Array, g: Array, losses: Array, left_out: int, smoothing: float, classes: int
) -> None:
    """`label_losses_with_gradient`, into arrays that are there, or over `y`."""
    n, width, inner = y.shape
    rows, columns = _tile(y, whole_rows=True)
    if found.numel():
        sizes = (n * inner, width, classes, inner, left_out, smoothing, smoothing / classes)
        strides = (*y.stride(), *found.stride(), *g.stride())
        grid = (triton.cdiv(n * inner, rows),)
        launch(
            _both, grid, found, y, t.contiguous(), g, losses, *sizes, *strides, bool(smoothing), rows, columns,
            **_warps(rows * columns),
        )  # fmt: skip


def _tile(y: Array, *, whole_rows: bool = False) -> tuple[int, int]:
    """Rows and classes of a tile: as many neighbors in memory as possible.

    Args:
        y: predictions.
        whole_rows: whether a program reads all tiles of its rows.
    """
    _, classes, inner = y.shape
    whole = triton.next_power_of_2(classes)
    if inner > 1 and y.stride(2) < y.stride(1):
        columns = min(whole, FEW_CLASSES)
        return TILE // 4 // columns, columns
    if whole_rows and whole > TILE:
        return 1, LONG if classes <= LONGEST else LONGER
    columns = min(whole, TILE)
    return min(MOST_ROWS, TILE // columns), columns


def _warps(numbers: int) -> dict[str, Any]:
    """16 numbers per thread; at least 4 warps."""
    return {"num_warps": max(4, numbers // 512)}
