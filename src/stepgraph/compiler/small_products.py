"""Small matrix products as sums, so that PyTorch's compiler can fuse them with their neighbors.

Calling a matrix library takes some microseconds at any size: most of the step time of a tiny network.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import fake, inherit

aten = torch.ops.aten
Array = torch.Tensor
MOST = 1 << 14  # multiplications up to which a plain loop is faster than the call
NARROW = 16  # columns or terms
ROW = 1024  # numbers that a kernel of PyTorch's compiler sums in one go


def spell_out_small_products(graph: fx.Graph) -> None:
    """Replaces `a b` and `c + a b` by `Σₖ aᵢₖ bₖⱼ` if there are few terms."""
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
            inherit(total, node)
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _terms(node: fx.Node) -> int:
    operands: Any = node.args[-2:]
    a, b = (fake(one) for one in operands)
    return math.prod(a.shape) * b.shape[1]


def spell_out_narrow_products(graph: fx.Graph) -> None:
    """Replaces `a b` of few terms, and `a b` and `c + a b` of few columns, by sums, for any number of rows.

    Both occur in the last layer of a classifier. cuBLAS pads its tiles with zeros there and writes what the next
    kernel reads again.
    """
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:
            a, b = (fake(one) for one in node.args[-2:])
            if a.dtype is not torch.float32:
                continue
            if b.shape[1] <= NARROW and a.shape[1] <= ROW and a.stride(1) == 1:
                node.target = by_columns
            elif a.shape[1] <= NARROW and node.target is aten.mm.default:
                node.target = by_terms


def by_terms(a: Array, b: Array) -> Array:
    """Term by term: a sum over an axis would be a loop that cannot be fused."""
    return functools.reduce(torch.add, (a[:, k, None] * b[k] for k in range(len(b))))


def by_columns(*given: Array) -> Array:
    """Column by column, in one pass over `a`."""
    *added, a, b = given
    columns = torch.stack([(a * b[:, j]).sum(1) for j in range(b.shape[1])], 1)
    return functools.reduce(torch.add, added, columns)
