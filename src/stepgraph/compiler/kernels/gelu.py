"""GELU of half-precision arrays with fewer instructions, for a compiler that fuses.

GELU is `x F(x)` with the normal distribution `F`. As PyTorch's compiler writes it, `erf` takes more time than reading
and writing the array. Formula 26.2.17 of Abramowitz and Stegun has an error of 7.5e-8, which vanishes in the rounding
to half precision, and the density that the gradient needs is a part of it. `tanh`, in the usual approximation of GELU,
is fast as it is.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from stepgraph.compiler.kernels.half import HALF
from stepgraph.compiler.program import fake

aten = torch.ops.aten
Array = torch.Tensor
NEAR = 0.2316419
POLYNOMIAL = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)


def expand_gelus(graph: fx.Graph) -> None:
    """Replaces GELUs of half-precision arrays, and their gradients."""
    known = {aten.gelu.default: (gelu, 0), aten.gelu_backward.default: (gelu_gradient, 1)}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in known:
            function, place = known[node.target]
            if fake(node.args[place]).dtype in HALF and node.kwargs.get("approximate", "none") == "none":
                node.target, node.args, node.kwargs = function, node.args[: place + 1], {}


def gelu(x: Array) -> Array:
    """`aten.gelu`, computed in float32."""
    wide = x.float()
    share, _ = _distribution(wide)
    return (wide * share).to(x.dtype)


def gelu_gradient(g: Array, x: Array) -> Array:
    """`aten.gelu_backward`, computed in float32."""
    wide = x.float()
    share, density = _distribution(wide)
    return (g.float() * (share + wide * density)).to(x.dtype)


def _distribution(x: Array) -> tuple[Array, Array]:
    """The normal distribution and its density."""
    density = torch.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    t = 1 / (1 + NEAR * x.abs())
    tail = t * POLYNOMIAL[0]
    for coefficient in POLYNOMIAL[1:]:
        tail = (tail + coefficient) * t
    tail = tail * density
    return torch.where(x < 0, tail, 1 - tail), density
