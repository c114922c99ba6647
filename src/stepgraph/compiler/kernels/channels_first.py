"""Implementations of a convolution and its gradients on the CPU for images with channels first in memory.

An implementation takes the arguments of PyTorch's own operator. To add one, add a function and an entry in `FORWARD`,
`DATA` or `WEIGHTS`; the first there is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepgraph.compiler.kernels.measure import Implementation
from stepgraph.compiler.kernels.patches import at_once, patches, portions, products_with, rows_at_once
from stepgraph.system.torch_private import nnpack_convolution, slow_convolution_gradient

aten = torch.ops.aten
Array = torch.Tensor


# Forward: functions of (x, weights, biases, stride, padding)


def pytorch(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """`w * x + b`, with PyTorch's operator."""
    return aten.convolution(x, w, b, stride, padding, [1, 1], False, [0, 0], 1)


def nnpack(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With NNPACK: Winograd and Fourier transforms, which need fewer multiplications."""
    return nnpack_convolution(x, w, b, padding, stride)


def _gemm(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    outputs, _, height, width = w.shape
    flat = w.permute(2, 3, 1, 0).reshape(-1, outputs)
    found = None
    for start, images in portions(x, at_once(x, w, stride, padding)):
        rows, (n, *extents) = patches(images, height, width, stride, padding)
        y = (rows @ flat if b is None else torch.addmm(b, rows, flat)).view(n, *extents, outputs).permute(0, 3, 1, 2)
        found = x.new_empty(len(x), outputs, *extents) if found is None else found
        found[start : start + n] = y
        del rows, y  # before the next ones are allocated
    assert found is not None
    return found


# Gradient of the source: functions of (gradient, the source's shape, weights, stride, padding)


def data_pytorch(g: Array, size: Sequence[int], w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With PyTorch's operator."""
    mask = [True, False, False]
    return aten.convolution_backward(g, _shaped(g, size), w, None, stride, padding, [1, 1], False, [0, 0], 1, mask)[0]


def data_native(g: Array, size: Sequence[int], w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With PyTorch's own products over patches, whatever library it would use otherwise."""
    mask, kernel = [True, False, False], w.shape[2:]
    return slow_convolution_gradient.output_mask(g.contiguous(), _shaped(g, size), w, kernel, stride, padding, mask)[0]


def data_flipped(g: Array, size: Sequence[int], w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With stride 1, the gradient is a convolution with the flipped kernel."""
    turned = w.flip(2, 3).transpose(0, 1).contiguous()
    rest = [size - 1 - added for size, added in zip(w.shape[2:], padding, strict=True)]
    return nnpack_convolution(g.contiguous(), turned, None, rest, [1, 1])


def _shaped(g: Array, size: Sequence[int]) -> Array:
    """A placeholder for a source of which only the shape is read; it takes almost no memory."""
    return g.new_empty(1).expand(*size)


# Gradient of the weights: functions of (gradient, x, weights, stride, padding)


def weights_pytorch(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With PyTorch's operator."""
    mask = [False, True, False]
    return aten.convolution_backward(g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, mask)[1]


def _weights_gemm(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    inputs = w.shape[1]
    total = products_with(g, x, w, stride, padding)
    for some in total.split(rows_at_once(w)):  # channels first, row by row in place
        some.copy_(some.view(len(some), -1, inputs).transpose(1, 2).reshape(len(some), -1))
    return total.view(w.shape)


FORWARD: dict[str, Implementation] = {"pytorch": pytorch, "nnpack": nnpack, "gemm": _gemm}
DATA: dict[str, Implementation] = {"pytorch": data_pytorch, "native": data_native, "flipped": data_flipped}
WEIGHTS: dict[str, Implementation] = {"pytorch": weights_pytorch, "gemm": _weights_gemm}
