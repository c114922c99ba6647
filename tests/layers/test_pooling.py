"""Pooling beyond the table: descriptors, factories, the whole space of settings, ties and zero windows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Scope
from stepgraph.layers.pooling import POOLINGS, PoolingDescriptor, PoolingLayer, PoolingType
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import PaddingPolicy
from tests.layers.cases_pooling import Setting, distinct


def test_type_has_the_raw_values_and_descriptions_of_the_original() -> None:
    assert [(kind.name, int(kind), kind.debug_description) for kind in PoolingType] == [
        ("MAX", 1, "Max"),
        ("AVERAGE", 2, "Average"),
        ("L2_NORM", 3, "L2 Norm"),
    ]


def test_every_type_has_a_function() -> None:
    assert set(POOLINGS) == set(PoolingType)


def test_plain_descriptor_has_the_defaults_of_the_original() -> None:
    descriptor = PoolingDescriptor(PoolingType.AVERAGE, 2, 1)
    assert (descriptor.kernel_height, descriptor.kernel_width) == (2, 2)
    assert (descriptor.stride_in_y, descriptor.stride_in_x) == (1, 1)
    assert (descriptor.dilation_rate_in_y, descriptor.dilation_rate_in_x) == (1, 1)
    assert (descriptor.padding_size_in_y, descriptor.padding_size_in_x) == (0, 0)
    assert descriptor.padding_policy is PaddingPolicy.SAME
    assert descriptor.count_includes_padding is False


def test_missing_strides_are_the_kernel_sizes() -> None:
    assert PoolingDescriptor(PoolingType.MAX, (2, 3)).strides == (2, 3)
    assert PoolingLayer.max((2, 3)).descriptor.strides == (2, 3)
    assert PoolingLayer.max((2, 3), 1).descriptor.strides == (1, 1)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (PoolingLayer.max, PoolingType.MAX),
        (PoolingLayer.average, PoolingType.AVERAGE),
        (PoolingLayer.l2_norm, PoolingType.L2_NORM),
    ],
)
def test_factories_pad_only_when_told(factory: type, kind: PoolingType) -> None:
    layer = factory(3, 2, dilation_rates=(1, 2), label="pool")
    assert (layer.descriptor.type, layer.label) == (kind, "pool")
    assert layer.descriptor.padding_policy is PaddingPolicy.VALID
    assert layer.descriptor.dilation_rates == (1, 2)
    sized = factory(3, 2, padding_sizes=1).descriptor
    assert (sized.padding_policy, sized.padding_sizes) == (PaddingPolicy.USE_PADDING_SIZE, (1, 1))
    assert factory(3, padding_policy=PaddingPolicy.SAME).descriptor.padding_policy is PaddingPolicy.SAME


def test_average_counts_padding_when_told() -> None:
    x = torch.ones(1, 1, 2, 2)
    for counts, corner in ((True, 4 / 9), (False, 1.0)):
        layer = PoolingLayer.average(3, 1, padding_policy=PaddingPolicy.SAME, count_includes_padding=counts)
        assert forward(layer, x)[0, 0, 0, 0].item() == pytest.approx(corner)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"kernel_sizes": 0}, "kernel_sizes is 0"),
        ({"kernel_sizes": 2, "strides": (1, 0)}, "strides is (1, 0)"),
        ({"kernel_sizes": 2, "dilation_rates": 0}, "dilation_rates is 0"),
        ({"kernel_sizes": 2, "padding_sizes": -1}, "padding_sizes is -1"),
    ],
)
def test_descriptor_refuses_by_name(keywords: dict, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        PoolingDescriptor(PoolingType.MAX, **keywords)
    assert words in str(raised.value)


def test_padding_is_never_the_largest() -> None:
    x = -torch.ones(1, 1, 3, 3)
    assert (forward(PoolingLayer.max(3, 2, padding_policy=PaddingPolicy.SAME), x) == -1).all()
    assert (forward(PoolingLayer.max(2, 1, padding_policy=PaddingPolicy.SAME), x) == -1).all()
    assert (forward(PoolingLayer.max(2, 1, padding_sizes=1), x) == -1).all()


@pytest.mark.parametrize("policy", [PaddingPolicy.VALID, PaddingPolicy.SAME])
def test_gradient_goes_to_the_first_of_equal_pixels(policy: PaddingPolicy) -> None:
    x = torch.ones(1, 1, 3, 3, requires_grad=True)
    forward(PoolingLayer.max(3, 3, padding_policy=policy), x).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1.0] + [0.0] * 8


@pytest.mark.parametrize("dilation", [1, 2])
def test_gradient_of_the_norm_is_zero_on_a_zero_window(dilation: int) -> None:
    x = torch.zeros(1, 1, 6, 6, requires_grad=True)
    y = forward(PoolingLayer.l2_norm(2, dilation_rates=dilation), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    assert not gradient.any()


def test_norm_does_not_hide_values_that_are_no_numbers() -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 0, 0] = torch.nan
    y = forward(PoolingLayer.l2_norm(2), x).flatten()
    assert torch.isnan(y[0])
    assert y[1] == 0


@pytest.mark.parametrize("kind", ["MAX", "AVERAGE", "L2_NORM"])
@pytest.mark.parametrize("counts", [False, True])
def test_common_windows_need_no_copy_of_the_image(kind: str, counts: bool) -> None:
    """Same padding with an odd total (kernel 3, stride 2, an even image) is one operator of PyTorch."""
    layer = Setting(kind, (3, 3), (2, 2), counts=counts).layer()
    traced = make_fx(lambda x: forward(layer, x))(torch.zeros(1, 2, 8, 8))
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert any("pool" in name for name in names)
    assert not any("_pad" in name or "convolution" in name for name in names)


@st.composite
def drawn_settings(draw: st.DrawFn) -> tuple[Setting, int, int]:
    """Any legal pooling of small size and an image for it."""
    pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
    setting = Setting(
        draw(st.sampled_from(["MAX", "AVERAGE", "L2_NORM"])),
        draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        draw(pairs),
        draw(pairs),
        draw(st.sampled_from(["SAME", "VALID", "USE_PADDING_SIZE"])),
        draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        draw(st.booleans()),
    )
    return setting, draw(st.integers(1, 8)), draw(st.integers(1, 8))


@given(drawn_settings())
@settings(max_examples=50, deadline=None)
def test_every_setting_gives_the_promised_shape_and_the_right_numbers(drawn: tuple[Setting, int, int]) -> None:
    setting, height, width = drawn
    layer, source = setting.layer(), TensorDescriptor((2, 3, height, width))
    result = setting.axis(height, 0)[0], setting.axis(width, 1)[0]
    if min(result) < 1 or not all(pixels for row in setting.windows(source.shape) for pixels in row):
        with pytest.raises(ShapeError):
            layer.infer(source)
        return
    assert layer.infer(source)[0].shape == (2, 3, *result)
    x = torch.from_numpy(distinct(*source.shape)(np.random.default_rng(height * 9 + width))).requires_grad_()
    y = forward(layer, x)
    np.testing.assert_allclose(y.detach().numpy(), setting.reference(x.detach().numpy()), rtol=1e-10, atol=1e-12)
    twin = windows_twin(x, setting, result)
    torch.testing.assert_close(y, twin, rtol=1e-10, atol=1e-12)
    ours, theirs = (torch.autograd.grad((one**2).sum(), x)[0] for one in (y, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def windows_twin(x: torch.Tensor, setting: Setting, result: tuple[int, int]) -> torch.Tensor:
    """The same through PyTorch's `unfold` of the padded image and of a mask of where the image is."""
    (_, top), (_, left) = setting.axis(x.shape[2], 0), setting.axis(x.shape[3], 1)

    def windows(image: torch.Tensor) -> torch.Tensor:
        reach = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(result, setting.stride, setting.kernel, setting.dilation, strict=True)
        ]
        padded = F.pad(image, (left, 30, top, 30))[..., : reach[0], : reach[1]]
        columns = F.unfold(padded, setting.kernel, setting.dilation, stride=setting.stride)
        return columns.unflatten(1, (image.shape[1], -1)).unflatten(-1, result)

    taps, inside = windows(x), windows(torch.ones_like(x))
    if setting.type == "MAX":
        return taps.masked_fill(inside == 0, -torch.inf).amax(2)
    if setting.type == "L2_NORM":
        return torch.linalg.vector_norm(taps, dim=2)
    return taps.sum(2) / (setting.kernel[0] * setting.kernel[1] if setting.counts else inside.sum(2))


def forward(layer: PoolingLayer, x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, scope=Scope({}, training=True))
