"""Upsampling: corners, exact nearest pixels, the whole space of sizes, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Scope
from stepgraph.layers.upsample import SampleMode, UpsampleLayer
from stepgraph.tensors.tensor import TensorDescriptor
from tests.layers.cases_upsample import linear, nearest


def forward(layer: UpsampleLayer, x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, scope=Scope({}))


def test_raw_values_and_descriptions() -> None:
    assert [(int(mode), mode.name, mode.debug_description) for mode in SampleMode] == [
        (0, "NEAREST", "Nearest"),
        (1, "LINEAR", "Linear"),
    ]


def test_settings_and_defaults() -> None:
    plain, full = UpsampleLayer([6]), UpsampleLayer([4, 6], SampleMode.LINEAR, True, label="larger")
    assert (plain.shape, plain.sample_mode, plain.aligns_corners, plain.label) == (
        (6,),
        SampleMode.NEAREST,
        False,
        "Upsampling",
    )
    assert (full.shape, full.sample_mode, full.aligns_corners, full.label) == (
        (4, 6),
        SampleMode.LINEAR,
        True,
        "larger",
    )


def test_corners_are_aligned_only_when_told() -> None:
    x = torch.tensor([0.0, 6.0]).view(1, 1, 1, 2)
    assert forward(UpsampleLayer.linear([4], aligns_corners=True), x).flatten().tolist() == [0, 2, 4, 6]
    assert forward(UpsampleLayer.linear([4]), x).flatten().tolist() == [0, 1.5, 4.5, 6]


def test_nearest_does_not_read_aligns_corners() -> None:
    x = torch.randn(1, 2, 3, 4)
    plain, aligned = (UpsampleLayer((5, 5), SampleMode.NEAREST, aligned) for aligned in (False, True))
    assert torch.equal(forward(plain, x), forward(aligned, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(14, 46), (2, 82), (3, 123), (5, 7), (64, 200), (7, 3)])
def test_nearest_pixels_are_exact(n: int, m: int, dtype: torch.dtype) -> None:
    x = torch.arange(n, dtype=dtype).view(1, 1, n, 1).requires_grad_()
    y = forward(UpsampleLayer((m, 1)), x)
    pixels = [p * n // m for p in range(m)]
    assert y.flatten().tolist() == pixels
    assert torch.autograd.grad(y.sum(), x)[0].flatten().tolist() == [pixels.count(i) for i in range(n)]


def test_pytorch_is_off_by_one_where_the_docstring_says() -> None:
    x = torch.arange(14.0).view(1, 1, 1, 14)
    off = F.interpolate(x, (1, 46)) != forward(UpsampleLayer([46]), x)
    assert 0 < off.sum() < 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((),), r"the shape \(\) has 0 dimensions"),
        (((1, 2, 3),), r"the shape \(1, 2, 3\) has 3 dimensions"),
        (((0, 2),), "an extent of the shape is 0"),
        (((2.5,),), "an extent of the shape is 2.5"),
        (((2, 2), 1), "sample_mode is 1"),
    ],
)
def test_refused_settings(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        UpsampleLayer(*arguments)


Drawn = tuple[UpsampleLayer, tuple[int, int]]


@st.composite
def upsamplings(draw: st.DrawFn) -> Drawn:
    """Any mode between any two small sizes, up or down."""
    sizes = st.integers(1, 9)
    shape = draw(st.lists(st.integers(1, 20), min_size=1, max_size=2))
    layer = UpsampleLayer(tuple(shape), draw(st.sampled_from(list(SampleMode))), draw(st.booleans()))
    return layer, (draw(sizes), draw(sizes))


def is_right(drawn: Drawn) -> None:
    layer, (height, width) = drawn
    size = (height, *layer.shape)[-2:]
    assert layer.infer(TensorDescriptor((2, 1, height, width)))[0].shape == (2, 1, *size)
    x = torch.randn(2, 1, height, width, dtype=torch.float64, requires_grad=True)
    y = forward(layer, x)
    rows, columns = (
        nearest(m, n) if layer.sample_mode is SampleMode.NEAREST else linear(m, n, layer.aligns_corners)
        for m, n in zip(size, (height, width), strict=True)
    )
    wanted = np.einsum("nchw,yh,xw->ncyx", x.detach().numpy(), rows, columns)
    np.testing.assert_allclose(y.detach().numpy(), wanted, rtol=1e-9, atol=1e-10)
    (gradient,) = torch.autograd.grad(y, x, y.detach())
    np.testing.assert_allclose(
        gradient.numpy(), np.einsum("ncyx,yh,xw->nchw", wanted, rows, columns), rtol=1e-9, atol=1e-10
    )


@given(upsamplings())
@settings(max_examples=25, deadline=None)
def test_any_upsampling_is_right(drawn: Drawn) -> None:
    is_right(drawn)


@pytest.mark.deep
@given(upsamplings())
@settings(max_examples=400, deadline=None)
def test_many_upsamplings_are_right(drawn: Drawn) -> None:
    is_right(drawn)
