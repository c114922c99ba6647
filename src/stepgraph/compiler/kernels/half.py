"""Products and convolutions in float16 and bfloat16 computed in float32, for processors without such arithmetic.

PyTorch emulates it there, one number at a time, which can take a hundred times as long. The sources are already
rounded; multiplied and summed in float32 and rounded once at the end, they match the matrix units of a GPU.
To add an implementation, add a function and an entry in `IMPLEMENTATIONS`; `measure` decides for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels.measure import Pick, fastest
from stepgraph.compiler.program import fake, note
from stepgraph.layers.gru_kernel import gru, gru_gradient
from stepgraph.layers.lstm_kernel import lstm, lstm_gradient

aten = torch.ops.aten
Array = torch.Tensor
HALF = (torch.float16, torch.bfloat16)
LARGE = 1 << 10  # elements of a source from which an alternative can matter


def applies(node: fx.Node) -> bool:
    """Whether a node multiplies enough numbers in half precision to be worth replacing."""
    if node.target not in IMPLEMENTATIONS or node.kwargs:
        return False
    arrays = [fake(one) for one in node.all_input_nodes]
    return all(a.dtype in HALF for a in arrays) and max(a.numel() for a in arrays) >= LARGE


def choose(node: fx.Node, pick: Pick | None = None) -> None:
    """Replaces the operator with its fastest implementation."""
    own, other = cast(Any, node.target), IMPLEMENTATIONS[cast(Any, node.target)]
    settings = [fake(one) if isinstance(one, fx.Node) else one for one in node.args]
    name = (pick or fastest)(str(own), {"pytorch": own, "float32": other}, settings)
    note(node, implementation=(str(own).split(".")[1], name))
    if name == "float32":
        compute_in_float32(node)


def compute_in_float32(node: fx.Node) -> None:
    """Replaces an operator of `IMPLEMENTATIONS` or `RECURRENT` with the one that computes in float32."""
    node.target = (IMPLEMENTATIONS | RECURRENT)[cast(Any, node.target)]
    arrays = [fake(one) for one in node.all_input_nodes] + _arrays(fake(node))
    note(node, workspace=2 * sum(one.nbytes for one in arrays))  # a copy of each, twice as wide


def _arrays(found: Any) -> list[Array]:
    return [one for one in (found if isinstance(found, tuple | list) else [found]) if one is not None]


def _product(a: Array, b: Array) -> Array:
    return aten.mm.default(a.float(), b.float()).to(a.dtype)


def _product_and_sum(c: Array, a: Array, b: Array, **scales: float) -> Array:
    return aten.addmm.default(c.float(), a.float(), b.float(), **scales).to(a.dtype)


def _products(a: Array, b: Array) -> Array:
    return aten.bmm.default(a.float(), b.float()).to(a.dtype)


def _products_and_sum(c: Array, a: Array, b: Array, **scales: float) -> Array:
    return aten.baddbmm.default(c.float(), a.float(), b.float(), **scales).to(a.dtype)


def _convolution(x: Array, w: Array, b: Array | None, *settings: Any) -> Array:
    return aten.convolution.default(x.float(), w.float(), None if b is None else b.float(), *settings).to(x.dtype)


def _convolution_backward(g: Array, x: Array, w: Array, *settings: Any) -> tuple[Array | None, ...]:
    found = aten.convolution_backward.default(g.float(), x.float(), w.float(), *settings)
    return tuple(None if one is None else one.to(g.dtype) for one in found)


def _lstm(*given: Any) -> tuple[Array, ...]:
    return _rounded(lstm, given)


def _lstm_gradient(*given: Any) -> tuple[Array, ...]:
    return _rounded(lstm_gradient, given)


def _gru(*given: Any) -> tuple[Array, ...]:
    return _rounded(gru, given)


def _gru_gradient(*given: Any) -> tuple[Array, ...]:
    return _rounded(gru_gradient, given)


def _rounded(operator: Callable[..., Any], given: Sequence[Any]) -> tuple[Array, ...]:
    """The results of an operator in float32, rounded to the type of its first array."""
    kind = given[0].dtype
    wide = (one.float() if isinstance(one, Array) and one.dtype in HALF else one for one in given)
    return tuple(one.to(kind) for one in operator(*wide))


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product_and_sum,
    aten.bmm.default: _products,
    aten.baddbmm.default: _products_and_sum,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}

# Operators with products inside. They are replaced only where these fail.
RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.ops.stepgraph.lstm.default: _lstm,
    torch.ops.stepgraph.lstm_gradient.default: _lstm_gradient,
    torch.ops.stepgraph.gru.default: _gru,
    torch.ops.stepgraph.gru_gradient.default: _gru_gradient,
}
