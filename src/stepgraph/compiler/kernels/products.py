"""Alternative matrix products: BLAS has a kernel for each orientation of each operand, not all equally fast.

A fully connected layer multiplies by its transposed weights and, for their gradient, by a transposed source. A copy in
the other orientation costs little compared with the product.
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
    """`a b` with `a` contiguous."""
    return torch.mm(a.contiguous(), b, out=out)


def of_right_copied(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`a b` with `b` contiguous."""
    return torch.mm(a, b.contiguous(), out=out)


def turned(a: Array, b: Array) -> Array:
    """`(bᵀ aᵀ)ᵀ`."""
    return torch.mm(b.t(), a.t()).t().contiguous()


def sum_of_right_copied(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`c + a b` with `b` contiguous."""
    return torch.addmm(c, a, b.contiguous(), out=out)


def added_after(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`a b`, then adds `c` in place: PyTorch would first write `c` into every row and then add the product."""
    return torch.mm(a, b, out=out).add_(c)


def turned_sum(c: Array, a: Array, b: Array) -> Array:
    """`(bᵀ aᵀ)ᵀ + c`."""
    return torch.mm(b.t(), a.t()).t().contiguous().add_(c)


def sum_by_convolution(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`c + a b` as a convolution of an image one pixel wide with one tap, which PyTorch passes to BLAS.

    On ARM, PyTorch's own sum with transposed weights uses oneDNN, whose threads compete with those of BLAS.
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
    """Whether an operand is transposed, and nothing is scaled."""
    operands: Any = node.args[-2:]
    a, b = (fake(one) for one in operands)
    return not node.kwargs and not (a.is_contiguous() and b.is_contiguous())


def gain(arguments: Sequence[Array]) -> float:
    """The share of PyTorch's time that an alternative must stay below: the difference is small but reliable.

    If PyTorch uses oneDNN, neighboring operators in a step also get slower, which measuring a sum alone does not show.
    """
    _, a, b = arguments
    return 1.05 if ON_ARM and a.is_contiguous() and b.t().is_contiguous() else 0.97
