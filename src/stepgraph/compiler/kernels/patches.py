"""Images cut into the windows of a convolution, so that a convolution is a matrix product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

Array = torch.Tensor
PATCHES = 1 << 19  # numbers


def rows_at_once(w: Array) -> int:
    """How many outputs' weights are transposed at a time."""
    return max(1, PATCHES // w[0].numel())


def portions(x: Array, count: int) -> Iterator[tuple[int, Array]]:
    """`count` images at a time, and the index of the first."""
    for start in range(0, len(x), count):
        yield start, x[start : start + count]


def at_once(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> int:
    """How many images' patches are created at a time: what fits into a cache, which also bounds the memory."""
    return max(1, PATCHES // (windows(x, w, stride, padding) * w[0].numel()))


def extents(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    """Rows and columns of the result."""
    sizes = zip(x.shape[2:], w.shape[2:], stride, padding, strict=True)
    return [(extent + 2 * added - size) // step + 1 for extent, size, step, added in sizes]


def windows(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> int:
    """The number of window positions in an image."""
    return math.prod(extents(x, w, stride, padding))


def patches(
    x: Array, height: int, width: int, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Array, tuple[int, int, int]]:
    """Each window as a row: `[n * rows * columns, height * width * channels]`; and (n, rows, columns)."""
    n, channels = x.shape[:2]
    (top, left), (down, right) = padding, stride
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top)).contiguous()
    _, h, w, _ = padded.shape
    rows, columns = (h - height) // down + 1, (w - width) // right + 1
    size, strides = (n, rows, columns, height, width, channels), (h * w, down * w, right, w, 1)
    seen = padded.as_strided(size, (*(step * channels for step in strides), 1))
    return seen.reshape(n * rows * columns, -1), (n, rows, columns)


def taps(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """The pixels under each element of a window, one row each: `[inputs * height * width, n * rows * columns]`.

    The same numbers as `patches`, transposed: with few channels, rows of pixels are longer than windows
    and faster to copy.
    """
    (top, left), (down, right) = padding, stride
    padded = F.pad(x.contiguous(), (left, left, top, top))
    rows, columns = extents(x, w, stride, padding)
    seen = x.new_empty(*w.shape[1:], len(x), rows, columns)
    for c, i, j in itertools.product(*map(range, w.shape[1:])):
        across = slice(i, i + (rows - 1) * down + 1, down), slice(j, j + (columns - 1) * right + 1, right)
        seen[c, i, j] = padded[:, c, *across]
    return seen.view(w[0].numel(), -1)


def products_with(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """`Σ gᵀ patches`: the gradient of the weights, `[outputs, height * width * inputs]`."""
    outputs, _, height, width = w.shape
    total = None
    for start, images in portions(x, at_once(x, w, stride, padding)):
        rows, _ = patches(images, height, width, stride, padding)
        by_output = g[start : start + len(images)].permute(0, 2, 3, 1).reshape(-1, outputs).t()
        total = by_output @ rows if total is None else total.addmm_(by_output, rows)
        del rows, by_output  # before the next ones are allocated
    assert total is not None
    return total
