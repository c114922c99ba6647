"""Convolutions of images with few channels, such as a network's first, in fused steps in half precision.

cuDNN pads the channels of images to 8, in copies, and most of what it then multiplies is 0. Here a row of a window is
one run of numbers, and rows follow one another without gaps. Small convolutions in float32 that a pool follows belong
to `tuned/small_convolutions.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels.choose_convolution import bias_gradient, separate
from stepgraph.compiler.program import fake, set_fake
from stepgraph.compiler.triton_launch import run_on

aten = torch.ops.aten
Array = torch.Tensor
Pair = Sequence[int]
LAST = torch.channels_last
CONVOLUTION, GRADIENTS = aten.convolution.default, aten.convolution_backward.default
HALVES = (torch.bfloat16, torch.float16)
CHANNELS = 4  # half of what cuDNN pads to
MOST = 1 << 31  # numbers of an image, which are counted in 32 bits


def convolve_few_channels(graph: fx.Graph) -> None:
    """Replaces convolutions of images with few channels, and the gradients of their weights, where kernels exist."""
    for node in list(graph.nodes):
        if node.target is CONVOLUTION and _fits(*node.args):
            _replace(node)
        elif node.target is GRADIENTS:
            _replace_gradient(node)


def _replace(node: fx.Node) -> None:
    """Computes a convolution by our kernel if its result, or all copies that anything reads, have channels last."""
    x, w, b, stride, padding, *_ = cast(Any, node.args)
    copies = [user for user in node.users if _turns(user)]
    turned = bool(copies) and len(copies) == len(node.users)
    if not turned and not _is_last(fake(node)):
        return
    node.target, node.args = convolved, (x, w, b, stride, padding)
    if turned:
        set_fake(node, fake(copies[0]))
        for one in copies:
            one.replace_all_uses_with(node)
            node.graph.erase_node(one)


def _replace_gradient(node: fx.Node) -> None:
    """Computes the gradient of weights by our kernel; PyTorch computes that of the images."""
    g, x, w, _, *settings, mask = cast(Any, node.args)
    if mask[1] and _fits(x, w, None, *settings):
        ours = convolved_gradient, (g, x, list(fake(w).shape), *settings[:2])
        separate(node, {0: (_of_source, (g, x, w, None, *settings)), 1: ours, 2: (bias_gradient, (g,))})


def _turns(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.kwargs.get("memory_format") is LAST


def _fits(
    x: Any, w: Any, b: Any, stride: Pair, padding: Pair, dilation: Pair, transposed: bool, _: Any, groups: int
) -> bool:
    source, weights = fake(x), fake(w)
    plain = not transposed and groups == 1 and all(rate == 1 for rate in dilation) and source.ndim == 4
    plain = plain and len(stride) == len(padding) == 2 and source.numel() > 0
    if not plain or source.shape[1] > CHANNELS or not _is_last(source):
        return False
    types = {array.dtype for array in (source, weights, *([] if b is None else [fake(b)]))}
    extents = zip(source.shape[2:], weights.shape[2:], stride, padding, strict=True)
    pixels = [(extent + 2 * added - size) // step + 1 for extent, size, step, added in extents]
    counted = max(source[0].numel(), weights.shape[0] * pixels[0] * pixels[1]) < MOST
    return len(types) == 1 and types <= {*HALVES} and counted and run_on(source.device)


def _is_last(images: Array) -> bool:
    return images.is_contiguous(memory_format=LAST)


def convolved(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Array:
    """The convolution, with its channels last in memory."""
    from stepgraph.compiler.kernels.few_channels_kernels import arranged, convolve_few, windows

    sizes = list(w.shape[2:]), list(stride), list(padding)
    found: Array = convolve_few(x, arranged(w, windows(list(x.shape), *sizes)), b, len(w), *sizes)
    return found


def convolved_gradient(g: Array, x: Array, shape: Pair, stride: Pair, padding: Pair) -> Array:
    """The gradient of weights of this shape, with their channels last in memory."""
    from stepgraph.compiler.kernels.few_channels_kernels import gathered, weight_gradient_of_few, windows

    sizes = list(shape[2:]), list(stride), list(padding)
    sums = weight_gradient_of_few(g.contiguous(memory_format=LAST), x, *sizes)
    found: Array = gathered(sums, list(shape), windows(list(x.shape), *sizes)).to(x.dtype)
    return found.contiguous(memory_format=LAST)


def _of_source(*arguments: Any) -> Array:
    return GRADIENTS(*arguments, [True, False, False])[0]
