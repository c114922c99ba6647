"""Gradients of ReLU in fused steps on a GPU, where time is what is read from memory and written to it.

    d = where(relu(x) <= 0, 0, g)

Behind a batch normalization, whose own gradient reads its source anyway, ReLU's sign is computed again from that
source instead of being read. Where several operators read `d`, as at the end of a block with a shortcut, it is written
once instead of being made of its three operands by each of them; the sums that the gradient of a batch normalization
needs are taken on the way.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler import tiles
from stepgraph.compiler.pooling import RELU, RELU_GRADIENT

aten = torch.ops.aten
Array = torch.Tensor
NORMALIZATION, NORMALIZATION_GRADIENT = aten.native_batch_norm.default, aten.native_batch_norm_backward.default


def read_less(graph: fx.Graph, *, keep: Any) -> None:
    """Changes gradients of ReLU as far as that saves memory traffic.

    `keep` is an operator of an array and its strides, which makes a compiler write the array.
    """
    for node in list(graph.nodes):
        if node.target is not RELU_GRADIENT or node.args[2] != 0:
            continue
        normalization, is_sum = _normalization(cast(fx.Node, node.args[1])), _is_sum(node.args[0])
        readers = [user for user in node.users if _is_normalized(user, node)]
        if readers and (is_sum or len(node.users) > 1):
            _sum_on_the_way(node, readers[0])
        elif len(node.users) > 1:
            _write_once(node, keep)
        elif normalization is not None and not is_sum:
            x, w, b, *_ = normalization.args
            mean, deviation = (_result(normalization, index) for index in (1, 2))
            node.target, node.args = mask_again, (node.args[0], x, w, b, mean, deviation)


def mask_again(g: Array, x: Array, w: Array, b: Array, mean: Array, inverse_deviation: Array) -> Array:
    """`where(normalized x <= 0, 0, g)`; scale and shift are one small array, which is read and not made anew."""
    scale = inverse_deviation * w
    line = torch.stack([scale, b - mean * scale])[:, :, None, None]
    return torch.where(x * line[0] + line[1] <= 0, 0, g)


def mask_and_sum(g: Array, h: Array | None, y: Array, x: Array, mean: Array) -> tuple[Array, Array]:
    """`d` for the gradient `g + h`, and parts of `[Σ d, Σ d (x - mean)]` by channel, whose sum is asked for."""
    if tiles.fit(x):
        from stepgraph.compiler.tiles.relu import mask_and_sum as in_tiles

        return in_tiles(g, h, y, x, mean)
    d = torch.where(y <= 0, 0, g if h is None else g + h)
    sums = d.sum((0, 2, 3)), (d * (x - mean[:, None, None])).sum((0, 2, 3))
    return d, torch.stack(sums)[None]


def normalization_gradients(
    d: Array, sums: Array, x: Array, w: Array, mean: Array, inverse_deviation: Array
) -> tuple[Array, Array, Array]:
    """Of a batch normalization by its source, scale and shift, from the sums by channel."""
    plain, centered = sums.sum(0)
    count = x.numel() // x.shape[1]
    slope = (centered * inverse_deviation.square() / count)[:, None, None]
    dx = (d - (x - mean[:, None, None]) * slope - (plain / count)[:, None, None]) * (inverse_deviation * w)[
        :, None, None
    ]
    return dx, centered * inverse_deviation, plain


def _sum_on_the_way(node: fx.Node, reader: fx.Node) -> None:
    """Writes the gradient and its sums at once, and goes on from these in the normalization that reads it."""
    (g, y, _), (_, x, w, _, _, mean, deviation, *_) = cast(Any, node.args), cast(Any, reader.args)
    terms = g.args if _is_sum(g) else (g, None)
    with node.graph.inserting_before(node):
        both = node.graph.call_function(mask_and_sum, (*terms, y, x, mean))
        d, sums = (node.graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
    d.meta = dict(node.meta)
    reader.target, reader.args = normalization_gradients, (d, sums, x, w, mean, deviation)
    node.replace_all_uses_with(d)
    node.graph.erase_node(node)


def _write_once(node: fx.Node, keep: Any) -> None:
    with node.graph.inserting_after(node):
        kept = node.graph.call_function(keep, (node, list(node.meta["val"].stride())))
    kept.meta = dict(node.meta)
    node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _is_sum(g: Any) -> bool:
    """Whether this is a sum of two gradients that nothing else reads."""
    plain = g.target is aten.add.Tensor and not g.kwargs and len(g.users) == 1
    return plain and all(isinstance(one, fx.Node) and _kind(one) == _kind(g) for one in g.args)


def _is_normalized(reader: fx.Node, node: fx.Node) -> bool:
    """Whether the reader is the gradient of a batch normalization in training, in a form that tiles compute."""
    if reader.target is not NORMALIZATION_GRADIENT or reader.args[0] is not node or not reader.args[7]:
        return False
    x, w = cast(Any, reader.args[1:3])
    return w is not None and fits(x.meta["val"]) and _kind(x) == _kind(node)


def fits(x: Array) -> bool:
    """Whether tiles compute with images like these."""
    return tiles.fit(x) and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _kind(node: fx.Node) -> Any:
    array = node.meta["val"]
    return array.shape, array.stride(), array.dtype


def _normalization(result: fx.Node) -> fx.Node | None:
    """The batch normalization of images that a ReLU follows, with weights and biases."""
    source: Any = result.args[0] if result.target is RELU else None
    if source is None or source.target is not operator.getitem or source.args[0].target is not NORMALIZATION:
        return None
    found = source.args[0]
    x, w, b = found.args[:3]
    return found if w is not None and b is not None and x.meta["val"].ndim == 4 and found.args[5] else None


def _result(node: fx.Node, index: int) -> fx.Node:
    for user in node.users:
        if user.args[1] == index:
            return user
    with node.graph.inserting_after(node):
        found = node.graph.call_function(operator.getitem, (node, index))
    found.meta = dict(node.meta) | {"val": node.meta["val"][index]}
    return found
