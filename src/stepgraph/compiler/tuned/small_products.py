"""Small matrix products as sums, so that PyTorch's compiler can fuse them with their neighbors.

Calling a matrix library takes some microseconds at any size: most of the step time of a tiny network.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import call, fake
from stepgraph.compiler.tuned.row import Tuned, on_cpu

aten = torch.ops.aten
MOST = 1 << 14  # multiplications up to which a plain loop is faster than the call


def expand_small_products(graph: fx.Graph) -> None:
    """Replaces `a b` and `c + a b` by `Σₖ aᵢₖ bₖⱼ` if there are few terms."""
    for node in list(graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs and _terms(node) <= MOST:
            *added, a, b = node.args
            with graph.inserting_before(node):
                rows = call(node, aten.unsqueeze.default, (a, 2))
                columns = call(node, aten.unsqueeze.default, (b, 0))
                products = call(node, aten.mul.Tensor, (rows, columns))
                total = call(node, aten.sum.dim_IntList, (products, [1]))
                for one in added:
                    total = call(node, aten.add.Tensor, (total, one))
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _terms(node: fx.Node) -> int:
    operands: Any = node.args[-2:]
    a, b = (fake(one) for one in operands)
    return math.prod(a.shape) * b.shape[1]


ROW = Tuned(
    name="expand small products",
    hardware="CPUs, fused steps",
    pattern=f"matrix products of at most {MOST:,} multiplications",
    gains={"tiny": 6.1},
    results="rent-cpu-fused",
    condition=on_cpu,
    run=expand_small_products,
)
