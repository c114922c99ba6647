"""Reshape and the batch, split settings, every data type, refusals in constructors."""

from collections.abc import Callable

import pytest
import torch

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import ConcatenationLayer, ReshapeLayer, SplitLayer, TransposeLayer
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType


def reshaped(shape: tuple[int, ...], source: tuple[int, ...], batch: tuple[int, int]) -> tuple[int, ...]:
    return ReshapeLayer(shape).infer(TensorDescriptor(source), batch=batch)[0].shape


def test_first_extent_follows_the_batch() -> None:
    assert reshaped((8, 12), (8, 3, 4), (8, 8)) == (8, 12)
    assert reshaped((8, 12), (5, 3, 4), (8, 5)) == (5, 12)
    assert reshaped((8, -1), (16, 3, 4), (8, 16)) == (16, 12)
    assert reshaped((8, 3, 4), (5 * 3, 4), (8, 5)) == (5, 3, 4)


def test_source_that_is_no_batch_keeps_its_shape() -> None:
    assert reshaped((8, -1), (8, 3, 4), (8, 4)) == (8, 12)
    assert reshaped((6, 4), (8, 3), (8, 4)) == (6, 4)


def test_shape_that_does_not_follow_is_refused_and_not_guessed() -> None:
    with pytest.raises(ShapeError, match=r"60 elements cannot take the shape \[96\]"):
        reshaped((96,), (5, 3, 4), (8, 5))


@pytest.mark.parametrize("data_type", list(DataType))
def test_every_data_type_is_taken(data_type: DataType) -> None:
    source = TensorDescriptor((4, 6), data_type)
    for layer in (ReshapeLayer((6, 4)), TransposeLayer((1, 0)), ConcatenationLayer(), SplitLayer(2)):
        assert {one.data_type for one in layer.infer(source)} == {data_type}
        assert layer.supports_data_type(data_type)


def test_split_settings() -> None:
    by_count, by_lengths = SplitLayer(3, dimension=0), SplitLayer(split_section_lengths=[2, 1])
    assert (by_count.split_count, by_count.split_section_lengths, by_count.dimension) == (3, None, 0)
    assert (by_lengths.split_count, by_lengths.split_section_lengths, by_lengths.dimension) == (2, (2, 1), 1)


def test_parts_are_views_and_cost_no_copy() -> None:
    x = torch.zeros(4, 6)
    assert all(part.data_ptr() != 0 and part._base is x for part in SplitLayer(2).forward(x, scope=Scope({})))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ReshapeLayer(()), "the shape has 0 dimensions"),
        (lambda: ReshapeLayer((1,) * 6), "the shape has 6 dimensions"),
        (lambda: ReshapeLayer((2, 0)), r"the shape is \(2, 0\)"),
        (lambda: ReshapeLayer((-1, -1)), r"the shape is \(-1, -1\)"),
        (lambda: ReshapeLayer((2, -2)), "an extent of the shape is -2"),
        (lambda: ReshapeLayer((2, 1.5)), "an extent of the shape is 1.5"),
        (lambda: TransposeLayer((0, 0)), r"dimensions are \(0, 0\)"),
        (lambda: TransposeLayer((1, 2)), r"dimensions are \(1, 2\)"),
        (lambda: TransposeLayer(()), r"dimensions are \(\)"),
        (lambda: ConcatenationLayer(-1), "dimension is -1"),
        (SplitLayer, "split_count is None and split_section_lengths are None"),
        (lambda: SplitLayer(3, (1, 1)), "pass exactly one of them"),
        (lambda: SplitLayer(0), "split_count is 0"),
        (lambda: SplitLayer(split_section_lengths=(2, 0)), "a section length is 0"),
        (lambda: SplitLayer(split_section_lengths=()), "split_count is 0"),
    ],
)
def test_refused_settings(make: Callable[[], Layer], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_labels() -> None:
    layers = (ReshapeLayer((1,)), TransposeLayer((0,)), ConcatenationLayer(), SplitLayer(2))
    assert [layer.label for layer in layers] == ["Reshape", "Transpose", "Concat", "Split"]
    assert SplitLayer(2, label="halves").label == "halves"
