"""Reductions: ties, data types, every kind over every choice of dimensions, refusals."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Scope
from stepgraph.layers.reduction import REDUCTIONS, ReductionLayer
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType, ReductionType

ARGUMENTS = {ReductionType.ARG_MAX, ReductionType.ARG_MIN}
BOOLEAN = {ReductionType.ANY, ReductionType.ALL}
NUMPY: dict[ReductionType, Callable[..., Any]] = {
    ReductionType.SUM: np.sum,
    ReductionType.MEAN: np.mean,
    ReductionType.MAX: np.max,
    ReductionType.MIN: np.min,
    ReductionType.ARG_MAX: np.argmax,
    ReductionType.ARG_MIN: np.argmin,
    ReductionType.L1_NORM: lambda x, **how: np.sum(np.abs(x), **how),
    ReductionType.ANY: np.any,
    ReductionType.ALL: np.all,
}


def forward(layer: ReductionLayer, x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, scope=Scope({}))


def test_table_covers_every_kind_but_none() -> None:
    assert set(REDUCTIONS) == set(ReductionType) - {ReductionType.NONE}


@pytest.mark.parametrize("kind", list(REDUCTIONS))
def test_factories(kind: ReductionType) -> None:
    layer = getattr(ReductionLayer, kind.name.lower())(1, label="reduced")
    assert (layer.reduction_type, layer.dimensions, layer.dimension, layer.label) == (kind, (1,), 1, "reduced")
    assert ReductionLayer(kind, 1).label == "Reduction"


def test_dimension_is_the_first() -> None:
    layer = ReductionLayer(ReductionType.SUM, [2, 0])
    assert (layer.dimension, layer.dimensions) == (2, (2, 0))


@pytest.mark.parametrize("kind", [ReductionType.MAX, ReductionType.MIN])
@pytest.mark.parametrize("dimensions", [(0, 1), (1, 0), (1,), (0,)])
def test_gradient_goes_to_the_first_of_equal_elements(kind: ReductionType, dimensions: tuple[int, ...]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(forward(ReductionLayer(kind, dimensions), x).sum(), x)
    first = torch.zeros(2, 3)
    first[tuple(0 if axis in dimensions else slice(None) for axis in (0, 1))] = 1
    assert torch.equal(gradient, first)


@pytest.mark.parametrize("kind", [ReductionType.MAX, ReductionType.MIN])
@pytest.mark.parametrize("differentiates", [True, False])
def test_not_a_number_is_not_hidden(kind: ReductionType, differentiates: bool) -> None:
    x = torch.tensor([[1.0, math.nan, 2.0], [1.0, 2.0, 3.0]], requires_grad=differentiates)
    assert forward(ReductionLayer(kind, 1), x).isnan().flatten().tolist() == [True, False]


@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize("kind", [*BOOLEAN, ReductionType.SUM])
def test_every_data_type_can_be_counted(kind: ReductionType, data_type: DataType) -> None:
    layer = ReductionLayer(kind, 1)
    (promised,) = layer.infer(TensorDescriptor((2, 3), data_type))
    added = data_type if data_type.is_floating else DataType.INT64
    assert promised.data_type is (DataType.BOOLEAN if kind in BOOLEAN else added)
    x = torch.tensor([[0, 1, 0], [0, 0, 0]]).to(data_type.torch)
    result = forward(layer, x)
    assert DataType.of(result.dtype) is promised.data_type
    assert result.tolist() == [[kind is not ReductionType.ALL], [0]]
    assert layer.supports_data_type(data_type)


@pytest.mark.parametrize("data_type", [one for one in DataType if one is not DataType.BOOLEAN])
def test_indices_are_int32_for_all_numbers(data_type: DataType) -> None:
    x = torch.tensor([[1, 3, 3, 0, 0]]).to(data_type.torch)
    for layer, index in ((ReductionLayer.arg_max(1), 1), (ReductionLayer.arg_min(1), 3)):
        assert (forward(layer, x).dtype, forward(layer, x).tolist()) == (torch.int32, [[index]])


@pytest.mark.parametrize(
    ("kind", "dimensions", "words"),
    [
        (ReductionType.NONE, 1, "reduction_type is NONE"),
        (1, 1, "reduction_type is 1"),
        (ReductionType.SUM, (), r"dimensions are \(\)"),
        (ReductionType.SUM, (1, 1), r"dimensions are \(1, 1\)"),
        (ReductionType.SUM, -1, "a dimension is -1"),
        (ReductionType.SUM, (0, 1.5), "a dimension is 1.5"),
        (ReductionType.SUM, True, "a dimension is True"),
        (ReductionType.ARG_MAX, (0, 1), r"Arg Max takes one dimension, but dimensions are \(0, 1\)"),
        (ReductionType.ARG_MIN, (0, 1), r"Arg Min takes one dimension, but dimensions are \(0, 1\)"),
    ],
)
def test_refused_settings(kind: Any, dimensions: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ReductionLayer(kind, dimensions)


@st.composite
def reductions(draw: st.DrawFn) -> tuple[ReductionType, tuple[int, ...], np.ndarray]:
    """Any kind over any choice of dimensions of any small source, with equal numbers and zeros in it."""
    kind = draw(st.sampled_from(list(REDUCTIONS)))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    most = 1 if kind in ARGUMENTS else len(shape)
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=most, unique=True))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    return kind, tuple(axes), generator.integers(-3, 4, shape) / 2


def agrees_with_numpy(drawn: tuple[ReductionType, tuple[int, ...], np.ndarray]) -> None:
    kind, axes, values = drawn
    layer = ReductionLayer(kind, axes)
    wanted = NUMPY[kind](values, axis=axes[0] if kind in ARGUMENTS else axes, keepdims=True)
    x = torch.from_numpy(values)
    for source in (x, x.clone().requires_grad_()):
        result = forward(layer, source).detach()
        np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-12, atol=1e-12)
    (promised,) = layer.infer(TensorDescriptor(values.shape, DataType.FLOAT64))
    assert (promised.shape, promised.data_type.torch) == (tuple(result.shape), result.dtype)
    if kind in (ReductionType.MAX, ReductionType.MIN):
        (gradient,) = torch.autograd.grad(forward(layer, source).sum(), source)
        assert set(gradient.unique().tolist()) <= {0, 1}
        assert torch.equal((gradient * x).sum(axes, keepdim=True), result)


@given(reductions())
@settings(max_examples=25, deadline=None)
def test_any_reduction_agrees_with_numpy(drawn: tuple[ReductionType, tuple[int, ...], np.ndarray]) -> None:
    agrees_with_numpy(drawn)


@pytest.mark.deep
@given(reductions())
@settings(max_examples=400, deadline=None)
def test_many_reductions_agree_with_numpy(drawn: tuple[ReductionType, tuple[int, ...], np.ndarray]) -> None:
    agrees_with_numpy(drawn)
