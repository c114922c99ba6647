"""ReLU behind the max pool that follows it: the same numbers, over as many fewer pixels as a window has.

    max(relu(x₁), relu(x₂), …) = relu(max(x₁, x₂, …))

Gradients agree too. Where the maximum is positive, both orders hand the gradient to the same pixel; elsewhere ReLU's
derivative is 0 in either. The old operators stay in the program, for parts that ask for what lies between the two
layers; nothing else reads them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
POOL, POOL_GRADIENT = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
RELU, RELU_GRADIENT = aten.relu.default, aten.threshold_backward.default


def pool_first(graph: fx.Graph) -> None:
    """Pools before ReLU where ReLU feeds a max pool alone, and sums bias gradients before they are spread out."""
    for node in list(graph.nodes):
        if node.target is POOL and node.args[0].target is RELU:
            _exchange(node.args[0], node)
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default and node.args[0].target is POOL_GRADIENT:
            _sum_pooled(node)


def _exchange(relu: fx.Node, pool: fx.Node) -> None:
    readers = [node for node in _readers(relu) if node is not pool]
    gradients = [node for node in readers if node.target is POOL_GRADIENT]
    if any(node not in gradients and not _turns(node, gradients) for node in readers):
        return
    results = {user.args[1]: user for user in pool.users}
    pooled = _call(pool, POOL, (relu.args[0], *pool.args[1:]), after=pool)
    maxima, places = (_call(pool, operator.getitem, (pooled, index), after=pooled) for index in (0, 1))
    result = _call(relu, RELU, (maxima,), after=maxima)
    for gradient in gradients:
        _exchange_gradients(gradient, relu.args[0], result, places)
    results[0].replace_all_uses_with(result)


def _exchange_gradients(old: fx.Node, source: Any, result: fx.Node, places: fx.Node) -> None:
    """First of ReLU, then of the pool."""
    (turned,) = _readers(old)
    masked = _call(turned, RELU_GRADIENT, (old.args[0], result, turned.args[2]), after=old)
    spread = _call(old, POOL_GRADIENT, (masked, source, *old.args[2:-1], places), after=masked)
    turned.replace_all_uses_with(spread)


def _turns(node: fx.Node, gradients: list[fx.Node]) -> bool:
    """Whether it is ReLU's gradient, and all that a pool's gradient is for."""
    return node.target is RELU_GRADIENT and node.args[0] in gradients and _readers(node.args[0]) == [node]


def _sum_pooled(node: fx.Node) -> None:
    """A pool's gradient puts each number at one pixel: their sum is the same before."""
    spread, mask = node.args[0], node.args[-1]
    assert isinstance(spread, fx.Node) and isinstance(mask, list)
    biases = [user for user in node.users if user.args[1] == 2]
    if mask[2] and biases:
        total = _call(node, aten.sum.dim_IntList, (spread.args[0], [0, 2, 3]), after=spread)
        biases[0].replace_all_uses_with(total)
        node.graph.erase_node(biases[0])
        node.update_arg(len(node.args) - 1, [*mask[:2], False])
        node.meta = node.meta | {"val": (*node.meta["val"][:2], None)}


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _call(like: fx.Node, target: Any, arguments: tuple[Any, ...], after: fx.Node) -> fx.Node:
    """A new operator of the same layer and phase."""
    with like.graph.inserting_after(after):
        node = like.graph.call_function(target, arguments)
    values: Any = fx.map_arg(arguments, lambda one: one.meta["val"])
    node.meta = {key: value for key, value in like.meta.items() if key == "custom"}
    node.meta["val"] = target(*values)
    return node
