"""Max pools of images whose windows overlap, channels last, in fused steps.

PyTorch's compiler computes the gradient of such a pool pixel by pixel, with divisions to find the windows that a pixel
is in; a GPU takes several times longer for that than for reading and writing. Here one program computes a row of
pixels, whose windows it finds once, and a window remembers its maximum as a position inside it, in one byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.passes.pool_first import POOL, POOL_GRADIENT, has_separate_windows
from stepgraph.compiler.program import fake
from stepgraph.compiler.triton_launch import run_on

Array = torch.Tensor
MOST = 255  # positions in a window that a byte can tell apart


def pool_by_rows(graph: fx.Graph) -> None:
    """Replaces max pools whose windows overlap, with their gradients, where there are kernels for them."""
    for node in graph.find_nodes(op="call_function", target=POOL):
        results = {user.args[1]: user for user in node.users if user.target is getitem}
        gradients = set(results[1].users) if 1 in results else set()
        if gradients and all(one.target is POOL_GRADIENT for one in gradients) and _fits(*node.args):
            node.target = pooled
            for one in gradients:
                g, x, *settings, _, places = one.args
                one.target, one.args = pool_gradient, (g, places, list(fake(x).shape), *settings)


def _fits(
    x: fx.Node,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> bool:
    source = fake(x)
    known = source.ndim == 4 and source.is_contiguous(memory_format=torch.channels_last) and source.shape[1] > 1
    plain = all(rate == 1 for rate in dilation) and source.is_floating_point() and source.itemsize <= 4
    overlap = not has_separate_windows(x, window, stride, padding, dilation, ceil)
    return known and plain and overlap and window[0] * window[-1] <= MOST and run_on(source.device)


def pooled(x: Array, window: Sequence[int], *settings: Any) -> tuple[Array, Array]:
    """The maxima of all windows, and their positions in the windows."""
    from stepgraph.compiler.kernels.max_pool_kernels import max_pool

    sizes, strides, padding, hangs = _sizes(window, *settings)
    extents = [_count(x.shape[2 + axis], sizes[axis], strides[axis], padding[axis], hangs) for axis in (0, 1)]
    found: tuple[Array, Array] = max_pool(x, extents, sizes, strides, padding)
    return found


def pool_gradient(g: Array, places: Array, shape: Sequence[int], window: Sequence[int], *settings: Any) -> Array:
    """The gradient of the source, which has this shape."""
    from stepgraph.compiler.kernels.max_pool_kernels import max_pool_gradient

    sizes, strides, padding, _ = _sizes(window, *settings)
    found: Array = max_pool_gradient(g, places, list(shape), sizes, strides, padding)
    return found


def _sizes(
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    _dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> tuple[list[int], list[int], list[int], bool]:
    """Sizes of windows, strides and padding, as pairs, and whether the last windows may hang over the border."""
    sizes, strides, margins = ([one[0], one[-1]] for one in (window, stride or window, padding))
    return sizes, strides, margins, ceil


def _count(extent: int, size: int, stride: int, padding: int, hangs: bool) -> int:
    """How many windows fit along an axis, as PyTorch counts: none begins behind the border."""
    room = extent + 2 * padding - size
    count = (-(-room // stride) if hangs else room // stride) + 1
    return count - (hangs and (count - 1) * stride >= extent + padding)
