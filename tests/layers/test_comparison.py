"""Comparisons: raw values, tables, no gradient, every pair of shapes and types."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from stepgraph.errors import ArgumentError
from stepgraph.layers.comparison import BINARY, LOGICAL, UNARY, ComparisonLayer, ComparisonOperation
from stepgraph.layers.layer import Scope
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType
from tests.layers.cases_comparison import by_sign, by_truth_table


def test_raw_values_and_descriptions() -> None:
    assert [(int(one), one.name, one.debug_description) for one in ComparisonOperation] == [
        (0, "EQUAL", "Equal"),
        (1, "NOT_EQUAL", "Not Equal"),
        (2, "LESS", "Less"),
        (3, "GREATER", "Greater"),
        (4, "LESS_OR_EQUAL", "Less or Equal"),
        (5, "GREATER_OR_EQUAL", "Greater or Equal"),
        (6, "LOGICAL_AND", "Logical AND"),
        (7, "LOGICAL_OR", "Logical OR"),
        (8, "LOGICAL_NOT", "Logical NOT"),
        (9, "LOGICAL_NAND", "Logical NAND"),
        (10, "LOGICAL_NOR", "Logical NOR"),
        (11, "LOGICAL_XOR", "Logical XOR"),
    ]


def test_tables_cover_the_operations_once() -> None:
    assert set(UNARY) | set(BINARY) == set(ComparisonOperation)
    assert not set(UNARY) & set(BINARY)
    assert {one for one in ComparisonOperation if one.name.startswith("LOGICAL")} == LOGICAL


@pytest.mark.parametrize("operation", [one for one in ComparisonOperation if one not in LOGICAL])
def test_factories_of_relations(operation: ComparisonOperation) -> None:
    layer = getattr(ComparisonLayer, operation.name.lower())(label="compared")
    assert (layer.operation, layer.label) == (operation, "compared")
    assert ComparisonLayer(operation).label == "Compare"


def test_no_gradient_flows() -> None:
    x = torch.ones(2, requires_grad=True)
    result = ComparisonLayer.less().forward(x, 2 * x, scope=Scope({}))
    assert result.dtype is torch.bool
    assert not result.requires_grad


def test_nothing_is_equal_to_nan() -> None:
    nan = torch.tensor([math.nan])
    assert not ComparisonLayer.equal().forward(nan, nan, scope=Scope({})).item()
    assert ComparisonLayer.not_equal().forward(nan, nan, scope=Scope({})).item()


def test_whole_numbers_are_compared_exactly() -> None:
    large = torch.tensor([2**53], dtype=torch.int64)
    assert ComparisonLayer.less().forward(large, large + 1, scope=Scope({})).item()


def test_something_else_than_an_operation_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the operation is 3"):
        ComparisonLayer(3)  # type: ignore[arg-type]


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[ComparisonOperation, np.ndarray, np.ndarray]:
    """Any operation on two sources of any shapes that broadcast and any types that can be compared."""
    operation = draw(st.sampled_from(list(BINARY)))
    shapes = draw(mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=5, max_side=3)).input_shapes
    kinds: list[list[type]] = [[np.float32, np.float64], [np.int8, np.uint8, np.int32, np.int64]]
    family = [np.bool_] if operation in LOGICAL else draw(st.sampled_from(kinds))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    x, y = (generator.integers(0, 3, shape).astype(draw(st.sampled_from(family))) for shape in shapes)
    return operation, x, y


def agrees_with_the_tables(drawn: tuple[ComparisonOperation, np.ndarray, np.ndarray]) -> None:
    operation, x, y = drawn
    layer = ComparisonLayer(operation)
    reference = (by_truth_table if operation in LOGICAL else by_sign)(operation.name)
    wanted = reference(*np.broadcast_arrays(x, y))
    result = layer.forward(torch.from_numpy(x), torch.from_numpy(y), scope=Scope({}))
    np.testing.assert_array_equal(result.numpy(), wanted)
    (promised,) = layer.infer(*(TensorDescriptor(one.shape, one.dtype) for one in (x, y)))
    assert (promised.shape, promised.data_type) == (wanted.shape, DataType.BOOLEAN)


@given(comparisons())
@settings(max_examples=25, deadline=None)
def test_any_comparison_agrees_with_the_tables(drawn: tuple[ComparisonOperation, np.ndarray, np.ndarray]) -> None:
    agrees_with_the_tables(drawn)


@pytest.mark.deep
@given(comparisons())
@settings(max_examples=400, deadline=None)
def test_many_comparisons_agree_with_the_tables(drawn: tuple[ComparisonOperation, np.ndarray, np.ndarray]) -> None:
    agrees_with_the_tables(drawn)
