"""Alternative implementations of single operators, built from what PyTorch provides.

An implementation takes the operator's own arguments. To add one, add a function and an entry in `IMPLEMENTATIONS`
under the operator it replaces; the first one there is PyTorch's own. `measure` decides for each shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import embedding, normalization, products
from stepgraph.compiler.kernels.measure import GAIN, Implementation, fastest, fewer
from stepgraph.compiler.program import fake, note

aten = torch.ops.aten
Array = torch.Tensor
LARGE = 1 << 14  # elements from which an alternative can matter


def choose(node: fx.Node) -> None:
    """Replaces the operator with its fastest implementation."""
    operator, arrays = cast(Any, node.target), [fake(one) for one in node.all_input_nodes]
    real = operator in INDICES or all(a.dtype.is_floating_point for a in arrays)
    if not real or max(a.numel() for a in arrays) < LARGE or not _fits(node):
        return
    settings = tuple(fake(one) if isinstance(one, fx.Node) else one for one in node.args)
    known = {name: _with(function, **node.kwargs) for name, function in IMPLEMENTATIONS[operator].items()}
    below = INDICES[operator](settings) if operator in INDICES else 1
    settings = FEWER[operator](settings) if operator in FEWER else settings
    gain = GAINS[operator](settings) if operator in GAINS else GAIN
    name = fastest(str(operator), known, (*settings, *node.kwargs.values()), below=below, gain=gain)
    note(node, implementation=(str(operator).split(".")[1], name))
    if name != next(iter(known)):  # the operator itself needs no wrapper, and other passes know it
        node.target = IMPLEMENTATIONS[operator][name]


# Sums over the first of two axes, such as bias gradients


def sum_by_product(x: Array, axes: Sequence[int], keepdim: bool = False) -> Array:
    """`1ᵀ x`: matrix products read several columns of a row together."""
    total = x.new_ones(1, x.shape[0]) @ x
    return total if keepdim else total[0]


# The derivative of GELU


def gelu_backward_by_parts(g: Array, x: Array, *, approximate: str = "none", out: Array | None = None) -> Array:
    """`Φ(x) + x φ(x)`, or with the tanh approximation `σ(2u) + x σ(2u) (1 - σ(2u)) 2u'`, in vectorized steps."""
    if approximate == "none":
        density = torch.square(x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        cumulative = torch.mul(x, math.sqrt(0.5), out=out).erf_().add_(1).mul_(0.5)
        return cumulative.addcmul_(x, density).mul_(g)
    double, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
    square = torch.square(x)
    gate = torch.mul(square, double * cubic, out=out).add_(double).mul_(x).sigmoid_()
    slope = square.mul_(3 * double * cubic).add_(double).mul_(x).mul_(gate)
    return gate.add_(slope.addcmul_(slope, gate, value=-1)).mul_(g)


# tanh


def _tanh_by_sigmoid(x: Array) -> Array:
    """`2 σ(2x) - 1`."""
    return torch.mul(x, 2).sigmoid_().mul_(2).sub_(1)


# Maxima of windows, and their positions


def max_pool_channels_last(x: Array, *window: Any) -> tuple[Array, Array]:
    """With channels last, several channels are compared together; the images are converted to that layout and back."""
    y, indices = aten.max_pool2d_with_indices.default(x.contiguous(memory_format=torch.channels_last), *window)
    return y.contiguous(), indices.contiguous()


IMPLEMENTATIONS: dict[Any, dict[str, Implementation]] = {
    aten.mm.default: products.PRODUCTS,
    aten.addmm.default: products.SUMS,
    aten.sum.dim_IntList: {"pytorch": aten.sum.dim_IntList, "product": sum_by_product},
    aten.gelu_backward.default: {"pytorch": aten.gelu_backward.default, "parts": gelu_backward_by_parts},
    aten.tanh.default: {"pytorch": aten.tanh.default, "sigmoid": _tanh_by_sigmoid},
    aten.max_pool2d_with_indices.default: {
        "pytorch": aten.max_pool2d_with_indices.default,
        "channels last": max_pool_channels_last,
    },
    aten.embedding_dense_backward.default: embedding.IMPLEMENTATIONS,
    aten.native_batch_norm.default: normalization.FORWARD,
    aten.native_batch_norm_backward.default: normalization.BACKWARD,
}

# Operators for which a smaller gain than usual counts, by their arguments.
GAINS: dict[Any, Callable[[Sequence[Any]], float]] = {aten.addmm.default: products.gain}

# Operators with index arguments, and the upper bounds of these.
INDICES: dict[Any, Callable[[Sequence[Any]], int]] = {aten.embedding_dense_backward.default: embedding.words}

# Operators whose implementations are measured on smaller arguments.
FEWER: dict[Any, Callable[[Sequence[Any]], tuple[Any, ...]]] = {
    aten.native_batch_norm.default: fewer,
    aten.native_batch_norm_backward.default: fewer,
    aten.max_pool2d_with_indices.default: fewer,
}

FITS: dict[Any, Callable[[fx.Node], bool]] = {
    aten.mm.default: products.fits,
    aten.addmm.default: products.fits,
    aten.embedding_dense_backward.default: embedding.fits,
    aten.native_batch_norm.default: normalization.fits,
    aten.native_batch_norm_backward.default: normalization.fits,
}


def _fits(node: fx.Node) -> bool:
    """Whether the alternatives support this use of the operator."""
    if node.target in FITS:
        return FITS[node.target](node)
    x, *settings = cast(Any, node.args)
    array = fake(x)
    if node.target is aten.sum.dim_IntList:
        return array.ndim == 2 and list(settings[0]) == [0] and "dtype" not in node.kwargs
    return node.target is not aten.max_pool2d_with_indices.default or (array.ndim == 4 and array.is_contiguous())


def _with(function: Implementation, **settings: Any) -> Implementation:
    """The implementation for `measure`, which knows no names: settings are repeated at the end of its arguments."""
    if not settings:
        return function
    return lambda *arguments: function(*arguments[: len(arguments) - len(settings)], **settings)
