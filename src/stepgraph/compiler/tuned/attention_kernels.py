"""Attention on a GPU in one kernel, and its gradients in one or two: scores never reach the GPU's memory.

    p = softmax(q kᵀ / sqrt(d)),   y = p v
    dv = pᵀ dy,   ds = p ∘ (dy vᵀ - rowsum(dy ∘ y)),   dq = ds k / sqrt(d),   dk = dsᵀ q / sqrt(d)

PyTorch has such kernels for half precision; this one multiplies float32 with TF32's 10 bits, where that is allowed.
The forward pass keeps the logarithm of each row's sum, so that the gradients find `p` again with one product. Arrays
are `[batch, heads, steps, width]`. Logarithms lie in memory as PyTorch's operator leaves them, so that one of the two
passes may be fused before the other.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from stepgraph.compiler.triton_launch import launch, operator

Array = torch.Tensor
MOST = 4096  # numbers in a tile of all keys
ALIGNED = 32  # logarithms of a head lie in so many pieces
LN2, LOG2E = tl.constexpr(math.log(2)), tl.constexpr(math.log2(math.e))  # powers of 2 are what a GPU computes
KEYS, LAUNCH = 64, {"num_warps": 4, "num_stages": 1}


@triton.jit
def _forward(
    q, k, v, y, norms, scale, heads, rows, keys, padded,
    qn, qh, qt, kn, kh, kt, vn, vh, vt, yn, yh, yt,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`y` of one tile of queries, and the logarithm of each row's sum."""
    head, n, h = _head(heads)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None]
    query = tl.load(q + n * qn + h * qh + row[:, None] * qt + column, inside, 0.0) * scale
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, keys, KEYS):
        at = start + tl.arange(0, KEYS)
        turned = tl.load(k + n * kn + h * kh + column[:, None] + at * kt, (at < keys)[None, :], 0.0)
        values = tl.load(v + n * vn + h * vh + at[:, None] * vt + column, (at < keys)[:, None], 0.0)
        scores = _product(query, turned)
        scores = tl.where((at < keys)[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        powers, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
        total = total * shrink + tl.sum(powers, 1)
        sums = sums * shrink[:, None] + _product(powers, values)
        most = higher
    tl.store(y + n * yn + h * yh + row[:, None] * yt + column, sums / total[:, None], inside)
    norm = tl.where(row < rows, (most + tl.log2(total)) * LN2, float("inf"))
    tl.store(norms + head * padded + row, norm, row < padded)


@triton.jit
def _key_gradients(
    q, k, v, y, dy, norms, dq, dk, dv, scale, factor, heads, rows, keys, padded,
    qn, qh, qt, kn, kh, kt, vn, vh, vt, yn, yh, yt, gn, gh, gt, on, oh, ot, pn, ph, pt,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HOLDS_ALL: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of one tile of keys; where it holds all keys, `dq` too."""
    head, n, h = _head(heads)
    at, column = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    there = (at < keys)[:, None]
    key = tl.load(k + n * kn + h * kh + at[:, None] * kt + column, there, 0.0)
    value = tl.load(v + n * vn + h * vh + at[:, None] * vt + column, there, 0.0)
    key_sums = tl.zeros((KEYS, WIDTH), tl.float32)
    value_sums = tl.zeros((KEYS, WIDTH), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None]
        query = tl.load(q + n * qn + h * qh + row[:, None] * qt + column, inside, 0.0)
        given = tl.load(dy + n * gn + h * gh + row[:, None] * gt + column, inside, 0.0)
        result = tl.load(y + n * yn + h * yh + row[:, None] * yt + column, inside, 0.0)
        norm = tl.load(norms + head * padded + row, row < rows, 0.0) * LOG2E
        scores = _product(key, tl.trans(query * scale))
        weights = tl.where(there & (row < rows)[None, :], tl.exp2(scores - norm[None, :]), 0.0)
        value_sums += _product(weights, given)
        slopes = _product(value, tl.trans(given)) - tl.sum(given * result, 1)[None, :]
        slopes = weights * slopes
        key_sums += _product(slopes, query)
        if HOLDS_ALL:
            change = _product(tl.trans(slopes), key) * factor
            tl.store(dq + n * on + h * oh + row[:, None] * ot + column, change, inside)
    place = n * pn + h * ph + at[:, None] * pt + column
    tl.store(dk + place, key_sums * factor, there)
    tl.store(dv + place, value_sums, there)


@triton.jit
def _query_gradient(
    q, k, v, y, dy, norms, dq, scale, factor, heads, rows, keys, padded,
    qn, qh, qt, kn, kh, kt, vn, vh, vt, yn, yh, yt, gn, gh, gt, on, oh, ot,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`dq` of one tile of queries."""
    head, n, h = _head(heads)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None]
    query = tl.load(q + n * qn + h * qh + row[:, None] * qt + column, inside, 0.0) * scale
    given = tl.load(dy + n * gn + h * gh + row[:, None] * gt + column, inside, 0.0)
    result = tl.load(y + n * yn + h * yh + row[:, None] * yt + column, inside, 0.0)
    norm = tl.load(norms + head * padded + row, row < rows, 0.0) * LOG2E
    mean = tl.sum(given * result, 1)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, keys, KEYS):
        at = start + tl.arange(0, KEYS)
        key = tl.load(k + n * kn + h * kh + at[:, None] * kt + column, (at < keys)[:, None], 0.0)
        value = tl.load(v + n * vn + h * vh + at[:, None] * vt + column, (at < keys)[:, None], 0.0)
        scores = _product(query, tl.trans(key))
        weights = tl.where((at < keys)[None, :], tl.exp2(scores - norm[:, None]), 0.0)
        slopes = weights * (_product(given, tl.trans(value)) - mean[:, None])
        sums += _product(slopes, key)
    tl.store(dq + n * on + h * oh + row[:, None] * ot + column, sums * factor, inside)


@triton.jit
def _product(a, b):
    return tl.dot(_rounded(a), _rounded(b), input_precision="tf32")


@triton.jit
def _rounded(x):
    """To the nearest number of TF32's 10 bits: the units that multiply would cut the others off."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def _head(heads):
    """The number of this head among all images', of its image and within it; large, since offsets may be."""
    head = tl.program_id(1).to(tl.int64)
    return head, head // heads, head % heads


@operator
def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """`y`, and the logarithms that its gradients need."""
    q, k, v = (_rows_in_one_piece(one) for one in (q, k, v))
    batch, heads, rows, width = q.shape
    y, norms = _like(q), q.new_empty(batch, heads, -(-rows // ALIGNED) * ALIGNED)
    arrays, sizes, tile = (q, k, v, y), (heads, rows, k.shape[2], norms.shape[2]), _tile(width)
    grid = triton.cdiv(rows, tile), batch * heads
    launch(_forward, grid, *arrays, norms, _scale(width), *sizes, *_strides(*arrays), width, tile, KEYS, **LAUNCH)
    return y, norms


@operator
def attend_gradients(q: Array, k: Array, v: Array, y: Array, norms: Array, dy: Array) -> tuple[Array, Array, Array]:
    """`dq`, `dk` and `dv`."""
    gradients = _like(q), _like(k), _like(v)
    _write_gradients(q, k, v, y, norms, dy, *gradients)
    return gradients


@operator
def attend_joint_gradients(q: Array, k: Array, v: Array, y: Array, norms: Array, dy: Array) -> Array:
    """`[batch, steps, 3, heads, width]`: all three side by side, as one product takes them; they are as long."""
    batch, heads, steps, width = q.shape
    joint = q.new_empty(batch, steps, 3, heads, width)
    _write_gradients(q, k, v, y, norms, dy, *(joint[:, :, i].transpose(1, 2) for i in range(3)))
    return joint


def _write_gradients(
    q: Array, k: Array, v: Array, y: Array, norms: Array, dy: Array, dq: Array, dk: Array, dv: Array
) -> None:
    """Into arrays that are there; `dk` and `dv` lie alike in memory."""
    q, k, v, y, dy = (_rows_in_one_piece(one) for one in (q, k, v, y, dy))
    batch, heads, rows, width = q.shape
    keys, numbers = k.shape[2], (_scale(width), 1 / math.sqrt(width))
    given = q, k, v, y, dy, norms.contiguous()
    sizes, strides = (heads, rows, keys, norms.shape[2]), _strides(q, k, v, y, dy, dq, dk)
    tile, all_keys = _tile(width), triton.next_power_of_2(max(keys, 16))
    holds_all = all_keys * width <= MOST
    of_keys = all_keys if holds_all else KEYS
    launch(
        _key_gradients, (triton.cdiv(keys, of_keys), batch * heads),
        *given, dq, dk, dv, *numbers, *sizes, *strides, width, tile, of_keys, holds_all, **LAUNCH,
    )  # fmt: skip
    if not holds_all:
        launch(
            _query_gradient, (triton.cdiv(rows, tile), batch * heads),
            *given, dq, *numbers, *sizes, *strides[:-3], width, tile, KEYS, **LAUNCH,
        )  # fmt: skip


def _like(x: Array) -> Array:
    """An array of this shape with its heads side by side in memory, as the layer joins them."""
    batch, heads, steps, width = x.shape
    return x.new_empty(batch, steps, heads, width).transpose(1, 2)


def _rows_in_one_piece(x: Array) -> Array:
    return x if x.stride(3) == 1 else x.contiguous()


def _tile(width: int) -> int:
    """How many queries a program takes at once: tiles must fit into registers and shared memory."""
    return 64 if width <= 64 else 32


def _scale(width: int) -> float:
    """For powers of 2 instead of e."""
    return math.log2(math.e) / math.sqrt(width)


def _strides(*arrays: Array) -> tuple[int, ...]:
    return tuple(step for one in arrays for step in one.stride()[:3])
