"""GELU of fused steps in half precision: on every number as accurate as PyTorch's, compared with float64."""

import math
from typing import Any

import pytest
import torch
from torch import fx

from stepgraph.compiler.kernels.gelu import (
    expand_gelu,
    gelu,
    gelu_gradient,
    gelu_tanh,
    gelu_tanh_gradient,
    normal,
)
from stepgraph.compiler.program import set_fake

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]


FORMS = {"none": (gelu, gelu_gradient), "tanh": (gelu_tanh, gelu_tanh_gradient)}


def phi(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))


def exact(x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU and its derivative in float64."""
    wide = x.double()
    if form == "none":
        return wide * phi(x), phi(x) + wide * torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
    k = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(k * (wide + 0.044715 * wide**3))
    return wide * s, s + k * wide * (1 + 3 * 0.044715 * wide.square()) * s * torch.sigmoid(
        -k * (wide + 0.044715 * wide**3)
    )


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_every_number_is_as_accurate_as_pytorchs(kind: torch.dtype, form: str) -> None:
    x = every(kind)
    value, slope = exact(x, form)
    forward, gradient = FORMS[form]
    assert wrong(forward(x), value) <= wrong(torch.nn.functional.gelu(x, approximate=form), value)
    g = torch.full_like(x, 0.5)
    found, theirs = gradient(g, x), aten.gelu_backward(g, x, approximate=form)
    near = x.abs() < 1e18  # beyond, x² has no number in float32
    assert wrong(found[near], 0.5 * slope[near]) <= wrong(theirs[near], 0.5 * slope[near])
    torch.testing.assert_close(found[~near], theirs[~near], equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_what_is_not_finite_stays_so(kind: torch.dtype, form: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=kind)
    g = torch.ones_like(x)
    forward, gradient = FORMS[form]
    torch.testing.assert_close(forward(x), torch.nn.functional.gelu(x, approximate=form), equal_nan=True)
    torch.testing.assert_close(gradient(g, x), aten.gelu_backward(g, x, approximate=form), equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_is_expanded(kind: torch.dtype, form: str) -> None:
    graph, array = fx.Graph(), torch.randn(64).to(kind)
    g, x = graph.placeholder("g"), graph.placeholder("x")
    kwargs: dict[str, Any] = {"approximate": form}
    results = [
        graph.call_function(aten.gelu.default, (x,), kwargs),
        graph.call_function(aten.gelu_backward.default, (g, x), kwargs),
    ]
    for node in (g, x):
        set_fake(node, array)
    graph.output(results)
    expand_gelu(graph)
    expanded = FORMS[form] if kind in HALVES else (aten.gelu.default, aten.gelu_backward.default)
    assert tuple(node.target for node in results) == expanded
    found = fx.GraphModule(torch.nn.Module(), graph)(array, array)
    expected = aten.gelu(array, **kwargs), aten.gelu_backward(array, array, **kwargs)
    torch.testing.assert_close(tuple(found), expected, rtol=8e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HALVES, ids=str)
def test_every_number_is_accurate_in_a_generated_kernel(kind: torch.dtype, form: str) -> None:
    x = every(kind)
    x = x[x.abs() < 1e18]  # beyond, x² has no number in float32
    value, slope = exact(x, form)
    forward, gradient = FORMS[form]
    found = torch.compile(forward)(x.cuda()).cpu()
    torch.testing.assert_close(found.double(), value.to(kind).double(), rtol=1e-2, atol=1e-6)
    found = torch.compile(gradient)(torch.ones_like(x).cuda(), x.cuda()).cpu()
    torch.testing.assert_close(found.double(), slope.to(kind).double(), rtol=1e-2, atol=1e-5)
