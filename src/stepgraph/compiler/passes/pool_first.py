"""Moves ReLU after the max pool that follows it: the same numbers, over as many fewer pixels as a window has.

    max(relu(x₁), relu(x₂), …) = relu(max(x₁, x₂, …))

Gradients agree too. If the maximum is positive, both orders pass the gradient to the same pixel; otherwise ReLU's
derivative is 0 in either. The old operators stay in the program for parts that need the result between the two
layers; nothing else reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import call, fake, replace_uses, set_fake
from stepgraph.system import torch_private

aten = torch.ops.aten
POOL, POOL_GRADIENT = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
RELU, RELU_GRADIENT = aten.relu.default, aten.threshold_backward.default


def pool_first(graph: fx.Graph) -> None:
    """Pools before ReLU if only a max pool reads the ReLU, and sums bias gradients before they are scattered."""
    for node in list(graph.nodes):
        if node.target is POOL and node.args[0].target is RELU:
            _exchange(node.args[0], node)
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default and node.args[0].target is POOL_GRADIENT:
            _sum_pooled(node)


def _exchange(relu: fx.Node, pool: fx.Node) -> None:
    gradients = [node for node in relu.users if node.target is POOL_GRADIENT]
    behind = [user for node in gradients for user in _readers(node)]
    known = all(node.target is RELU_GRADIENT for node in behind) and len(behind) == len(gradients)
    if not known or set(_readers(relu)) != {pool, *gradients, *behind}:
        return
    results = {user.args[1]: user for user in pool.users}
    pooled = _call(pool, POOL, (relu.args[0], *pool.args[1:]), after=pool)
    maxima, places = (_call(pool, operator.getitem, (pooled, index), after=pooled) for index in (0, 1))
    result = _call(relu, RELU, (maxima,), after=maxima)
    for gradient in gradients:
        _exchange_gradients(gradient, relu.args[0], result, places)
    replace_uses(results[0], result)


def _exchange_gradients(old: fx.Node, source: Any, result: fx.Node, places: fx.Node) -> None:
    """First the gradient of ReLU, then that of the pool."""
    (turned,) = _readers(old)
    masked = _call(turned, RELU_GRADIENT, (old.args[0], result, turned.args[2]), after=old)
    spread = _call(old, POOL_GRADIENT, (masked, source, *old.args[2:-1], places), after=masked)
    replace_uses(turned, spread)


def _sum_pooled(node: fx.Node) -> None:
    """A pool's gradient writes each number to one pixel, so summing before or after is the same."""
    spread, mask = node.args[0], node.args[-1]
    assert isinstance(spread, fx.Node) and isinstance(mask, list)
    biases = [user for user in node.users if user.args[1] == 2]
    if mask[2] and biases:
        total = _call(node, aten.sum.dim_IntList, (spread.args[0], [0, 2, 3]), after=spread)
        replace_uses(biases[0], total)
        node.graph.erase_node(biases[0])
        node.update_arg(len(node.args) - 1, [*mask[:2], False])
        set_fake(node, (*fake(node)[:2], None))


def has_separate_windows(
    x: fx.Node,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> bool:
    """Whether no pixel is in two windows of a pool, and every window is full."""
    plain = not any(padding) and all(rate == 1 for rate in dilation) and not ceil
    return plain and list(stride or window) == list(window) and fake(x).ndim == 4


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a result, except for those parts of a program that return it, as it is or in float32."""
    return [user for user in node.users if not _is_returned(user)]


def _is_returned(user: fx.Node) -> bool:
    converted = user.target is torch_private.to_copy.default and all(one.op == "output" for one in user.users)
    return user.op == "output" or converted


def _call(like: fx.Node, target: Any, arguments: tuple[Any, ...], after: fx.Node) -> fx.Node:
    with like.graph.inserting_after(after):
        return call(like, target, arguments)
