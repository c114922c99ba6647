"""Convolutions with few numbers per window as sums; followed by a max pool and ReLU, on a GPU as custom kernels.

    y[n, p, o] = relu(max over pixels q of window p of b[o] + Σ w[o, tap] x[n, q + tap])

Each maximum comes with its pixel in the window: 0, 1, …, or `OFF` if ReLU is 0. The formulas are
written so that PyTorch's compiler creates few kernels; `small_convolution_kernels.py` is compared with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from stepgraph.compiler.kernels.patches import extents
from stepgraph.compiler.tuned.gpus import OFF, fit
from stepgraph.system import torch_private

Array = torch.Tensor
Pair = Sequence[int]


def convolve_and_pool(
    x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, window: Pair, rectifies: bool
) -> tuple[Array, Array]:
    """Maxima of a pool's non-overlapping windows, and their positions."""
    if fit(x):
        from stepgraph.compiler.tuned.small_convolution_kernels import convolve_and_pool as in_tiles

        return in_tiles(_padded(x, padding), w, b, stride, window, rectifies)
    most, place = _maxima(x, w, b, stride, padding, window)
    if rectifies:
        most, place = torch.where(most <= 0, 0, most), torch.where(most <= 0, OFF, place)
    return most.permute(0, 3, 1, 2), place.permute(0, 3, 1, 2)


def _maxima(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, window: Pair) -> tuple[Array, Array]:
    images, table, (down, right) = _padded(x, padding), _table(w), stride
    pooled = [extent // size for extent, size in zip(extents(x, w, stride, padding), window, strict=True)]
    steps = down * window[0], right * window[1]
    most, place = None, None
    for number, (i, j) in enumerate(itertools.product(range(window[0]), range(window[1]))):
        y = _sum(_taps(images[:, :, i * down :, j * right :], pooled, steps, w), table, b)
        if most is None or place is None:
            most, place = y, torch.zeros_like(y, dtype=torch.uint8)
        else:
            higher = (y > most) | y.isnan()
            most, place = torch.where(higher, y, most), torch.where(higher, number, place)
    assert most is not None and place is not None
    return most, place


def pooled_gradients(
    g: Array, places: Array, x: Array, w: Array, stride: Pair, padding: Pair, window: Pair
) -> tuple[Array, Array]:
    """`dw[o, tap] = Σ g[n, p, o] x[n, q(n, p, o) + tap]` and `db[o] = Σ g[n, p, o]`, where ReLU passes maxima."""
    images = _padded(x, padding)
    if fit(x):
        from stepgraph.compiler.tuned.small_convolution_kernels import gradient_sums

        sums = gradient_sums(g, places, images, w, stride, window).sum(0)
        return sums[:-1].t().reshape(w.shape), sums[-1]
    given, place = (one.permute(0, 2, 3, 1) for one in (g, places))
    given, place = torch.where(place == OFF, 0, given), torch.where(place == OFF, 0, place)
    first, sums = _first(images, place, stride, window), []
    _, channel, line, _ = images.stride()
    for c, i, j in itertools.product(*map(range, w.shape[1:])):
        seen = torch_private.unsafe_index(images.view(-1), [first + (c * channel + i * line + j)])
        sums.append((given * seen).sum((0, 1, 2)))
    return torch.stack(sums, 1).view(w.shape), given.sum((0, 1, 2))


def _first(images: Array, place: Array, stride: Pair, window: Pair) -> Array:
    """The start of the convolution window at each maximum's pixel, `[n, *pixels, outputs]`."""
    kind = torch.int32 if images.numel() < 1 << 31 else torch.int64  # narrow integers are faster
    place, (image, _, line, _) = place.to(kind), images.stride()
    n, rows, columns = (torch.arange(extent, device=place.device, dtype=kind) for extent in place.shape[:3])
    down = rows[:, None, None] * window[0] + place // window[1]
    across = columns[:, None] * window[1] + place % window[1]
    return n[:, None, None, None] * image + down * (stride[0] * line) + across * stride[1]


def _padded(x: Array, padding: Pair) -> Array:
    """Zero-padded images, row by row in memory."""
    (top, left) = padding
    return F.pad(x, (left, left, top, top)).contiguous()


def _table(w: Array) -> Array:
    """`[taps, outputs]`: adjacent in memory for neighboring threads."""
    return w.flatten(1).t().contiguous()


def _sum(taps: Iterator[Array], table: Array, b: Array | None) -> Array:
    """The sum over taps, `[n, *pixels, outputs]`."""
    outputs, total = table.shape[1], None
    for number, seen in enumerate(taps):
        product = seen * table.as_strided((outputs,), (1,), number * outputs)
        total = product if total is None else total + product
    assert total is not None
    return total if b is None else total + b


def _taps(images: Array, pixels: Pair, stride: Pair, w: Array) -> Iterator[Array]:
    """The pixels under each element of a window, `[n, *pixels, 1]`, in the order of the weights.

    With strides, the compiler writes padded images once instead of checking bounds at each tap.
    """
    image, channel, line, _ = images.stride()
    size, strides = (len(images), *pixels, 1), (image, stride[0] * line, stride[1], 1)
    for c, i, j in itertools.product(*map(range, w.shape[1:])):
        yield images.as_strided(size, strides, images.storage_offset() + c * channel + i * line + j)
