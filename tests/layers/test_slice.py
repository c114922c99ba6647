"""Slices: the batch, views, every legal slice, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Scope
from stepgraph.layers.shape import SliceLayer
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType


def test_missing_stride_is_one() -> None:
    layer = SliceLayer([1, 0], [3, 2], label="cut")
    assert (layer.start, layer.end, layer.stride, layer.label) == ((1, 0), (3, 2), (1, 1), "cut")
    assert SliceLayer((0,), (1,)).label == "Slice"


def sliced(start: int, end: int, rows: int, batch: tuple[int, int]) -> int:
    return SliceLayer((start, 0), (end, 2)).infer(TensorDescriptor((rows, 3)), batch=batch)[0].shape[0]


def test_end_of_the_batch_follows_the_batch() -> None:
    assert sliced(0, 8, 8, (8, 8)) == 8
    assert sliced(0, 8, 5, (8, 5)) == 5
    assert sliced(0, 8, 16, (8, 16)) == 16
    assert sliced(2, 8, 5, (8, 5)) == 3


def test_other_ends_and_other_sources_do_not_follow() -> None:
    assert sliced(0, 4, 5, (8, 5)) == 4
    assert sliced(0, 8, 8, (8, 5)) == 8
    assert sliced(0, 8, 20, (8, 5)) == 8


def test_batch_that_is_too_small_is_refused() -> None:
    with pytest.raises(ShapeError, match="dimension 0 is sliced from 0 to 6, but the source has 5"):
        sliced(0, 6, 5, (8, 5))
    with pytest.raises(ShapeError, match="dimension 0 is sliced from 6 to 5, but the source has 5"):
        sliced(6, 8, 5, (8, 5))


@pytest.mark.parametrize("batch_size", [2, 4, 6])
def test_other_batch_sizes_in_a_graph(batch_size: int) -> None:
    graph, x = sg.Graph(), sg.Tensor((4, 3))
    y = graph.node(SliceLayer((0, 1), (4, 3)), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    inference.compile(sg.Device.cpu())
    rows = np.arange(18, dtype=np.float32).reshape(6, 3)[:batch_size]
    result = np.zeros((batch_size, 2), np.float32)
    inference.execute({"x": rows}, outputs_data={"y": result}, batch_size=batch_size).wait()
    np.testing.assert_array_equal(result, rows[:, 1:])


@pytest.mark.parametrize("data_type", list(DataType))
def test_every_data_type_is_taken(data_type: DataType) -> None:
    (promised,) = SliceLayer((0, 1), (2, 3)).infer(TensorDescriptor((4, 6), data_type))
    assert (promised.shape, promised.data_type) == ((2, 2), data_type)


def test_a_slice_is_a_view_and_costs_no_copy() -> None:
    x = torch.zeros(4, 6)
    assert SliceLayer((1, 0), (4, 6), (2, 3)).forward(x, scope=Scope({}))._base is x


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((), ()), "start has 0 entries, end 0, stride 0"),
        (((0,), (1, 2)), "start has 1 entries, end 2, stride 1"),
        (((0,), (1,), (1, 1)), "start has 1 entries, end 1, stride 2"),
        (((-1,), (1,)), "a start is -1"),
        (((0,), (-1,)), "an end is -1"),
        (((0,), (1,), (0,)), "a stride is 0"),
        (((0,), (1,), (-1,)), "a stride is -1"),
        (((0, 2), (1, 2)), "dimension 1 starts at 2 and ends before 2"),
        (((0,), (1.5,)), "an end is 1.5"),
    ],
)
def test_refused_settings(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        SliceLayer(*arguments)


Drawn = tuple[tuple[int, ...], list[tuple[int, int, int]]]


@st.composite
def slices(draw: st.DrawFn) -> Drawn:
    """Any legal slice of a small source."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    cuts = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        cuts.append((start, draw(st.integers(start + 1, extent)), draw(st.integers(1, 4))))
    return shape, cuts


def is_right(drawn: Drawn) -> None:
    shape, cuts = drawn
    layer = SliceLayer(*zip(*cuts, strict=True))
    x = torch.arange(float(np.prod(shape))).view(shape).requires_grad_()
    y = layer.forward(x, scope=Scope({}))
    picked = [range(*cut) for cut in cuts]
    wanted = x.detach().numpy()[np.ix_(*picked)]
    assert layer.infer(TensorDescriptor(shape))[0].shape == wanted.shape
    np.testing.assert_array_equal(y.detach().numpy(), wanted)
    (gradient,) = torch.autograd.grad(y, x, y.detach() + 1)
    np.testing.assert_array_equal(gradient.numpy(), np.where(np.isin(x.detach(), wanted), x.detach() + 1, 0))


@given(slices())
@settings(max_examples=25, deadline=None)
def test_any_slice_is_right(drawn: Drawn) -> None:
    is_right(drawn)


@pytest.mark.deep
@given(slices())
@settings(max_examples=400, deadline=None)
def test_many_slices_are_right(drawn: Drawn) -> None:
    is_right(drawn)
