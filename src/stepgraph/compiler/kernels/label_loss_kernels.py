"""The operators of `label_losses.py` on a GPU, each in one kernel.

A program computes whole rows, tile by tile. It loads whole vectors where Triton can prove that rows are aligned: their
length and distance have to be multiples of 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from stepgraph.compiler.triton_launch import launch

Array = torch.Tensor
TILE = 4096  # numbers in a tile of several rows
MOST_ROWS = 64  # in a tile, where the classes of a row are neighbors in memory
FEW_CLASSES = 16  # in a tile, where they are not
# A program that reads a long row twice has the more threads the longer the row is, so that the rows in use at a time
# stay in the cache.
FEWEST_LANES, MOST_LANES = 2048, 8192  # of a long row
CLASSES_PER_LANE = 16  # if their number is rounded up to a power of 2
PARTS = 4  # numbers per lane in a tile of a long row
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _losses(
    y, t, losses, kept, rows, classes, inner, left_out, smoothing, yn, yc, yi,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The losses of some rows, and what their gradients need."""
    row, of_row = _rows(rows, inner, yn, yi, ROWS)
    inside = row < rows
    label = tl.load(t + row, inside, 0)
    valid = inside & (label >= 0) & (label < classes)
    of_label = tl.load(y + of_row + label * yc, valid, 0.0).to(tl.float32)
    base, logarithm, plain = _sums(y, of_row, inside, classes, classes, yc, "", SMOOTH, ROWS, PARTS, LANES)
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
    at = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    there = inside[:, None] & (at < classes)[None, :]
    label = tl.load(t + row, inside, 0)
    base = tl.load(kept + row, inside, 0.0)
    logarithm = tl.load(kept + rows + row, inside, 0.0)
    factor = tl.where(label == left_out, 0.0, tl.load(g + row, inside, 0.0))
    column = at.to(tl.int64)[None, :]
    read = tl.load(y + of_row[:, None] + column * yc, there, 0.0).to(tl.float32)
    shares = _shares(read, base[:, None], logarithm[:, None])
    wanted = tl.where(column == label[:, None], 1 - smoothing, 0.0) + share
    tl.store(found + to_row[:, None] + column * fc, (shares - wanted) * factor[:, None], there)


@triton.jit
def _both(
    found, y, t, g, losses, rows, width, classes, inner, left_out, smoothing, share, yn, yc, yi, fn, fc, fi, gn, gi,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The losses of some rows and their gradients; `found` may be `y`. Behind the classes of a row is padding."""
    row, of_row = _rows(rows, inner, yn, yi, ROWS)
    _, to_row = _rows(rows, inner, fn, fi, ROWS)
    _, of_g = _rows(rows, inner, gn, gi, ROWS)
    inside = row < rows
    label = tl.load(t + row, inside, 0)
    valid = inside & (label >= 0) & (label < classes)
    of_label = tl.load(y + of_row + label * yc, valid, 0.0).to(tl.float32)
    factor = tl.where(label == left_out, 0.0, tl.load(g + of_g, inside, 0.0))
    base, logarithm, plain = _sums(y, of_row, inside, width, classes, yc, "evict_last", SMOOTH, ROWS, PARTS, LANES)
    loss = _loss(base, logarithm, plain, of_label, classes, smoothing, SMOOTH)
    tl.store(losses + row, tl.where(label == left_out, 0.0, loss), inside)
    tl.debug_barrier()  # all threads have read the predictions before one of them overwrites any
    whole = _whole(classes, ROWS, PARTS, LANES)
    for start in range(0, whole, PARTS * LANES):
        at = _columns(start, PARTS, LANES)
        read = _read(y, of_row, inside, at, width, yc, "evict_first", False)
        gradient = _unlabeled(read, base, logarithm, share, factor, SMOOTH)
        tl.store(found + to_row[:, None, None] + at.to(tl.int64) * fc, gradient)
    for start in range(whole, width, PARTS * LANES):
        at = _columns(start, PARTS, LANES)
        read = _read(y, of_row, inside, at, width, yc, "evict_first", True)
        gradient = tl.where(at < classes, _unlabeled(read, base, logarithm, share, factor, SMOOTH), 0.0)
        there = inside[:, None, None] & (at < width)
        tl.store(found + to_row[:, None, None] + at.to(tl.int64) * fc, gradient, there)
    tl.debug_barrier()  # the label's number is written last
    gradient = (_shares(of_label, base, logarithm) - (1 - smoothing + share)) * factor
    tl.store(found + to_row + label * fc, gradient, valid)


@triton.jit
def _rows(rows, inner, outer_step, inner_step, ROWS: tl.constexpr):
    """The rows of this program, and where each begins; large, since offsets may be."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, (row // inner) * outer_step + (row % inner) * inner_step


@triton.jit
def _whole(classes, ROWS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The columns up to which nothing is outside a tile."""
    return classes // (PARTS * LANES) * (PARTS * LANES) if ROWS == 1 else 0


@triton.jit
def _columns(start, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The columns of a tile, `[1, PARTS, LANES]`."""
    return (start + tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :])[None, :, :]


@triton.jit
def _read(y, of_row, inside, at, width, yc, KEEP: tl.constexpr, MASKED: tl.constexpr):
    """A tile of predictions, `[ROWS, PARTS, LANES]`."""
    place = y + of_row[:, None, None] + at.to(tl.int64) * yc
    if MASKED:
        found = tl.load(place, inside[:, None, None] & (at < width), 0.0, eviction_policy=KEEP)
    else:
        found = tl.load(place, eviction_policy=KEEP)
    return found.to(tl.float32)


@triton.jit
def _sums(
    y, of_row, inside, width, classes, yc,
    KEEP: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """By row: the greatest prediction, the logarithm of the sum of `exp(y - greatest)`, and the sum of `y`.

    Each lane has its own sums, which follow its greatest prediction so far. Only at the end they are added.
    """
    most = tl.full((ROWS, LANES), LOWEST, tl.float32)
    totals = tl.zeros((ROWS, LANES), tl.float32)
    plain = tl.zeros((ROWS, LANES), tl.float32)
    whole = _whole(classes, ROWS, PARTS, LANES)
    for start in range(0, whole, PARTS * LANES):
        found = _read(y, of_row, inside, _columns(start, PARTS, LANES), width, yc, KEEP, False)
        most, totals = _add(found, most, totals)
        if SMOOTH:
            plain += tl.sum(found, 1)
    for start in range(whole, width, PARTS * LANES):
        at = _columns(start, PARTS, LANES)
        found = _read(y, of_row, inside, at, width, yc, KEEP, True)
        most, totals = _add(tl.where(at < classes, found, float("-inf")), most, totals)
        if SMOOTH:
            plain += tl.sum(tl.where(at < classes, found, 0.0), 1)
    greatest = tl.max(most, 1)
    total = tl.sum(totals * _exp(most - greatest[:, None]), 1)
    return tl.where(greatest == LOWEST, 0.0, greatest), tl.log(total), tl.sum(plain, 1)


@triton.jit
def _add(found, most, totals):
    """The greatest numbers of lanes and their sums, with another tile."""
    now = tl.maximum(most, tl.max(found, 1))
    return now, totals * _exp(most - now) + tl.sum(_exp(found - now[:, None, :]), 1)


@triton.jit
def _loss(base, logarithm, plain, of_label, classes, smoothing, SMOOTH: tl.constexpr):
    loss = base - of_label
    if SMOOTH:
        loss = (1 - smoothing) * loss + smoothing * (base - plain / classes)
    return loss + logarithm


@triton.jit
def _exp(x):
    """`exp(x)` in two instructions. `tl.exp` has more, for numbers below 1e-38."""
    return tl.exp2(x * LOG2E)


@triton.jit
def _shares(read, base, logarithm):
    """The probabilities of predictions. Small differences of large ones are exact, so the first sum is by itself."""
    return tl.exp2((read - base) * LOG2E - logarithm * LOG2E)


@triton.jit
def _unlabeled(read, base, logarithm, share, factor, SMOOTH: tl.constexpr):
    """The gradient of a tile, except where the label is."""
    shares = _shares(read, base[:, None, None], logarithm[:, None, None])
    if SMOOTH:
        shares -= share
    return shares * factor[:, None, None]


class _Tile(NamedTuple):
    """What a program computes at a time: rows, numbers of each lane, and lanes."""

    rows: int
    parts: int
    lanes: int


def write_losses(y: Array, t: Array, losses: Array, kept: Array, left_out: int, smoothing: float) -> None:
    """`label_losses`, into arrays that are there."""
    n, classes, inner = y.shape
    tile = _whole_rows(y)
    if losses.numel():
        sizes = (n * inner, classes, inner, left_out, smoothing)
        grid = (triton.cdiv(n * inner, tile.rows),)
        given = y, t.contiguous(), losses, kept
        launch(_losses, grid, *given, *sizes, *y.stride(), bool(smoothing), *tile, **_warps(tile))


def write_gradient(found: Array, y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> None:
    """`label_losses_gradient`, into an array that is there, or over `y`."""
    n, classes, inner = y.shape
    tile = _part_of_rows(y)
    if found.numel():
        given = found, y, t.contiguous(), g.contiguous(), kept.contiguous()
        sizes = (n * inner, classes, inner, left_out, smoothing, smoothing / classes)
        grid = triton.cdiv(n * inner, tile.rows), triton.cdiv(classes, tile.lanes)
        strides = *y.stride(), *found.stride()
        launch(_gradient, grid, *given, *sizes, *strides, tile.rows, tile.lanes, **_warps(tile))


def write_both(
    found: Array, y: Array, t: Array, g: Array, losses: Array, left_out: int, smoothing: float, classes: int
) -> None:
    """`label_losses_with_gradient`, into arrays that are there, or over `y`."""
    n, width, inner = y.shape
    tile = _whole_rows(y)
    if found.numel():
        sizes = (n * inner, width, classes, inner, left_out, smoothing, smoothing / classes)
        grid = (triton.cdiv(n * inner, tile.rows),)
        given = found, y, t.contiguous(), g, losses
        strides = *y.stride(), *found.stride(), *g.stride()
        launch(_both, grid, *given, *sizes, *strides, bool(smoothing), *tile, **_warps(tile))


def _part_of_rows(y: Array) -> _Tile:
    """A tile with as many neighbors in memory as possible."""
    _, classes, inner = y.shape
    whole = triton.next_power_of_2(classes)
    if inner > 1 and y.stride(2) < y.stride(1):
        lanes = min(whole, FEW_CLASSES)
        return _Tile(TILE // 4 // lanes, 1, lanes)
    lanes = min(whole, TILE)
    return _Tile(min(MOST_ROWS, TILE // lanes), 1, lanes)


def _whole_rows(y: Array) -> _Tile:
    """The same for a program that reads all of its rows."""
    tile, classes = _part_of_rows(y), y.shape[1]
    if tile.rows > 1 or classes <= PARTS * FEWEST_LANES:
        return tile
    lanes = triton.next_power_of_2(classes) // CLASSES_PER_LANE
    return _Tile(1, PARTS, min(MOST_LANES, max(FEWEST_LANES, lanes)))


def _warps(tile: _Tile) -> dict[str, Any]:
    """8 to 16 numbers per thread, 32 of a long row, but at least 4 warps."""
    numbers = tile.rows * tile.parts * tile.lanes
    return {"num_warps": max(4, numbers // (1024 if tile.parts > 1 else 512))}
