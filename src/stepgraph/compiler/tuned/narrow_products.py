"""Matrix products of few columns or few terms as sums, which PyTorch's compiler can fuse with their neighbors."""

from __future__ import annotations

import functools

import torch
from torch import fx

from stepgraph.compiler.program import fake
from stepgraph.compiler.tuned.row import Tuned, on_gpu

aten = torch.ops.aten
Array = torch.Tensor
NARROW = 16  # columns or terms
LONG = 1024  # numbers that a kernel of PyTorch's compiler sums in one go


def expand_narrow_products(graph: fx.Graph) -> None:
    """Replaces `a b` of few terms, and `a b` and `c + a b` of few columns, by sums, for any number of rows.

    Both occur in the last layer of a classifier. cuBLAS pads its tiles with zeros there and writes what the next
    kernel reads again.
    """
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:
            a, b = (fake(one) for one in node.args[-2:])
            if a.dtype is not torch.float32:
                continue
            if b.shape[1] <= NARROW and a.shape[1] <= LONG and a.stride(1) == 1:
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


ROW = Tuned(
    name="expand narrow products",
    hardware="GPUs",
    pattern=f"matrix products in float32 of at most {NARROW} columns or terms",
    gains={"demo": 1.08, "mlp": 1.04},
    results="rent-h200",
    condition=on_gpu,
    run=expand_narrow_products,
)
