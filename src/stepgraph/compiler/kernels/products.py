"""Other ways to multiply two matrices: BLAS has a kernel for each orientation of each operand, not all equally good.

A fully connected layer multiplies by its transposed weights and, for their gradient, by a transposed source. A copy in
the other orientation costs little beside the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Array = torch.Tensor


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


PRODUCTS: dict[str, Callable[..., Array]] = {
    "pytorch": aten.mm.default,
    "left copied": of_left_copied,
    "right copied": of_right_copied,
    "turned": turned,
}
SUMS: dict[str, Callable[..., Array]] = {
    "pytorch": aten.addmm.default,
    "added after": added_after,
    "right copied": sum_of_right_copied,
    "turned": turned_sum,
}
INTO = (of_left_copied, of_right_copied, added_after, sum_of_right_copied)  # ways that write into given memory


def fits(node: fx.Node) -> bool:
    """Whether an operand is turned at all, and nothing is scaled."""
    operands: Any = node.args[-2:]
    a, b = (one.meta["val"] for one in operands)
    return not node.kwargs and not (a.is_contiguous() and b.is_contiguous())


def _copied(operand: Array) -> int:
    """What is in one piece already is not copied."""
    return 0 if operand.is_contiguous() else operand.nbytes


# Bytes each way needs beside its operands and its result.
SCRATCH: dict[Any, Callable[[Sequence[Array], int], int]] = {
    of_left_copied: lambda operands, _: _copied(operands[-2]),
    of_right_copied: lambda operands, _: _copied(operands[-1]),
    sum_of_right_copied: lambda operands, _: _copied(operands[-1]),
    turned: lambda _, result: result,
    turned_sum: lambda _, result: result,
}
