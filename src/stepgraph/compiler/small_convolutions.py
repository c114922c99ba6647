"""Convolutions of few numbers a window written as sums, so that PyTorch's compiler can put them into other kernels.

The first convolution over gray images multiplies nine numbers a window: a matrix unit would be idle while patches are
written and read. With a max pool behind, only maxima are written, and only their pixels count in the gradient of the
weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from stepgraph.compiler.kernels import channels_first
from stepgraph.compiler.kernels.convolution import applies, separate
from stepgraph.compiler.kernels.patches import extents
from stepgraph.compiler.pooling import POOL, POOL_GRADIENT, has_separate_windows

aten = torch.ops.aten
Array = torch.Tensor
Pair = Sequence[int]
MOST = 16  # products of one window
PIXELS = 4  # of a pool's window


def spell_out_small_convolutions(graph: fx.Graph) -> None:
    """Replaces convolutions of small windows by sums; with a pool behind, also the gradient of their weights."""
    ways = channels_first.FORWARD.values()
    for node in list(graph.nodes):
        settings = node.args[5:7] + node.args[8:9] if node.target is aten.convolution.default else ()
        if (settings or node.target in ways) and _is_small(*node.args[:2], *settings):
            node.target, node.args = convolve, node.args[:5]
            _drop_reordering(node)
    for node in list(graph.nodes):
        if node.target is POOL and node.args[0].target is convolve:
            _join_pool(node.args[0], node)


def _is_small(x: Any, w: Any, dilation: Pair = (1, 1), transposed: bool = False, groups: int = 1) -> bool:
    source, weights = x.meta["val"], w.meta["val"]
    return applies(source, weights, dilation, transposed, groups) and weights[0].numel() <= MOST


def _drop_reordering(convolution: fx.Node) -> None:
    """Sums have channels last in memory already."""
    for user in list(convolution.users):
        if user.target is aten.clone.default and user.kwargs.get("memory_format") is torch.channels_last:
            user.replace_all_uses_with(convolution)
            user.graph.erase_node(user)


def _join_pool(convolution: fx.Node, pool: fx.Node) -> None:
    """One operator for both, and one for the gradient of the weights, where nothing reads what lies between."""
    window, *settings = cast(Any, pool.args[1:])
    spread = [user for user in convolution.users if user is not pool]
    gradients = [user for one in spread for user in one.users]
    results = {user.args[1]: user for user in pool.users}
    known = all(one.target is POOL_GRADIENT for one in spread) and all(map(_is_of_weights, gradients))
    known = known and (1 not in results or set(results[1].users) <= set(spread))
    if not known or math.prod(window) > PIXELS or not has_separate_windows(convolution, window, *settings):
        return
    for one in gradients:
        g, x, w, *rest = cast(Any, one.args)
        stride, padding = rest[1:3] if one.target is aten.convolution_backward.default else rest
        arguments = (g.args[0], results[1], x, w, stride, padding, window)
        if one.target is aten.convolution_backward.default:
            separate(one, {1: (pooled_weight_gradient, arguments)})
        else:
            one.target, one.args = pooled_weight_gradient, arguments
    pool.target, pool.args = convolve_and_pool, (*convolution.args, window)
    for node in (*spread, convolution):
        node.graph.erase_node(node)


def _is_of_weights(node: fx.Node) -> bool:
    """Whether this is the gradient of a convolution's weights and nothing else."""
    if node.target is aten.convolution_backward.default:
        return cast(Any, node.args[-1]) == [False, True, False]
    return node.target in channels_first.WEIGHTS.values()


def convolve(x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair) -> Array:
    """`y[n, p, o] = b[o] + Σ w[o, tap] x[n, p + tap]`, channels last in memory."""
    taps = _taps(_padded(x, padding), extents(x, w, stride, padding), stride, w)
    return _sum(taps, _table(w), b).permute(0, 3, 1, 2)


def convolve_and_pool(
    x: Array, w: Array, b: Array | None, stride: Pair, padding: Pair, window: Pair
) -> tuple[Array, Array]:
    """Maxima of a pool's windows, which do not overlap, and which pixel of its window each is: 0, 1, …"""
    padded, table, (down, right) = _padded(x, padding), _table(w), stride
    pooled = [extent // size for extent, size in zip(extents(x, w, stride, padding), window, strict=True)]
    steps = down * window[0], right * window[1]
    most, place = None, None
    for number, (i, j) in enumerate(itertools.product(range(window[0]), range(window[1]))):
        y = _sum(_taps(padded[:, :, i * down :, j * right :], pooled, steps, w), table, b)
        if most is None or place is None:
            most, place = y, torch.zeros_like(y, dtype=torch.uint8)
        else:
            higher = (y > most) | y.isnan()
            most, place = torch.where(higher, y, most), torch.where(higher, number, place)
    assert most is not None and place is not None
    return most.permute(0, 3, 1, 2), place.permute(0, 3, 1, 2)


def pooled_weight_gradient(
    g: Array, places: Array, x: Array, w: Array, stride: Pair, padding: Pair, window: Pair
) -> Array:
    """`dw[o, tap] = Σ g[n, p, o] x[n, q(n, p, o) + tap]`, where `q` is the pixel that was its window's maximum."""
    padded = _padded(x, padding)
    kind = torch.int32 if padded.numel() < 1 << 31 else torch.int64  # numbers of pixels; narrow ones are quicker
    given, place = g.permute(0, 2, 3, 1), places.permute(0, 2, 3, 1).to(kind)
    n, rows, columns = (torch.arange(extent, device=g.device, dtype=kind) for extent in given.shape[:3])
    down = rows[:, None, None] * window[0] + place // window[1]
    across = columns[:, None] * window[1] + place % window[1]
    image, channel, line, _ = padded.stride()
    first = n[:, None, None, None] * image + down * (stride[0] * line) + across * stride[1]
    flat, sums = padded.view(-1), []
    for c, i, j in itertools.product(*map(range, w.shape[1:])):
        seen = aten._unsafe_index(flat, [first + (c * channel + i * line + j)])
        sums.append((given * seen).sum((0, 1, 2)))
    return torch.stack(sums, 1).view(w.shape)


def _padded(x: Array, padding: Pair) -> Array:
    (top, left) = padding
    return F.pad(x, (left, left, top, top)).contiguous()


def _table(w: Array) -> Array:
    """`[taps, outputs]`: what neighbouring threads read lies side by side."""
    return w.flatten(1).t().contiguous()


def _sum(taps: Iterator[Array], table: Array, b: Array | None) -> Array:
    """`[n, *pixels, outputs]`."""
    outputs, total = table.shape[1], None
    for number, seen in enumerate(taps):
        product = seen * table.as_strided((outputs,), (1,), number * outputs)
        total = product if total is None else total + product
    assert total is not None
    return total if b is None else total + b


def _taps(padded: Array, pixels: Pair, stride: Pair, w: Array) -> Iterator[Array]:
    """What each number of a window meets, `[n, *pixels, 1]`, in the order of the weights.

    As strides they make the compiler write padded images once, instead of asking at each tap what is outside.
    """
    image, channel, line, _ = padded.stride()
    size, strides = (len(padded), *pixels, 1), (image, stride[0] * line, stride[1], 1)
    for c, i, j in itertools.product(*map(range, w.shape[1:])):
        yield padded.as_strided(size, strides, padded.storage_offset() + c * channel + i * line + j)
