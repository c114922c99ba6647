"""Small matrix products written as sums, so that PyTorch's compiler can put them into one kernel with their neighbours.

Calling a matrix library takes some microseconds, whatever the size: in a step of a tiny network most of the time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
MOST = 1 << 14  # multiplications up to which a plain loop takes less time than the call


def spell_out_small_products(graph: fx.Graph) -> None:
    """Replaces `a b` and `c + a b` by `Σₖ aᵢₖ bₖⱼ`, where there are few terms."""
    for node in list(graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs and _terms(node) <= MOST:
            *added, a, b = node.args
            with graph.inserting_before(node):
                rows = graph.call_function(aten.unsqueeze.default, (a, 2))
                columns = graph.call_function(aten.unsqueeze.default, (b, 0))
                products = graph.call_function(aten.mul.Tensor, (rows, columns))
                total = graph.call_function(aten.sum.dim_IntList, (products, [1]))
                for one in added:
                    total = graph.call_function(aten.add.Tensor, (total, one))
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _terms(node: fx.Node) -> int:
    operands: Any = node.args[-2:]
    a, b = (one.meta["val"] for one in operands)
    return math.prod(a.shape) * b.shape[1]
