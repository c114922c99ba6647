"""The operators of `label_losses.py` on a GPU, each in one kernel that reads the predictions once."""

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


@triton.jit
def _losses(
    y, t, losses, kept, rows, classes, inner, left_out, smoothing, yn, yc, yi,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The losses of some rows, and what their gradients need. The sum follows the greatest prediction so far."""
    row, of_row = _rows(rows, inner, yn, yi, ROWS)
    inside = row < rows
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    base = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    plain = tl.zeros((ROWS,), tl.float32)
    for start in range(0, classes, CLASSES):
        at = start + tl.arange(0, CLASSES)
        there = inside[:, None] & (at < classes)[None, :]
        found = tl.load(y + of_row[:, None] + at.to(tl.int64)[None, :] * yc, there, float("-inf")).to(tl.float32)
        most = tl.maximum(most, tl.max(found, 1))
        now = tl.where(most == float("-inf"), 0.0, most)  # masked predictions add nothing, also before any other
        total = total * tl.exp(base - now) + tl.sum(tl.exp(found - now[:, None]), 1)
        base = now
        if SMOOTH:
            plain += tl.sum(tl.where(there, found, 0.0), 1)
    label = tl.load(t + row, inside, 0)
    valid = inside & (label >= 0) & (label < classes)
    of_label = tl.load(y + of_row + label * yc, valid, 0.0).to(tl.float32)
    logarithm = tl.log(total)
    loss = base - of_label
    if SMOOTH:
        loss = (1 - smoothing) * loss + smoothing * (base - plain / classes)
    tl.store(losses + row, tl.where(label == left_out, 0.0, loss + logarithm), inside)
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
    shares = tl.exp(read - base[:, None] - logarithm[:, None])
    wanted = tl.where(column == label[:, None], 1 - smoothing, 0.0) + share
    tl.store(found + to_row[:, None] + column * fc, (shares - wanted) * factor[:, None], there)


@triton.jit
def _rows(rows, inner, outer_step, inner_step, ROWS: tl.constexpr):
    """The rows of this program, and where each begins; large, since offsets may be."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, (row // inner) * outer_step + (row % inner) * inner_step


def write_losses(y: Array, t: Array, losses: Array, kept: Array, left_out: int, smoothing: float) -> None:
    """`label_losses`, into arrays that are there."""
    n, classes, inner = y.shape
    rows, columns = _tile(y)
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


def _tile(y: Array) -> tuple[int, int]:
    """Rows and classes of a tile: as many neighbors in memory as possible."""
    _, classes, inner = y.shape
    whole = triton.next_power_of_2(classes)
    if inner > 1 and y.stride(2) < y.stride(1):
        columns = min(whole, FEW_CLASSES)
        return TILE // 4 // columns, columns
    columns = min(whole, TILE)
    return min(MOST_ROWS, TILE // columns), columns


def _warps(numbers: int) -> dict[str, Any]:
    return {"num_warps": 8 if numbers >= TILE else 4}
