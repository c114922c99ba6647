"""Convolutions with few numbers per window, and the max pool behind them, as sums.

The first convolution over gray images multiplies nine numbers per window: a matrix unit would be idle while patches
are written and read. With the pool, only maxima are written, and only their pixels count in the gradients. This is for
float32; `kernels/few_channels.py` is for half precision, where matrix units are fast enough.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.passes.pool_first import POOL, POOL_GRADIENT, RELU, RELU_GRADIENT, has_separate_windows
from stepgraph.compiler.program import call, fake, inherit, remove_dead
from stepgraph.compiler.tuned.row import Tuned, on_gpu
from stepgraph.compiler.tuned.small_convolution_sums import convolve_and_pool, pooled_gradients

aten = torch.ops.aten
Pair = Sequence[int]
MOST = 16  # products of one window
CHANNELS = 4
PIXELS = 4  # of a pool's window


def expand_small_convolutions(graph: fx.Graph) -> None:
    """Replaces convolutions with small windows, the pool that follows them, and the gradients of both by sums.

    A convolution without a pool stays: whatever reads its result would compute the sums again.
    """
    for node in list(graph.nodes):
        if _is_small(node):
            images = _reordered(node)
            for pool in [user for user in images.users if user.target is POOL]:
                _join_pool(node, images, pool)


def _is_small(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    x, w, *_, dilation, transposed, _, groups = cast(Any, node.args)
    source, weights = fake(x), fake(w)
    plain = not transposed and groups == 1 and all(rate == 1 for rate in dilation) and source.ndim == 4
    small = source.shape[1] <= CHANNELS and weights[0].numel() <= MOST
    return plain and small and source.dtype == weights.dtype == torch.float32


def _reordered(convolution: fx.Node) -> fx.Node:
    """The result with channels last in memory, which is the order of the sums."""
    user, *others = convolution.users
    turns = user.target is aten.clone.default and user.kwargs.get("memory_format") is torch.channels_last
    return user if turns and not others else convolution


def _join_pool(convolution: fx.Node, images: fx.Node, pool: fx.Node) -> None:
    """One operator for both, and one for the gradients, if nothing reads the result in between."""
    window, *settings = cast(Any, pool.args[1:])
    spread = [user for user in images.users if user is not pool]
    gradients = [user for one in spread for user in one.users]
    results = {user.args[1]: user for user in pool.users}
    known = all(one.target is POOL_GRADIENT for one in spread) and all(map(_is_of_weights, gradients))
    known = known and (1 not in results or set(results[1].users) <= set(spread))
    if not known or math.prod(window) > PIXELS or not has_separate_windows(images, window, *settings):
        return
    relu = _relu_between(results[0], spread)
    for one in gradients:
        _join_gradients(one, results[1], window, rectified=relu is not None)
    pool.target, pool.args = convolve_and_pool, (*convolution.args[:5], window, relu is not None)
    for node in dict.fromkeys((*spread, images, convolution)):
        node.graph.erase_node(node)
    if relu is not None:
        relu.replace_all_uses_with(results[0])
        remove_dead(relu.graph)


def _relu_between(maxima: fx.Node, spread: Sequence[fx.Node]) -> fx.Node | None:
    """The ReLU that alone reads a pool's maxima, if all their gradients come from it and go to parameters."""
    relu = next(iter(maxima.users), None)
    if relu is None or relu.target is not RELU or len(maxima.users) > 1:
        return None
    masked = {cast(fx.Node, one.args[0]) for one in spread}
    ours = all(one.target is RELU_GRADIENT and one.args[1:] == (relu, 0) for one in masked)
    others = {user for one in masked for user in one.users} - set(spread)
    return relu if ours and all(map(_is_of_biases, others)) else None


def _join_gradients(old: fx.Node, places: fx.Node, window: Pair, *, rectified: bool) -> None:
    """Replaces the gradient of the weights, and the sums that are the gradient of the biases."""
    spread, x, w, *rest = cast(Any, old.args)
    stride, padding = rest[1:3]
    g = spread.args[0]
    sums = [user for user in g.users if _is_of_biases(user)]
    with old.graph.inserting_before(sums[0] if sums else old):
        given = g.args[0] if rectified else g
        both = call(old, pooled_gradients, (given, places, x, w, stride, padding, window))
        of_weights, of_biases = (call(old, operator.getitem, (both, index)) for index in (0, 1))
    for one in list(old.users):
        _replace(one, of_weights)
    for one in sums:
        _replace(one, of_biases)
    old.graph.erase_node(old)


def _replace(old: fx.Node, new: fx.Node) -> None:
    inherit(new, old)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _is_of_weights(node: fx.Node) -> bool:
    """Whether this is only the gradient of a convolution's weights."""
    return node.target is aten.convolution_backward.default and cast(Any, node.args[-1]) == [False, True, False]


def _is_of_biases(node: fx.Node) -> bool:
    return node.target is aten.sum.dim_IntList and node.args[1:] == ([0, 2, 3],)


ROW = Tuned(
    name="expand small convolutions",
    hardware="GPUs; custom kernels on NVIDIA Ampere and later",
    pattern=f"convolutions with at most {MOST} products per window before a max pool of at most {PIXELS} pixels",
    gains={"cnn": 1.45},
    results="rent-h200",
    condition=on_gpu,
    run=expand_small_convolutions,
)
