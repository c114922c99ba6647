"""Implementations of a convolution and its gradients on the CPU for images with channels last in memory.

In this layout a matrix product over patches needs no reordering: a row of patches is one window, a row of the
result is a pixel. Implementations that support only channels first convert images before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import channels_first as first
from stepgraph.compiler.kernels.measure import Implementation
from stepgraph.compiler.kernels.patches import at_once, extents, patches, portions, products_with, taps
from stepgraph.compiler.program import fake, inherit, set_fake

aten = torch.ops.aten
Array = torch.Tensor
Pair = Sequence[int]
LAST = torch.channels_last


def is_last(x: Array) -> bool:
    """Whether images have channels last and not also first: with one channel both layouts are the same."""
    return x.ndim == 4 and x.is_contiguous(memory_format=LAST) and not x.is_contiguous()


def turn_gradient(node: fx.Node) -> None:
    """Gives the gradient of a pool or ReLU the layout of its images; PyTorch would read the two in different orders."""
    g, x, *_ = cast(Any, node.args)
    if is_last(fake(x)) and not is_last(fake(g)):
        with node.graph.inserting_before(node):
            turned = node.graph.call_function(aten.clone.default, (g,), {"memory_format": LAST})
        inherit(turned, node, fake(g).contiguous(memory_format=LAST))
        node.replace_input_with(g, turned)
        set_fake(node, fake(node).contiguous(memory_format=LAST))


def _pytorch(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Array:
    return first.pytorch(x, w, b, stride, padding).contiguous(memory_format=LAST)


def _nnpack(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Array:
    return first.nnpack(x.contiguous(), w.contiguous(), b, stride, padding).contiguous(memory_format=LAST)


def _gemm(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Array:
    outputs, _, height, width = w.shape
    flat = w.permute(2, 3, 1, 0).reshape(-1, outputs)
    y = x.new_empty(len(x), *extents(x, w, stride, padding), outputs)
    for start, images in portions(x, at_once(x, w, stride, padding)):
        rows, _ = patches(images, height, width, stride, padding)
        pixels = y[start : start + len(images)].view(-1, outputs)
        torch.mm(rows, flat, out=pixels) if b is None else torch.addmm(b, rows, flat, out=pixels)
        del rows  # before the next ones are allocated
    return y.permute(0, 3, 1, 2)


def _taps(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Array:
    outputs, flat = len(w), w.flatten(1).t().contiguous()
    y = x.new_empty(len(x), *extents(x, w, stride, padding), outputs)
    for start, images in portions(x, at_once(x, w, stride, padding)):
        rows, pixels = taps(images, w, stride, padding).t(), y[start : start + len(images)].view(-1, outputs)
        torch.mm(rows, flat, out=pixels) if b is None else torch.addmm(b, rows, flat, out=pixels)
        del rows  # before the next ones are allocated
    return y.permute(0, 3, 1, 2)


def _data_pytorch(g: Array, size: Pair, w: Array, stride: Pair, padding: Pair) -> Array:
    source = torch.empty(tuple(size), dtype=g.dtype, device=g.device, memory_format=LAST)
    found = aten.convolution_backward(
        g, source, w, None, stride, padding, [1, 1], False, [0, 0], 1, [True, False, False]
    )
    return found[0].contiguous(memory_format=LAST)


def _data_native(g: Array, size: Pair, w: Array, stride: Pair, padding: Pair) -> Array:
    return first.data_native(g, size, w.contiguous(), stride, padding).contiguous(memory_format=LAST)


def _data_flipped(g: Array, size: Pair, w: Array, stride: Pair, padding: Pair) -> Array:
    return first.data_flipped(g, size, w, stride, padding).contiguous(memory_format=LAST)


def _weights_gemm(g: Array, x: Array, w: Array, stride: Pair, padding: Pair) -> Array:
    outputs, inputs, height, width = w.shape
    return products_with(g, x, w, stride, padding).view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _weights_taps(g: Array, x: Array, w: Array, stride: Pair, padding: Pair) -> Array:
    total = x.new_zeros(w[0].numel(), len(w))
    for start, images in portions(x, at_once(x, w, stride, padding)):
        pixels = g[start : start + len(images)].permute(0, 2, 3, 1).reshape(-1, len(w))
        total.addmm_(taps(images, w, stride, padding), pixels)
    return total.t().reshape(w.shape).contiguous(memory_format=LAST)


FORWARD: dict[str, Implementation] = {"pytorch": _pytorch, "nnpack": _nnpack, "gemm": _gemm, "taps": _taps}
DATA: dict[str, Implementation] = {"pytorch": _data_pytorch, "native": _data_native, "flipped": _data_flipped}
WEIGHTS: dict[str, Implementation] = {
    "pytorch": first.weights_pytorch,
    "gemm": _weights_gemm,
    "taps": _weights_taps,
}
