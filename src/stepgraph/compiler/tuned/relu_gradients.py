"""ReLU gradients in fused steps on a GPU, where memory traffic determines the time.

    d = where(relu(x) <= 0, 0, g)

After a batch normalization, whose own gradient reads its source anyway, ReLU's sign is recomputed from that
source instead of being read. If several operators read `d`, as at the end of a block with a shortcut, it is written
once instead of being recomputed from its three operands by each of them.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.pooling import RELU, RELU_GRADIENT
from stepgraph.compiler.program import fake, inherit
from stepgraph.compiler.tuned.row import Tuned, on_gpu
from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
NORMALIZATION = aten.native_batch_norm.default


def read_less(graph: fx.Graph, *, keep: Any) -> None:
    """Changes ReLU gradients where that saves memory traffic.

    `keep` is an operator of an array and its strides that forces a compiler to write the array.
    """
    for node in list(graph.nodes):
        if node.target is not RELU_GRADIENT or node.args[2] != 0:
            continue
        g, result, _ = cast(Any, node.args)
        normalization = _normalization(result)
        if len(node.users) > 1:
            _write_once(node, keep)
        elif normalization is not None and g.target is not aten.add.Tensor:  # a sum reads enough already
            x, w, b, *_ = normalization.args
            mean, deviation = (_result(normalization, index) for index in (1, 2))
            node.target, node.args = mask_again, (g, x, w, b, mean, deviation)


def mask_again(g: Array, x: Array, w: Array, b: Array, mean: Array, inverse_deviation: Array) -> Array:
    """`where(normalized x <= 0, 0, g)`; scale and shift are one small array, which is read, not recomputed."""
    scale = inverse_deviation * w
    line = torch.stack([scale, b - mean * scale])[:, :, None, None]
    return torch.where(x * line[0] + line[1] <= 0, 0, g)


def _write_once(node: fx.Node, keep: Any) -> None:
    with node.graph.inserting_after(node):
        kept = node.graph.call_function(keep, (node, list(fake(node).stride())))
    inherit(kept, node)
    node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _normalization(result: fx.Node) -> fx.Node | None:
    """The batch normalization of images that a ReLU follows, with weights and biases."""
    source: Any = result.args[0] if result.target is RELU else None
    if source is None or source.target is not operator.getitem or source.args[0].target is not NORMALIZATION:
        return None
    found = source.args[0]
    x, w, b = found.args[:3]
    return found if w is not None and b is not None and fake(x).ndim == 4 and found.args[5] else None


def _result(node: fx.Node, index: int) -> fx.Node:
    for user in node.users:
        if user.args[1] == index:
            return user
    with node.graph.inserting_after(node):
        found = node.graph.call_function(operator.getitem, (node, index))
    inherit(found, node, fake(node)[index])
    return found


ROW = Tuned(
    name="reduce reads in ReLU gradients",
    hardware="GPUs",
    pattern="ReLU after batch normalization of images, or with several readers of its gradient",
    condition=on_gpu,
    run=lambda graph: read_less(graph, keep=torch_private.inductor().force_stride_order),
)
