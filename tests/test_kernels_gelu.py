"""GELU of half-precision arrays, compared with float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from stepgraph.compiler.kernels import expand_gelus
from stepgraph.compiler.kernels.gelu import gelu, gelu_gradient

aten = torch.ops.aten


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_in_float64(kind: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.tensor([-3e4, 3e4, 0.0])]).to(kind)
    g = torch.linspace(-2, 2, len(x)).to(kind)
    wide = x.double().requires_grad_()
    wanted = F.gelu(wide)
    (gradient,) = torch.autograd.grad(wanted, wide, g.double())
    # One rounding; far from zero, where a value is less than 1e-8, the formula is less exact.
    exact = {"rtol": torch.finfo(kind).eps, "atol": 1e-7}
    torch.testing.assert_close(gelu(x).double(), wanted.detach(), **exact)
    torch.testing.assert_close(gelu_gradient(g, x).double(), gradient, **exact)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_no_more_numbers_are_rounded_wrongly_than_by_pytorch(kind: torch.dtype) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(kind)
    x = numbers[numbers.isfinite()]
    g, wide = torch.full_like(x, 0.5), x.double()
    share = 0.5 * torch.special.erfc(-wide / math.sqrt(2))
    slope = share + wide * torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
    for found, theirs, exact in (
        (gelu(x), F.gelu(x), wide * share),
        (gelu_gradient(g, x), aten.gelu_backward(g, x), 0.5 * slope),
    ):
        assert (found != exact.to(kind)).sum() <= (theirs != exact.to(kind)).sum()


def test_infinities_and_nan_are_as_in_pytorch() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan]).bfloat16()
    torch.testing.assert_close(gelu(x), F.gelu(x), equal_nan=True)


def test_only_half_precision_and_the_exact_function_are_replaced() -> None:
    def network(x: torch.Tensor, half: torch.Tensor) -> list[torch.Tensor]:
        found = [aten.gelu(x), aten.gelu(half, approximate="tanh"), aten.gelu(half, approximate="none")]
        return [*found, aten.gelu_backward(half, half), aten.gelu_backward(x, x)]

    arrays = torch.randn(5), torch.randn(5).bfloat16()
    module = fx.experimental.proxy_tensor.make_fx(network)(*arrays)
    wanted = module(*arrays)
    expand_gelus(module.graph)
    module.recompile()
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [
        aten.gelu.default,
        aten.gelu.default,
        gelu,
        gelu_gradient,
        aten.gelu_backward.default,
    ]
    for found, one in zip(module(*arrays), wanted, strict=True):
        torch.testing.assert_close(found, one)
