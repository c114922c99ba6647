"""GELU of fused steps in half precision: on every number as accurate as PyTorch's, compared with float64."""

import math

import pytest
import torch
from torch import fx

from stepgraph.compiler.kernels.gelu import (
    expand_gelu,
    gelu,
    gelu_by_tanh,
    gelu_by_tanh_gradient,
    gelu_gradient,
    normal,
)
from stepgraph.compiler.program import set_fake

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]
OURS = {"none": (gelu, gelu_gradient), "tanh": (gelu_by_tanh, gelu_by_tanh_gradient)}


def phi(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))


def exactly(x: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU and its derivative in float64."""
    x = x.double()
    if approximate == "none":
        return x * phi(x), phi(x) + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    inner = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    passed, steepness = torch.sigmoid(inner), 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x.square())
    return x * passed, passed + x * passed * (1 - passed) * steepness


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


@pytest.mark.parametrize("approximate", OURS)
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_every_number_is_as_accurate_as_with_pytorch(kind: torch.dtype, approximate: str) -> None:
    x, (value, gradient) = every(kind), OURS[approximate]
    exact, slope = exactly(x, approximate)
    assert wrong(value(x), exact) <= wrong(aten.gelu(x, approximate=approximate), exact)
    g = torch.full_like(x, 0.5)
    assert wrong(gradient(g, x), 0.5 * slope) <= wrong(aten.gelu_backward(g, x, approximate=approximate), 0.5 * slope)


@pytest.mark.parametrize("approximate", OURS)
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_what_is_not_finite_stays_so(kind: torch.dtype, approximate: str) -> None:
    x, (value, gradient) = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=kind), OURS[approximate]
    # PyTorch's kernels do not agree on the first of them: on some processors, it is NaN.
    torch.testing.assert_close(value(x), torch.tensor([torch.inf, torch.nan, torch.nan], dtype=kind), equal_nan=True)
    assert gradient(torch.ones_like(x), x).isnan().all()


@pytest.mark.parametrize("approximate", OURS)
@pytest.mark.parametrize("kind", [*HALVES, torch.float32], ids=str)
def test_only_half_precision_is_expanded(kind: torch.dtype, approximate: str) -> None:
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
    plain = aten.gelu.default, aten.gelu_backward.default
    assert tuple(node.target for node in results) == (OURS[approximate] if kind in HALVES else plain)
    found = fx.GraphModule(torch.nn.Module(), graph)(array, array)
    expected = aten.gelu(array, **kwargs), aten.gelu_backward(array, array, **kwargs)
    torch.testing.assert_close(tuple(found), expected, rtol=8e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_fuses")  # PyTorch does not call compiled functions while another thread records one
@pytest.mark.parametrize("approximate", OURS)
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_every_number_is_accurate_in_a_generated_kernel(kind: torch.dtype, approximate: str) -> None:
    x, (value, gradient) = every(kind), OURS[approximate]
    # Beyond, the square is infinite, and PyTorch's derivative of the approximation is NaN too.
    x = x[x.double().abs() < 1e18]
    exact, slope = exactly(x, approximate)
    found = torch.compile(value)(x.cuda()).cpu()
    torch.testing.assert_close(found.double(), exact.to(kind).double(), rtol=1e-2, atol=1e-6)
    found = torch.compile(gradient)(torch.ones_like(x).cuda(), x.cuda()).cpu()
    torch.testing.assert_close(found.double(), slope.to(kind).double(), rtol=1e-2, atol=1e-5)
