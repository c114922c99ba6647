"""Convolutions beyond the table: descriptors, the whole space of settings, parameter shapes, initialization."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.convolution import CONVOLUTIONS, ConvolutionDescriptor, ConvolutionLayer, ConvolutionType
from stepgraph.layers.layer import Scope
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import PaddingPolicy, RandomInitializerType
from tests.layers.cases_convolution import Setting

USE_PADDING_SIZE = PaddingPolicy.USE_PADDING_SIZE


def test_type_has_the_raw_values_and_descriptions_of_the_original() -> None:
    assert [(kind.name, int(kind), kind.debug_description) for kind in ConvolutionType] == [
        ("STANDARD", 0, "Standard"),
        ("TRANSPOSED", 1, "Transposed"),
        ("DEPTHWISE", 2, "Depthwise"),
    ]


def test_every_type_has_a_function() -> None:
    assert set(CONVOLUTIONS) == set(ConvolutionType)


def test_short_descriptor_has_the_defaults_of_the_original() -> None:
    descriptor = ConvolutionDescriptor(3, 4, 8)
    assert (descriptor.kernel_height, descriptor.kernel_width) == (3, 3)
    assert (descriptor.stride_in_y, descriptor.stride_in_x) == (1, 1)
    assert (descriptor.dilation_rate_in_y, descriptor.dilation_rate_in_x) == (1, 1)
    assert (descriptor.padding_size_in_y, descriptor.padding_size_in_x) == (0, 0)
    assert (descriptor.type, descriptor.group_count) == (ConvolutionType.STANDARD, 1)
    assert descriptor.padding_policy is PaddingPolicy.SAME
    assert not descriptor.is_convolution_transpose
    assert not descriptor.uses_depthwise_convolution


def test_pairs_are_height_then_width() -> None:
    # As measured on the original: kernelSizes [3, 5], strides [2, 1], dilationRates [1, 3], paddingSizes [4, 2].
    descriptor = ConvolutionDescriptor((3, 5), 1, 1, strides=[2, 1], dilation_rates=(1, 3), padding_sizes=(4, 2))
    assert (descriptor.kernel_height, descriptor.kernel_width) == (3, 5)
    assert (descriptor.stride_in_y, descriptor.stride_in_x) == (2, 1)
    assert (descriptor.dilation_rate_in_y, descriptor.dilation_rate_in_x) == (1, 3)
    assert (descriptor.padding_size_in_y, descriptor.padding_size_in_x) == (4, 2)


def test_descriptor_is_a_value() -> None:
    one, other = ConvolutionDescriptor(3, 4, 8), ConvolutionDescriptor((3, 3), 4, 8, strides=(1, 1))
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.group_count = 2  # type: ignore[misc]


def test_factories_set_type_and_channels() -> None:
    transposed = ConvolutionDescriptor.transposed((2, 3), 4, 6, strides=2, group_count=2)
    assert transposed.is_convolution_transpose
    assert (transposed.input_feature_channel_count, transposed.output_feature_channel_count) == (4, 6)
    assert transposed.strides == (2, 2)
    depthwise = ConvolutionDescriptor.depthwise(3, 4, 2, dilation_rates=2)
    assert depthwise.uses_depthwise_convolution
    assert (depthwise.output_feature_channel_count, depthwise.group_count) == (8, 1)
    assert ConvolutionDescriptor.depthwise(3, 4).output_feature_channel_count == 4


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        ((0, 1, 1), {}, "kernel_sizes is 0"),
        (((3, 3, 3), 1, 1), {}, "kernel_sizes is (3, 3, 3)"),
        ((3, 0, 1), {}, "input_feature_channel_count is 0"),
        ((3, 1, -2), {}, "output_feature_channel_count is -2"),
        ((3, True, 1), {}, "input_feature_channel_count is True"),
        ((3, 4, 4), {"group_count": 0}, "group_count is 0"),
        ((3, 4, 4), {"strides": 0}, "strides is 0"),
        ((3, 4, 4), {"dilation_rates": (1, 0)}, "dilation_rates is (1, 0)"),
        ((3, 4, 4), {"padding_sizes": -1}, "padding_sizes is -1"),
        ((3, 4, 6), {"group_count": 4}, "4 groups do not divide 4 input and 6 output"),
        ((3, 6, 4), {"group_count": 4}, "4 groups do not divide 6 input and 4 output"),
        ((3, 4, 6), {"type": ConvolutionType.DEPTHWISE}, "cannot take 4 channels to 6"),
        ((3, 4, 4), {"type": ConvolutionType.DEPTHWISE, "group_count": 4}, "group_count 4"),
    ],
)
def test_descriptor_refuses_by_name(arguments: tuple, keywords: dict, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        ConvolutionDescriptor(*arguments, **keywords)
    assert words in str(raised.value)
    assert "Fix:" in str(raised.value)


@pytest.mark.parametrize(
    ("weights", "biases", "words"),
    [
        ((8, 4, 3, 3), None, "the weights hold 288 numbers, but the descriptor needs 144"),
        ((8, 2, 3, 3), (4,), "the biases hold 4 numbers, but the descriptor needs 8"),
    ],
)
def test_layer_refuses_parameters_of_another_size(weights: tuple, biases: tuple | None, words: str) -> None:
    bias = None if biases is None else Tensor(biases, fill=0.0)
    with pytest.raises(ShapeError, match=words):
        ConvolutionLayer(Tensor(weights, fill=0.0), bias, ConvolutionDescriptor(3, 4, 8, group_count=2))


def test_parameters_are_the_very_tensors() -> None:
    layer = ConvolutionLayer.create(2, 3, 3, label="first")
    assert layer.label == "first"
    assert layer.weights_parameter.tensor is layer.weights
    assert layer.biases_parameter.tensor is layer.biases
    assert layer.parameters == {"weights": layer.weights, "biases": layer.biases}
    bare = ConvolutionLayer.create(2, 3, 3, biases=False)
    assert bare.label == "Convolution"
    assert bare.biases is None
    assert bare.biases_parameter is None


@pytest.mark.parametrize(
    ("keywords", "shape", "fan_in", "fan_out"),
    [
        ({}, (48, 24, 3, 5), 24 * 15, 48 * 15),
        ({"group_count": 4}, (48, 6, 3, 5), 6 * 15, 12 * 15),
        ({"type": ConvolutionType.DEPTHWISE}, (48, 1, 3, 5), 15, 2 * 15),
        ({"type": ConvolutionType.TRANSPOSED, "group_count": 2}, (48, 12, 3, 5), 12 * 15, 24 * 15),
    ],
)
def test_create_makes_natural_shapes_with_textbook_bounds(
    keywords: dict, shape: tuple[int, ...], fan_in: int, fan_out: int
) -> None:
    layer = ConvolutionLayer.create(24, 48, (3, 5), **keywords)
    assert layer.weights.shape == shape
    assert layer.biases is not None
    assert layer.biases.shape == (48,)
    assert not layer.biases.numpy().any()
    bound = math.sqrt(6 / (fan_in + fan_out))
    assert 0.95 * bound < np.abs(layer.weights.numpy()).max() <= bound * (1 + 1e-6)
    normal = ConvolutionLayer.create(24, 48, (3, 5), initializer=RandomInitializerType.XAVIER, **keywords)
    assert normal.weights.numpy().std() == pytest.approx(math.sqrt(2 / (fan_in + fan_out)), rel=0.15)


def test_create_reads_padding_sizes_without_a_policy() -> None:
    assert ConvolutionLayer.create(1, 1, 3).descriptor.padding_policy is PaddingPolicy.SAME
    sized = ConvolutionLayer.create(1, 1, 3, padding_sizes=(2, 0)).descriptor
    assert (sized.padding_policy, sized.padding_sizes) == (USE_PADDING_SIZE, (2, 0))
    assert ConvolutionLayer.create(1, 1, 3, padding_sizes=0).descriptor.padding_policy is USE_PADDING_SIZE
    valid = ConvolutionLayer.create(1, 1, 3, padding_policy=PaddingPolicy.VALID)
    assert valid.infer(TensorDescriptor((1, 1, 5, 4)))[0].shape == (1, 1, 3, 2)


def test_extra_pixel_of_same_padding_is_at_the_bottom_right() -> None:
    layer = ConvolutionLayer(Tensor((1, 1, 2, 2), fill=1.0), None, ConvolutionDescriptor(2, 1, 1))
    y = forward(layer, torch.tensor([[[[1.0, 2.0], [4.0, 8.0]]]]))
    assert y.tolist() == [[[[15.0, 10.0], [12.0, 8.0]]]]


def test_symmetric_padding_needs_no_copy_of_the_image() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def operators(layer: ConvolutionLayer) -> set[str]:
        traced = make_fx(lambda x: forward(layer, x))(torch.zeros(1, 2, 6, 6))
        return {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}

    assert not any("pad" in name for name in operators(ConvolutionLayer.create(2, 2, 3)))
    assert any("pad" in name for name in operators(ConvolutionLayer.create(2, 2, 3, strides=2)))


@st.composite
def drawn_settings(draw: st.DrawFn) -> tuple[Setting, int, int]:
    """Any legal convolution of small size and an image for it."""
    kind = draw(st.sampled_from(["STANDARD", "TRANSPOSED", "DEPTHWISE"]))
    groups = 1 if kind == "DEPTHWISE" else draw(st.integers(1, 3))
    inputs = groups * draw(st.integers(1, 2))
    outputs = (inputs if kind == "DEPTHWISE" else groups) * draw(st.integers(1, 2))
    pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
    policy = draw(st.sampled_from(["SAME", "VALID", "USE_PADDING_SIZE"]))
    sizes = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    setting = Setting(inputs, outputs, kernel, kind, groups, draw(pairs), draw(pairs), policy, sizes)
    return setting, draw(st.integers(1, 7)), draw(st.integers(1, 7))


@given(drawn_settings())
@settings(max_examples=40, deadline=None)
def test_every_setting_gives_the_promised_shape_and_the_right_numbers(drawn: tuple[Setting, int, int]) -> None:
    setting, height, width = drawn
    layer, source = setting.layer(), TensorDescriptor((2, setting.inputs, height, width))
    result = setting.axis(height, 0)[0], setting.axis(width, 1)[0]
    if min(result) < 1:
        with pytest.raises(ShapeError):
            layer.infer(source)
        return
    assert layer.infer(source)[0].shape == (2, setting.outputs, *result)
    x = torch.randn(source.shape, generator=torch.Generator().manual_seed(height * 8 + width))
    y = forward(layer, x)
    assert y.shape == (2, setting.outputs, *result)
    tensors = {name: tensor.torch() for name, tensor in layer.parameters.items()}
    torch.testing.assert_close(y, setting.twin(x, **tensors), rtol=1e-4, atol=1e-5)
    wanted = setting.reference(x.double().numpy(), **{name: array.double().numpy() for name, array in tensors.items()})
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-4, atol=1e-5)


@given(drawn_settings())
@settings(max_examples=20, deadline=None)
def test_transposed_is_the_adjoint_of_standard(drawn: tuple[Setting, int, int]) -> None:
    """`⟨conv(x), y⟩ = ⟨x, convᵀ(y)⟩` wherever the standard convolution leads from the one size to the other."""
    setting, height, width = drawn
    assume(setting.type != "DEPTHWISE")
    setting = dataclasses.replace(setting, type="TRANSPOSED")
    back = dataclasses.replace(setting, type="STANDARD", inputs=setting.outputs, outputs=setting.inputs)
    size = setting.axis(height, 0)[0], setting.axis(width, 1)[0]
    assume(min(size) >= 1)
    assume((back.axis(size[0], 0)[0], back.axis(size[1], 1)[0]) == (height, width))
    layer = setting.layer(biases=False)
    blocks = layer.weights.torch().chunk(setting.groups)
    input_major = torch.cat([block.transpose(0, 1) for block in blocks]).contiguous()
    other = ConvolutionLayer(Tensor(input_major.shape, data=input_major), None, back.descriptor())
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(2, setting.inputs, height, width, generator=generator)
    x = torch.randn(2, setting.outputs, *size, generator=generator)
    ours, theirs = (forward(layer, y) * x).sum(), (forward(other, x) * y).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def forward(layer: ConvolutionLayer, x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, scope=Scope({tensor: tensor.torch() for tensor in layer.parameters.values()}))
