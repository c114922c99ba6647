"""Other ways to multiply two matrices: BLAS has a kernel for each orientation of each operand, not all equally good.

A fully connected layer multiplies by its transposed weights and, for their gradient, by a transposed source. A copy in
the other orientation costs little beside the product.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import fake
from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
ON_ARM = platform.machine() == "aarch64"


def of_left_copied(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`a b` with the rows of `a` in one piece."""
    return torch.mm(a.contiguous(), b, out=out)


def of_right_copied(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`a b` with the rows of `b` in one piece."""
    return torch.mm(a, b.contiguous(), out=out)


def turned(a: Array, b: Array) -> Array:
    """`(bᵀ aᵀ)ᵀ`."""
    return torch.mm(b.t(), a.t()).t().contiguous()


def sum_of_right_copied(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`c + a b` with the rows of `b` in one piece."""
    return torch.addmm(c, a, b.contiguous(), out=out)


def added_after(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`a b`, and then `c` in place: PyTorch would write `c` into every row first, and the product onto it."""
    return torch.mm(a, b, out=out).add_(c)


def turned_sum(c: Array, a: Array, b: Array) -> Array:
    """`(bᵀ aᵀ)ᵀ + c`."""
    return torch.mm(b.t(), a.t()).t().contiguous().add_(c)


def sum_by_convolution(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`c + a b` as a convolution of an image one pixel wide with one tap, which PyTorch leaves to BLAS.

    PyTorch's own sum by transposed weights goes to oneDNN on ARM, whose threads and BLAS's get in each other's way.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    image, weights = a.view(1, rows, 1, inner).permute(0, 3, 1, 2), b.t().view(columns, inner, 1, 1)
    settings = weights, [1, 1], c, [1, 1], [0, 0]
    if out is None:
        return torch_private.slow_convolution.default(image, *settings).permute(0, 2, 3, 1).view(rows, columns)
    torch_private.slow_convolution.output(image, *settings, output=out.view(1, rows, 1, columns).permute(0, 3, 1, 2))
    return out


PRODUCTS: dict[str, Callable[..., Array]] = {
    "pytorch": aten.mm.default,
    "left copied": of_left_copied,
    "right copied": of_right_copied,
    "turned": turned,
}
SUMS: dict[str, Callable[..., Array]] = {
    "pytorch": aten.addmm.default,
    **({"convolution": sum_by_convolution} if ON_ARM else {"added after": added_after}),
    "right copied": sum_of_right_copied,
    "turned": turned_sum,
}


def fits(node: fx.Node) -> bool:
    """Whether an operand is turned at all, and nothing is scaled."""
    operands: Any = node.args[-2:]
    a, b = (fake(one) for one in operands)
    return not node.kwargs and not (a.is_contiguous() and b.is_contiguous())


def gain(arguments: Sequence[Array]) -> float:
    """The share of PyTorch's time that another sum must stay below: they differ by little, and do so reliably.

    Where PyTorch takes oneDNN, its neighbours in a step get slower too, which does not show in a sum alone.
    """
    _, a, b = arguments
    return 1.05 if ON_ARM and a.is_contiguous() and b.t().is_contiguous() else 0.97
