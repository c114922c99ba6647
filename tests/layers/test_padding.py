"""Padding: the original's arrays, letters in their places, the whole space of settings, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Scope
from stepgraph.layers.padding import PADDINGS, PaddingLayer, PaddingType
from stepgraph.tensors.tensor import TensorDescriptor
from tests.layers.cases_padding import Sides, padded

NAMES = {"ZERO": "constant", "CONSTANT": "constant", "REFLECT": "reflect", "SYMMETRIC": "symmetric"}
FACTORIES: list[Callable[[Any], PaddingLayer]] = [
    PaddingLayer.zero,
    PaddingLayer.reflection,
    PaddingLayer.symmetric,
    lambda padding: PaddingLayer.constant(padding, 3),
]


def forward(layer: PaddingLayer, x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, scope=Scope({}))


def test_raw_values_and_descriptions() -> None:
    assert [(int(kind), kind.name, kind.debug_description) for kind in PaddingType] == [
        (0, "ZERO", "Zero"),
        (1, "REFLECT", "Reflect"),
        (2, "SYMMETRIC", "Symmetric"),
        (3, "CONSTANT", "Constant"),
    ]


def test_every_type_has_a_function_and_a_factory() -> None:
    assert set(PADDINGS) == set(PaddingType) == {factory([1]).padding_type for factory in FACTORIES}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    ("padding", "sides"),
    [
        (2, (2, 2, 2, 2)),
        ([2], (2, 2, 2, 2)),
        ([1, 2], (0, 0, 1, 2)),
        ((1, 2, 3, 4), (1, 2, 3, 4)),
        (np.array([1, 2, 3, 4]).tolist(), (1, 2, 3, 4)),
    ],
)
def test_arrays_of_the_original(factory: Callable[[Any], PaddingLayer], padding: Any, sides: Sides) -> None:
    layer = factory(padding)
    assert (layer.padding_top, layer.padding_bottom, layer.padding_left, layer.padding_right) == sides
    assert layer.constant_value == (3.0 if layer.padding_type is PaddingType.CONSTANT else 0.0)


@pytest.mark.parametrize("padding", [[], [1, 2, 3], (1,) * 5])
def test_other_arrays_are_refused(padding: Any) -> None:
    with pytest.raises(ArgumentError, match=f"has {len(padding)} entries"):
        PaddingLayer.zero(padding)


def test_letters_in_their_places() -> None:
    a, b, c = 1.0, 2.0, 3.0
    x = torch.tensor([a, b, c]).view(1, 1, 1, 3)
    assert forward(PaddingLayer.reflection([2, 2]), x).flatten().tolist() == [c, b, a, b, c, b, a]
    assert forward(PaddingLayer.symmetric([2, 2]), x).flatten().tolist() == [b, a, a, b, c, c, b]
    assert forward(PaddingLayer.symmetric([3, 0]), x).flatten().tolist() == [c, b, a, a, b, c]
    assert forward(PaddingLayer.constant([1, 2], 9), x).flatten().tolist() == [9, a, b, c, 9, 9]
    assert forward(PaddingLayer.zero([1, 0]), x).flatten().tolist() == [0, a, b, c]


def test_gradient_counts_the_mirror_images() -> None:
    x = torch.zeros(1, 1, 1, 3, requires_grad=True)
    for layer, counts in (
        (PaddingLayer.zero([2, 2]), [1, 1, 1]),
        (PaddingLayer.reflection([2, 1]), [1, 3, 2]),
        (PaddingLayer.symmetric([2, 1]), [2, 2, 2]),
        (PaddingLayer.symmetric([3, 3]), [3, 3, 3]),
    ):
        assert torch.autograd.grad(forward(layer, x).sum(), x)[0].flatten().tolist() == counts


def test_no_symmetric_padding_is_no_operator() -> None:
    traced = make_fx(lambda x: forward(PaddingLayer.symmetric([0, 2]), x))(torch.zeros(1, 1, 4, 4))
    assert sum("cat" in str(node.target) for node in traced.graph.nodes) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PaddingLayer.zero(-1), "padding_left is -1"),
        (lambda: PaddingLayer.zero([0, 1.5]), "padding_right is 1.5"),
        (lambda: PaddingLayer(0), "padding_type is 0"),
        (lambda: PaddingLayer.constant(1, float("nan")), "constant_value is nan"),
        (lambda: PaddingLayer.constant(1, "x"), "constant_value is 'x'"),
    ],
)
def test_refused_settings(make: Callable[[], PaddingLayer], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_labels() -> None:
    assert PaddingLayer.zero(1).label == "Padding"
    assert PaddingLayer.constant(1, 2, label="frame").label == "frame"


Drawn = tuple[PaddingType, Sides, int, int]


@st.composite
def paddings(draw: st.DrawFn) -> Drawn:
    """Any padding of a small image, some of them too wide."""
    sides = draw(st.tuples(*[st.integers(0, 5)] * 4))
    return draw(st.sampled_from(list(PaddingType))), sides, draw(st.integers(1, 6)), draw(st.integers(1, 6))


def is_right(drawn: Drawn) -> None:
    kind, sides, height, width = drawn
    top, bottom, left, right = sides
    value = 2.5 if kind is PaddingType.CONSTANT else 0.0
    layer = PaddingLayer(
        kind, padding_top=top, padding_bottom=bottom, padding_left=left, padding_right=right, constant_value=value
    )
    source = TensorDescriptor((2, 1, height, width))
    border = {PaddingType.REFLECT: 1, PaddingType.SYMMETRIC: 0}.get(kind, -100)
    if max(top, bottom) > height - border or max(left, right) > width - border:
        with pytest.raises(ShapeError, match="to mirror"):
            layer.infer(source)
        return
    assert layer.infer(source)[0].shape == (2, 1, top + height + bottom, left + width + right)
    places = np.arange(2.0 * height * width).reshape(source.shape)
    x = torch.from_numpy(places).requires_grad_()
    y, wanted = forward(layer, x), padded(places, sides, NAMES[kind.name], np.nan)
    np.testing.assert_array_equal(y.detach().numpy(), np.nan_to_num(wanted, nan=value))
    weights = np.random.default_rng(top + 7 * left).integers(-4, 5, wanted.shape).astype(float)
    (gradient,) = torch.autograd.grad(y, x, torch.from_numpy(weights))
    sums = [weights[wanted == place].sum() for place in places.flat]
    np.testing.assert_array_equal(gradient.flatten().numpy(), sums)


@given(paddings())
@settings(max_examples=25, deadline=None)
def test_any_padding_is_right(drawn: Drawn) -> None:
    is_right(drawn)


@pytest.mark.deep
@given(paddings())
@settings(max_examples=400, deadline=None)
def test_many_paddings_are_right(drawn: Drawn) -> None:
    is_right(drawn)
