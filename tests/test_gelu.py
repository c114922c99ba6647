"""GELU of fused steps in half precision: on every number as accurate as PyTorch's, compared with float64."""

import math

import pytest
import torch
from torch import fx

from stepgraph.compiler.kernels.gelu import expand_gelu, gelu, gelu_gradient, normal
from stepgraph.compiler.program import set_fake

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]


def phi(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))


def every(kind: torch.dtype) -> torch.Tensor:
    """All finite numbers of a type."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(kind)
    return numbers[numbers.isfinite()]


def wrong(found: torch.Tensor, exact: torch.Tensor) -> int:
    """How many numbers are not the nearest ones to the exact results."""
    return int((found != exact.to(found.dtype)).sum())


def test_the_distribution_is_accurate_in_float32() -> None:
    x = torch.linspace(-10, 10, 200_001)
    found, exact = normal(x)[0].double(), phi(x)
    assert (found - exact).abs().max() < 4e-7
    near = x > -6
    assert ((found - exact) / exact)[near].abs().max() < 5e-3  # with `1 + erf`, nothing is left at -6


@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_every_number_is_as_accurate_as_with_erf(kind: torch.dtype) -> None:
    x = every(kind)
    exact = x.double() * phi(x)
    assert wrong(gelu(x), exact) <= wrong(torch.nn.functional.gelu(x), exact)
    slope = phi(x) + x.double() * torch.exp(-x.double().square() / 2) / math.sqrt(2 * math.pi)
    g = torch.full_like(x, 0.5)
    assert wrong(gelu_gradient(g, x), 0.5 * slope) <= wrong(aten.gelu_backward(g, x), 0.5 * slope)


@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_what_is_not_finite_stays_so(kind: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=kind)
    g = torch.ones_like(x)
    torch.testing.assert_close(gelu(x), torch.nn.functional.gelu(x), equal_nan=True)
    torch.testing.assert_close(gelu_gradient(g, x), aten.gelu_backward(g, x), equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "approximate", "expands"),
    [(torch.bfloat16, "none", True), (torch.float16, "none", True), (torch.float32, "none", False),
     (torch.bfloat16, "tanh", False)],
)  # fmt: skip
def test_only_the_exact_form_in_half_precision_is_expanded(kind: torch.dtype, approximate: str, expands: bool) -> None:
    graph, array = fx.Graph(), torch.randn(64).to(kind)
    g, x = graph.placeholder("g"), graph.placeholder("x")
    kwargs = {"approximate": approximate}
    results = [
        graph.call_function(aten.gelu.default, (x,), kwargs),
        graph.call_function(aten.gelu_backward.default, (g, x), kwargs),
    ]
    for node in (g, x):
        set_fake(node, array)
    graph.output(results)
    expand_gelu(graph)
    assert [node.target for node in results] == (
        [gelu, gelu_gradient] if expands else [aten.gelu.default, aten.gelu_backward.default]
    )
    found = fx.GraphModule(torch.nn.Module(), graph)(array, array)
    expected = aten.gelu(array, **kwargs), aten.gelu_backward(array, array, **kwargs)
    torch.testing.assert_close(tuple(found), expected, rtol=8e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_every_number_is_accurate_in_a_generated_kernel(kind: torch.dtype) -> None:
    x = every(kind)
    found = torch.compile(gelu)(x.cuda()).cpu()
    exact = x.double() * phi(x)
    torch.testing.assert_close(found.double(), exact.to(kind).double(), rtol=1e-2, atol=1e-6)
    g = torch.ones_like(x)
    slope = phi(x) + x.double() * torch.exp(-x.double().square() / 2) / math.sqrt(2 * math.pi)
    found = torch.compile(gelu_gradient)(g.cuda(), x.cuda()).cpu()
    torch.testing.assert_close(found.double(), slope.to(kind).double(), rtol=1e-2, atol=1e-5)
