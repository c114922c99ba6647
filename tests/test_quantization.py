"""Quantized tensors: rounding, saturation, scales along an axis, the way back, and what is refused."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import ArgumentError, DataError, DataTypeError, ShapeError, StateError, StepgraphError
from stepgraph.tensors.quantization import QUANTIZED
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType

INT8, UINT8, INT32, FLOAT32 = DataType.INT8, DataType.UINT8, DataType.INT32, DataType.FLOAT32
ENDS = {INT8: (-128, 127), UINT8: (0, 255), INT32: (-(2**31), 2**31 - 1)}


def quantize(x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
    return x.quantized(*arguments, **settings)


def dequantize(y: Tensor, *arguments: Any, **settings: Any) -> Tensor:
    return y.dequantized(*arguments, **settings)


def tensor(values: Any, data_type: DataType = FLOAT32) -> Tensor:
    array = np.asarray(values, data_type.debug_description)
    return Tensor(array.shape, data_type, data=array)


def exactly(x: float, scale: float, bias: float, data_type: DataType) -> int:
    """One element in rational numbers, which Python rounds half to even."""
    low, high = ENDS[data_type]
    if math.isinf(x):
        return high if (x > 0) == (scale > 0) else low
    return min(high, max(low, round(Fraction(x) * Fraction(scale) + Fraction(bias))))


def is_exact(x: float, scale: float, bias: int) -> bool:
    return math.isinf(x) or Fraction(x * scale + bias) == Fraction(x) * Fraction(scale) + bias


class TestQuantize:
    def test_example_of_the_original_backend(self) -> None:
        y = quantize(tensor([1, 2, 3, 4]), INT32, scale=tensor([1, 10, 100, 1000]), bias=tensor([0] * 4), axis=0)
        assert y.data_type is INT32
        assert y.numpy().tolist() == [1, 20, 300, 4000]

    @pytest.mark.parametrize("target", QUANTIZED, ids=str)
    def test_halves_go_to_the_even_neighbor(self, target: DataType) -> None:
        x = tensor([0.5, 1.5, 2.5, 3.5, 0.25, 0.75])
        assert quantize(x, target, scale=1, bias=4).numpy().tolist() == [4, 6, 6, 8, 4, 5]
        assert quantize(x, target, scale=-1, bias=10).numpy().tolist() == [10, 8, 8, 6, 10, 9]
        assert quantize(x, target, scale=2.0, bias=0.5).numpy().tolist() == [2, 4, 6, 8, 1, 2]

    @pytest.mark.parametrize("target", QUANTIZED, ids=str)
    def test_what_does_not_fit_becomes_the_nearest(self, target: DataType) -> None:
        low, high = ENDS[target]
        x = tensor([-np.inf, -3e38, -1e10, low, high, 1e10, 3e38, np.inf])
        assert quantize(x, target, scale=1.0, bias=0).numpy().tolist() == [low] * 4 + [high] * 4
        assert quantize(x, target, scale=-1e10, bias=3).numpy()[[0, -1]].tolist() == [high, low]

    def test_large_whole_numbers_are_exact(self) -> None:
        assert quantize(tensor([2.0**24]), INT32, scale=1, bias=1).numpy().tolist() == [2**24 + 1]
        assert quantize(tensor([3.0]), INT32, scale=1, bias=2**31 - 5).numpy().tolist() == [2**31 - 2]

    def test_numbers_are_taken_as_they_are(self) -> None:
        assert quantize(tensor([5.0, 15.0]), INT8, scale=0.1, bias=0).numpy().tolist() == [0, 2]

    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
    @pytest.mark.parametrize("target", QUANTIZED, ids=str)
    def test_scales_along_an_axis(self, axis: int, target: DataType) -> None:
        generator = np.random.default_rng(axis + 5)
        x = generator.normal(0, 40, (2, 3, 4)).astype(np.float32)
        count = x.shape[axis]
        scale = generator.uniform(0.5, 3, count).astype(np.float32)
        bias = generator.integers(-5, 5, count).astype(np.int32)
        extents = [1, 1, 1]
        extents[axis] = count
        exact = scale.astype(np.float64).reshape(extents) * x + bias.reshape(extents)
        wanted = np.clip(np.rint(exact), *ENDS[target])
        y = quantize(tensor(x), target, scale=tensor(scale), bias=tensor(bias, INT32), axis=axis)
        np.testing.assert_array_equal(y.numpy(), wanted)
        assert y.numpy().dtype == target.debug_description

    @pytest.mark.parametrize(
        "scale",
        [
            [2.0, 4.0],
            (2, 4),
            np.array([2, 4]),
            np.array([[2.0], [4.0]], np.float32),
            torch.tensor([2.0, 4.0], requires_grad=True),
            torch.tensor([2, 4], dtype=torch.bfloat16),
            tensor([[[2.0, 4.0]]]),
            tensor([2, 4], INT8),
        ],
        ids=["list", "tuple", "integers", "column", "torch", "bfloat16", "Tensor", "int8 Tensor"],
    )
    def test_scales_in_every_form(self, scale: Any) -> None:
        y = quantize(tensor([[1, 2], [3, 4]]), INT8, scale=scale, bias=1, axis=0)
        assert y.numpy().tolist() == [[3, 5], [13, 17]]

    def test_a_tensor_of_one_number_serves_the_whole(self) -> None:
        y = quantize(tensor([[1, 2], [3, 4]]), UINT8, scale=tensor([10]), bias=tensor([[5]], INT32))
        assert y.numpy().tolist() == [[15, 25], [35, 45]]

    def test_source_stays_as_it_is(self) -> None:
        x = tensor([1.25, -1.25])
        y = quantize(x, INT8, scale=10, bias=0)
        assert x.numpy().tolist() == [1.25, -1.25]
        assert x.tensor_id != y.tensor_id

    def test_sequence_lengths_stay(self) -> None:
        descriptor = TensorDescriptor((2, 3, 1), sequence_lengths=(3, 2), sorted_sequences=True)
        y = quantize(Tensor(descriptor, fill=1.0), INT8, scale=3, bias=0)
        assert y.descriptor.sequence_lengths == (3, 2)
        assert y.descriptor.sorted_sequences

    @pytest.mark.gpu
    def test_tensor_on_a_gpu(self) -> None:
        x = Tensor((2,), data=torch.tensor([1.0, 2.0], device="cuda"))
        assert quantize(x, INT8, scale=3, bias=1).numpy().tolist() == [4, 7]


class TestDequantize:
    @pytest.mark.parametrize("source", QUANTIZED, ids=str)
    def test_equation(self, source: DataType) -> None:
        y = np.array([[0, 1, 127], [100, 3, 50]])
        x = dequantize(tensor(y, source), FLOAT32, scale=0.3, bias=7)
        assert x.data_type is FLOAT32
        np.testing.assert_array_equal(x.numpy(), ((y - 7) / 0.3).astype(np.float32))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_scales_along_an_axis(self, axis: int) -> None:
        y, scale, bias = np.arange(9).reshape(3, 3), np.array([1.0, -2.0, 4.0]), np.array([3, 2, 1])
        x = dequantize(tensor(y, UINT8), "float32", scale=tensor(scale), bias=tensor(bias, INT32), axis=axis)
        shape = (3, 1) if axis == 0 else (1, 3)
        np.testing.assert_array_equal(x.numpy(), (y - bias.reshape(shape)) / scale.reshape(shape))

    def test_bias_stands_for_zero(self) -> None:
        y = quantize(tensor([0.0]), UINT8, scale=12.3, bias=99)
        assert y.numpy().tolist() == [99]
        assert dequantize(y, FLOAT32, scale=12.3, bias=99).numpy().tolist() == [0.0]

    def test_differences_of_extreme_numbers_are_exact(self) -> None:
        x = dequantize(tensor([-(2**31)], INT32), FLOAT32, scale=1, bias=2**31 - 1)
        assert x.numpy().tolist() == [np.float32(-(2.0**32) + 1)]


X, Y = tensor([[1, 2, 3], [4, 5, 6]]), tensor([[1, 2, 3], [4, 5, 6]], INT8)


@pytest.mark.parametrize(
    ("call", "source", "target", "keywords", "error", "words"),
    [
        (quantize, X, "int64", {}, DataTypeError, "nothing is quantized to int64"),
        (quantize, X, "float32", {}, DataTypeError, "Fix: use int8, uint8, int32."),
        (quantize, X, "boolean", {}, DataTypeError, "nothing is quantized to boolean"),
        (quantize, Y, "int8", {}, DataTypeError, "nothing is quantized from int8"),
        (quantize, tensor([1], DataType.FLOAT64), "int8", {}, DataTypeError, "quantized from float64"),
        (quantize, tensor([1], DataType.FLOAT16), "int8", {}, DataTypeError, "Fix: use float32."),
        (dequantize, Y, "float16", {}, DataTypeError, "nothing is dequantized to float16"),
        (dequantize, Y, "int32", {}, DataTypeError, "Fix: use float32."),
        (dequantize, X, "float32", {}, DataTypeError, "nothing is dequantized from float32"),
        (dequantize, tensor([1], DataType.INT64), "float32", {}, DataTypeError, "dequantized from int64"),
        (quantize, X, "int8", {"scale": 0}, ArgumentError, "the scale is 0.0"),
        (quantize, X, "int8", {"scale": [1, 0.0, 2], "axis": 1}, ArgumentError, "the scale is [1.0, 0.0, 2.0]"),
        (dequantize, Y, "float32", {"scale": tensor([0.0])}, ArgumentError, "pass numbers that are finite, and not 0"),
        (quantize, X, "int8", {"scale": math.nan}, ArgumentError, "the scale is nan"),
        (quantize, X, "int8", {"bias": math.inf}, ArgumentError, "the bias is inf"),
        (quantize, X, "int8", {"scale": [1.0, 2.0]}, ShapeError, "the scale has 2 numbers for a tensor [2, 3]"),
        (dequantize, Y, "float32", {"bias": tensor([1, 2, 3])}, ShapeError, "the bias has 3 numbers"),
        (quantize, X, "int8", {"scale": [1, 2, 3], "axis": 0}, ShapeError, "the scale has shape [3], axis 0 of the"),
        (quantize, X, "int8", {"bias": tensor([1]), "axis": -1}, ShapeError, "pass 3 numbers, or one number for all"),
        (quantize, X, "int8", {"scale": np.ones((2, 3)), "axis": 0}, ShapeError, "the scale has shape [2, 3]"),
        (quantize, X, "int8", {"scale": torch.ones(0), "axis": 0}, ShapeError, "the scale has shape [0]"),
        (quantize, X, "int8", {"axis": 2}, ArgumentError, "the axis is 2, but the shape is [2, 3]"),
        (dequantize, Y, "float32", {"axis": -3}, ArgumentError, "the axis is -3"),
        (quantize, X, "int8", {"axis": True}, ArgumentError, "the axis is True"),
        (quantize, X, "int8", {"axis": 1.0}, ArgumentError, "the axis is 1.0"),
        (quantize, X, "int8", {"scale": "2"}, DataTypeError, "the scale is '2'"),
        (quantize, X, "int8", {"bias": None}, DataTypeError, "the bias is None"),
        (quantize, X, "int8", {"scale": True}, DataTypeError, "the scale is True"),
        (quantize, X, "int8", {"scale": [[1.0], [2.0, 3.0]], "axis": 0}, DataTypeError, "the scale is [[1.0], [2.0"),
        (quantize, X, "int8", {"scale": torch.ones(2, dtype=torch.bool), "axis": 0}, DataTypeError, "the scale is"),
        (quantize, tensor([1, math.nan, math.nan]), "int8", {}, DataError, "2 elements are NaN"),
        (quantize, Tensor((2,)), "int8", {}, StateError, "there is no data"),
        (quantize, X, "int8", {"scale": Tensor((2,)), "axis": 0}, StateError, "there is no data"),
    ],
)
def test_refused(
    call: Any, source: Tensor, target: str, keywords: dict[str, Any], error: type[StepgraphError], words: str
) -> None:
    with pytest.raises(error) as raised:
        call(source, target, **{"scale": 1.0, "bias": 0} | keywords)
    assert words in str(raised.value)


@st.composite
def drawn_problems(draw: st.DrawFn) -> tuple[np.ndarray, DataType, np.ndarray, np.ndarray, int | None]:
    """Values, a type, and scales and biases for the whole (axis None) or along an axis."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axis = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    count = 1 if axis is None else shape[axis]
    quarter = st.integers(-2000, 2000).map(lambda n: n / 4)  # often a tie
    real = st.floats(width=32, allow_nan=False)
    size = st.sampled_from([0.5, 1.0, 2.0, -1.0]) | st.floats(2.0**-10, 2.0**10, width=32)
    values = draw(st.lists(quarter | real, min_size=math.prod(shape), max_size=math.prod(shape)))
    scale = draw(st.lists(size, min_size=count, max_size=count))
    bias = draw(st.lists(st.integers(-300, 300), min_size=count, max_size=count))
    x = np.array(values, np.float32).reshape(shape)
    return x, draw(st.sampled_from(QUANTIZED)), np.array(scale, np.float32), np.array(bias, np.int32), axis


def there_and_back(problem: tuple[np.ndarray, DataType, np.ndarray, np.ndarray, int | None]) -> None:
    """Every element is rounded right, and comes back within half a step unless it did not fit."""
    x, target, scale, bias, axis = problem
    how = {"scale": tensor(scale), "bias": tensor(bias, INT32), "axis": axis}
    y = quantize(tensor(x), target, **how)  # type: ignore[arg-type]
    back = dequantize(y, FLOAT32, **how)  # type: ignore[arg-type]
    assert y.shape == back.shape == x.shape
    low, high = ENDS[target]
    for index in np.ndindex(x.shape):
        place = 0 if axis is None else index[axis]
        s, b = float(scale[place]), int(bias[place])
        whole = int(y.numpy()[index])
        # The product of two float32 is exact in float64; the sum with the bias may need one more rounding.
        assert abs(whole - exactly(float(x[index]), s, b, target)) <= (not is_exact(float(x[index]), s, b))
        if low < whole < high:
            slack = abs(float(x[index])) * 2.0**-23 + 1e-30
            assert abs(float(back.numpy()[index]) - float(x[index])) <= 0.5 / abs(s) + slack


@given(drawn_problems())
@settings(max_examples=40, deadline=None)
def test_there_and_back(problem: tuple[np.ndarray, DataType, np.ndarray, np.ndarray, int | None]) -> None:
    there_and_back(problem)


@pytest.mark.deep
@given(drawn_problems())
@settings(max_examples=500, deadline=None)
def test_there_and_back_deep(problem: tuple[np.ndarray, DataType, np.ndarray, np.ndarray, int | None]) -> None:
    there_and_back(problem)
