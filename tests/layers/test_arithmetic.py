"""Arithmetic: ties, zeros and infinities, raw values, refusals."""

import math

import pytest
import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.arithmetic import BINARY, UNARY, ArithmeticLayer, ArithmeticOperation
from stepgraph.layers.layer import Scope

INFINITE = [math.inf, -math.inf, math.nan]


def slopes(layer: ArithmeticLayer, *sources: list[float]) -> tuple[list[float], list[list[float]]]:
    """The result, and the gradient of its sum for each source."""
    leaves = [torch.tensor(source, dtype=torch.float64, requires_grad=True) for source in sources]
    result = layer.forward(*leaves, scope=Scope({}))
    return result.tolist(), [one.tolist() for one in torch.autograd.grad(result.sum(), leaves)]


@pytest.mark.parametrize("layer", [ArithmeticLayer.min(), ArithmeticLayer.max()])
def test_gradient_of_equal_numbers_goes_to_the_first_source(layer: ArithmeticLayer) -> None:
    assert slopes(layer, [2.0, -1.0], [2.0, -1.0]) == ([2, -1], [[1, 1], [0, 0]])


@pytest.mark.parametrize("layer", [ArithmeticLayer.min(), ArithmeticLayer.max()])
def test_min_and_max_hide_no_nan(layer: ArithmeticLayer) -> None:
    result = layer.forward(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan]), scope=Scope({}))
    assert result.isnan().all()


def test_round_takes_halves_to_the_even_neighbor() -> None:
    halves = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    result = ArithmeticLayer(ArithmeticOperation.ROUND).forward(halves, scope=Scope({}))
    assert result.tolist() == [-2, -2, 0, 0, 2, 2]


def test_gradients_of_powers_of_zero() -> None:
    result, (base, exponent) = slopes(ArithmeticLayer.pow(), [0.0, 0.0, 0.0], [0.0, 1.0, 2.0])
    assert result == [1, 0, 0]
    assert base == [0, 1, 0]
    assert exponent == [0, 0, 0]


def test_multiply_no_nan_of_anything_with_zero() -> None:
    result, (by_x, by_y) = slopes(ArithmeticLayer.multiply_no_nan(), [*INFINITE, 3.0], [0.0] * 4)
    assert result == [0, 0, 0, 0]
    assert by_x == [0, 0, 0, 0]
    assert by_y == [0, 0, 0, 3]


def test_multiply_no_nan_keeps_infinities_elsewhere() -> None:
    assert (
        ArithmeticLayer.multiply_no_nan().forward(torch.tensor(INFINITE[:1]), torch.ones(1), scope=Scope({})).item()
        == math.inf
    )


def test_divide_no_nan_by_zero() -> None:
    result, (by_x, by_y) = slopes(ArithmeticLayer.divide_no_nan(), [*INFINITE, 3.0, 0.0, 3.0], [0.0] * 5 + [2.0])
    assert result == [0, 0, 0, 0, 0, 1.5]
    assert by_x == [0, 0, 0, 0, 0, 0.5]
    assert by_y == [0, 0, 0, 0, 0, -0.75]


def test_gradient_of_a_broadcast_source_is_summed() -> None:
    _, (x, y) = slopes(ArithmeticLayer.multiply(), [2.0], [1.0, 10.0])
    assert (x, y) == ([11], [2, 2])


def test_raw_values_and_descriptions() -> None:
    descriptions = [
        "Add",
        "Subtract",
        "Multiply",
        "Divide",
        "Floor",
        "Round",
        "Ceil",
        "Sqrt",
        "Rsqrt",
        "Sin",
        "Cos",
        "Tan",
        "Asin",
        "Acos",
        "Atan",
        "Sinh",
        "Cosh",
        "Tanh",
        "Asinh",
        "Acosh",
        "Atanh",
        "Pow",
        "Exp",
        "Exp2",
        "Log",
        "Log2",
        "MultiplyNoNaN",
        "DivideNoNaN",
        "ElementwiseMin",
        "ElementwiseMax",
    ]
    assert [ArithmeticOperation(raw).debug_description for raw in range(30)] == descriptions
    assert len(ArithmeticOperation) == 30


def test_tables_cover_the_operations_once() -> None:
    assert set(UNARY) | set(BINARY) == set(ArithmeticOperation)
    assert not set(UNARY) & set(BINARY)


def test_something_else_than_an_operation_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the operation is 3"):
        ArithmeticLayer(3)  # type: ignore[arg-type]


def test_labels() -> None:
    assert ArithmeticLayer.add().label == "Arithmetic"
    assert ArithmeticLayer.max(label="larger").label == "larger"
