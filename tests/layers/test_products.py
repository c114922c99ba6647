"""Matrix products: descriptors, operators that run, every pair of shapes, refusals."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.program import fake
from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.layers.layer import Scope
from stepgraph.layers.products import GramMatrixLayer, MatMulDescriptor, MatMulLayer
from stepgraph.tensors.tensor import TensorDescriptor
from tests.layers.cases_products import product


def forward(layer: MatMulLayer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, y, scope=Scope({}))


def test_descriptor_defaults_and_copies() -> None:
    assert MatMulLayer().descriptor == MatMulDescriptor() == MatMulDescriptor(1.0, False, False)
    descriptor = MatMulDescriptor(2, True, True)
    assert dataclasses.replace(descriptor, alpha=3.0) == MatMulDescriptor(3.0, True, True)
    assert type(descriptor.alpha) is float


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": math.inf}, "alpha is inf"),
        ({"alpha": "1"}, "alpha is '1'"),
        ({"alpha": True}, "alpha is True"),
        ({"transposes_x": 1}, "transposes_x is 1"),
        ({"transposes_y": None}, "transposes_y is None"),
    ],
)
def test_descriptor_refuses_by_name(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        MatMulDescriptor(**keywords)


def test_layers_refuse_by_name() -> None:
    with pytest.raises(DataTypeError, match="its descriptor is float, not MatMulDescriptor"):
        MatMulLayer(1.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="scale is nan"):
        GramMatrixLayer(math.nan)


def test_labels() -> None:
    assert [MatMulLayer().label, GramMatrixLayer(1).label] == ["MatMul", "GramMatrix"]
    assert GramMatrixLayer(1, label="style").label == "style"


def operators(layer: MatMulLayer, x: tuple[int, ...], y: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and result shapes of the operators that compute something."""
    traced = make_fx(lambda x, y: forward(layer, x, y))(torch.zeros(x), torch.zeros(y))
    called = [node for node in traced.graph.nodes if node.op == "call_function"]
    names = [(str(node.target).split(".")[1], tuple(fake(node).shape)) for node in called]
    return [one for one in names if one[0] in ("mm", "bmm", "mul", "clone", "copy")]


def test_one_matrix_for_all_is_one_product() -> None:
    assert operators(MatMulLayer(), (2, 3, 4, 5), (1, 1, 5, 6)) == [("mm", (24, 6))]
    assert operators(MatMulLayer(), (2, 3, 4, 5), (5, 6)) == [("mm", (24, 6))]


def test_the_smallest_array_is_multiplied_by_alpha() -> None:
    layer = MatMulLayer(MatMulDescriptor(0.5))
    assert operators(layer, (2, 2, 3), (2, 3, 9)) == [("mul", (2, 2, 3)), ("bmm", (2, 2, 9))]
    assert operators(layer, (2, 9, 3), (2, 3, 2)) == [("mul", (2, 3, 2)), ("bmm", (2, 9, 2))]
    assert operators(layer, (2, 2, 9), (2, 9, 3)) == [("bmm", (2, 2, 3)), ("mul", (2, 2, 3))]
    assert operators(MatMulLayer(), (2, 2, 9), (2, 9, 3)) == [("bmm", (2, 2, 3))]


def test_transposing_costs_no_copy() -> None:
    layer = MatMulLayer(MatMulDescriptor(transposes_x=True, transposes_y=True))
    assert operators(layer, (2, 3, 4, 5), (2, 3, 6, 4)) == [("bmm", (6, 5, 6))]


def test_gram_matrix_is_symmetric() -> None:
    z = GramMatrixLayer(2.0).forward(torch.randn(2, 3, 4, 4, dtype=torch.float64), scope=Scope({}))[:, :, 0]
    torch.testing.assert_close(z, z.mT)


Drawn = tuple[MatMulDescriptor, np.ndarray, np.ndarray]


@st.composite
def products(draw: st.DrawFn) -> Drawn:
    """Any descriptor, and any two small sources that it takes."""
    descriptor = MatMulDescriptor(draw(st.sampled_from([1.0, -0.5, 3.0])), draw(st.booleans()), draw(st.booleans()))
    leading = draw(mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3)).input_shapes
    rows, inner, columns = draw(st.tuples(*[st.integers(1, 6)] * 3))
    x = (inner, rows) if descriptor.transposes_x else (rows, inner)
    y = (columns, inner) if descriptor.transposes_y else (inner, columns)
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    return descriptor, generator.standard_normal((*leading[0], *x)), generator.standard_normal((*leading[1], *y))


def is_right(drawn: Drawn) -> None:
    descriptor, x, y = drawn
    layer = MatMulLayer(descriptor)
    wanted = product(x, y, *dataclasses.astuple(descriptor))
    (promised,) = layer.infer(TensorDescriptor(x.shape), TensorDescriptor(y.shape))
    assert promised.shape == wanted.shape
    leaves = [torch.from_numpy(one).requires_grad_() for one in (x, y)]
    z = forward(layer, *leaves)
    np.testing.assert_allclose(z.detach().numpy(), wanted, rtol=1e-10, atol=1e-11)
    # The product is linear in each source: ⟨∂⟨g, z⟩/∂x, x⟩ = ⟨g, z⟩, and along any other direction alike.
    generator = np.random.default_rng(5)
    sent = generator.standard_normal(wanted.shape)
    gradients = torch.autograd.grad(z, leaves, torch.from_numpy(sent))
    for i, gradient in enumerate(gradients):
        sources = [x, y]
        sources[i] = generator.standard_normal(sources[i].shape)
        along = (product(*sources, *dataclasses.astuple(descriptor)) * sent).sum()
        assert gradient.shape == sources[i].shape
        assert (gradient.numpy() * sources[i]).sum() == pytest.approx(along, rel=1e-8, abs=1e-9)


@given(products())
@settings(max_examples=25, deadline=None)
def test_any_product_is_right(drawn: Drawn) -> None:
    is_right(drawn)


@pytest.mark.deep
@given(products())
@settings(max_examples=400, deadline=None)
def test_many_products_are_right(drawn: Drawn) -> None:
    is_right(drawn)
