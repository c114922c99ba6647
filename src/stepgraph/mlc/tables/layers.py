"""Layers without weights, and the base of all layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import stepgraph as sg
from stepgraph.mlc.table import ASKED, Class, Row, make, read, reads, share, unavailable, write
from stepgraph.mlc.values import BOOL, DATA_TYPE, DEVICE, FLOAT, INT, INTS, REDUCTION, SHAPE, TEXT, an, one_of, optional

NO_DEVICE = 2147483647  # what the original reports before a layer's graph is compiled


def supports(native: type[sg.Layer], data_type: sg.DataType, device: sg.Device | None) -> bool:
    """The base class supports nothing, as measured."""
    return native is not sg.Layer and native.supports_data_type(data_type, device)


def known_device(kind: sg.DeviceType | None) -> int:
    """The raw type of the device, or what stands for none."""
    return NO_DEVICE if kind is None else int(kind)


def layer(name: str, native: type, *rows: Row, base: str = "MLCLayer", **settings: Any) -> Class:
    """A class of layers."""
    return Class(name, native, base, rows, **settings)


MLC_LAYER = Class(
    "MLCLayer",
    sg.Layer,
    "NSObject",
    (
        read("layerID", empty=0),
        read("label"),
        write("label", TEXT),
        read("isDebuggingEnabled", empty=False),
        write("isDebuggingEnabled", BOOL),
        read("deviceType", shown=known_device, empty=NO_DEVICE, note="2147483647 before compile"),
        Row(
            "supportsDataType:onDevice:",
            "class method",
            "<class>.supports_data_type(data_type=dataType, device=onDevice)",
            supports,
            {"data_type": DATA_TYPE, "device": optional(DEVICE)},
            ASKED,
            "supportsDataType(_:on:)",
            "NO for all types on the base class",
        ),
        *unavailable(),
    ),
)

_SHARED = (
    ("reluLayer", "relu", "relu"),
    ("relu6Layer", "relu6", "relu6"),
    ("leakyReLULayer", "leaky_relu", "leakyReLU"),
    ("sigmoidLayer", "sigmoid", "sigmoid"),
    ("hardSigmoidLayer", "hard_sigmoid", "hardSigmoid"),
    ("tanhLayer", "tanh", "tanh"),
    ("absoluteLayer", "absolute", "absolute"),
    ("softPlusLayer", "soft_plus", "softPlus"),
    ("softSignLayer", "soft_sign", "softSign"),
    ("eluLayer", "elu", "elu"),
    ("logSigmoidLayer", "log_sigmoid", "logSigmoid"),
    ("seluLayer", "selu", "selu"),
    ("celuLayer", "celu", "celu"),
    ("hardShrinkLayer", "hard_shrink", "hardShrink"),
    ("softShrinkLayer", "soft_shrink", "softShrink"),
    ("tanhShrinkLayer", "tanh_shrink", "tanhShrink"),
    ("geluLayer", "gelu", "gelu"),
    ("hardSwishLayer", "hard_swish", "hardSwish"),
)

MLC_ACTIVATION_LAYER = layer(
    "MLCActivationLayer",
    sg.ActivationLayer,
    read("descriptor"),
    *(share(selector, member, swift=swift) for selector, member, swift in _SHARED),
    make("layerWithDescriptor:", descriptor=an(sg.ActivationDescriptor)),
    make("leakyReLULayerWithNegativeSlope:", "leaky_relu", negative_slope=FLOAT, swift="leakyReLU(negativeSlope:)"),
    make("linearLayerWithScale:bias:", "linear", scale=FLOAT, bias=FLOAT, swift="linear(scale:bias:)"),
    make("softPlusLayerWithBeta:", "soft_plus", beta=FLOAT, swift="softPlus(beta:)"),
    make("eluLayerWithA:", "elu", a=FLOAT, swift="elu(a:)"),
    make("relunLayerWithA:b:", "relun", a=FLOAT, b=FLOAT, swift="relun(a:b:)"),
    make("celuLayerWithA:", "celu", a=FLOAT, swift="celu(a:)"),
    make("hardShrinkLayerWithA:", "hard_shrink", a=FLOAT, swift="hardShrink(a:)"),
    make("softShrinkLayerWithA:", "soft_shrink", a=FLOAT, swift="softShrink(a:)"),
    make(
        "thresholdLayerWithThreshold:replacement:",
        "threshold",
        threshold=FLOAT,
        replacement=FLOAT,
        swift="threshold(_:replacement:)",
    ),
    make("clampLayerWithMinValue:maxValue:", "clamp", minimum=FLOAT, maximum=FLOAT, swift="clamp(min:max:)"),
)

_SIDES = "paddingType paddingLeft paddingRight paddingTop paddingBottom constantValue"
_ARRAY = "[v], [left, right] or [top, bottom, left, right]; other lengths answer nil"

CLASSES = (
    MLC_LAYER,
    MLC_ACTIVATION_LAYER,
    layer(
        "MLCArithmeticLayer",
        sg.ArithmeticLayer,
        read("operation"),
        make("layerWithOperation:", operation=one_of(sg.ArithmeticOperation)),
    ),
    layer(
        "MLCComparisonLayer",
        sg.ComparisonLayer,
        read("operation"),
        make("layerWithOperation:", operation=one_of(sg.ComparisonOperation), note="results are booleans"),
    ),
    layer(
        "MLCConcatenationLayer",
        sg.ConcatenationLayer,
        read("dimension"),
        make("layer"),
        make("layerWithDimension:", dimension=INT),
        new=sg.ConcatenationLayer,
    ),
    layer(
        "MLCDropoutLayer",
        sg.DropoutLayer,
        *reads("rate seed"),
        make("layerWithRate:seed:", rate=FLOAT, seed=INT, note="the stream also depends on the graph's own seed"),
    ),
    layer("MLCGatherLayer", sg.GatherLayer, read("dimension"), make("layerWithDimension:", dimension=INT)),
    layer("MLCGramMatrixLayer", sg.GramMatrixLayer, read("scale"), make("layerWithScale:", scale=FLOAT)),
    layer(
        "MLCMatMulLayer",
        sg.MatMulLayer,
        read("descriptor"),
        make("layerWithDescriptor:", descriptor=an(sg.MatMulDescriptor)),
    ),
    layer(
        "MLCPaddingLayer",
        sg.PaddingLayer,
        *reads(_SIDES),
        make("layerWithReflectionPadding:", "reflection", padding=INTS, note=_ARRAY),
        make("layerWithSymmetricPadding:", "symmetric", padding=INTS, note=_ARRAY),
        make("layerWithZeroPadding:", "zero", padding=INTS, note=_ARRAY),
        make("layerWithConstantPadding:constantValue:", "constant", padding=INTS, value=FLOAT, note=_ARRAY),
        copy=dataclasses.replace,
    ),
    layer(
        "MLCPoolingLayer",
        sg.PoolingLayer,
        read("descriptor"),
        make("layerWithDescriptor:", descriptor=an(sg.PoolingDescriptor)),
    ),
    layer(
        "MLCReductionLayer",
        sg.ReductionLayer,
        *reads("reductionType dimension dimensions"),
        make("layerWithReductionType:dimension:", reduction_type=REDUCTION, dimensions=INT),
        make("layerWithReductionType:dimensions:", reduction_type=REDUCTION, dimensions=INTS),
    ),
    layer(
        "MLCReshapeLayer",
        sg.ReshapeLayer,
        read("shape"),
        make("layerWithShape:", shape=SHAPE, note="elements are counted when a node is made; -1 infers an extent"),
    ),
    layer(
        "MLCScatterLayer",
        sg.ScatterLayer,
        *reads("dimension reductionType"),
        make("layerWithDimension:reductionType:", dimension=INT, reduction_type=REDUCTION, note="None and Sum only"),
    ),
    layer("MLCSelectionLayer", sg.SelectionLayer, make("layer"), new=sg.SelectionLayer),
    layer(
        "MLCSliceLayer",
        sg.SliceLayer,
        *reads("start end stride"),
        make(
            "sliceLayerWithStart:end:stride:",
            start=INTS,
            end=INTS,
            stride=optional(INTS),
            swift="init(start:end:stride:)",
            note="nil stride: ones",
        ),
    ),
    layer(
        "MLCSoftmaxLayer",
        sg.SoftmaxLayer,
        *reads("operation dimension"),
        make("layerWithOperation:", operation=one_of(sg.SoftmaxOperation)),
        make("layerWithOperation:dimension:", operation=one_of(sg.SoftmaxOperation), dimension=INT),
    ),
    layer(
        "MLCSplitLayer",
        sg.SplitLayer,
        *reads("dimension splitCount splitSectionLengths"),
        make("layerWithSplitCount:dimension:", split_count=INT, dimension=INT),
        make("layerWithSplitSectionLengths:dimension:", split_section_lengths=INTS, dimension=INT),
    ),
    layer("MLCTransposeLayer", sg.TransposeLayer, read("dimensions"), make("layerWithDimensions:", dimensions=INTS)),
    layer(
        "MLCUpsampleLayer",
        sg.UpsampleLayer,
        *reads("shape sampleMode alignsCorners"),
        make("layerWithShape:", shape=INTS),
        make(
            "layerWithShape:sampleMode:alignsCorners:",
            shape=INTS,
            sample_mode=one_of(sg.SampleMode),
            aligns_corners=BOOL,
        ),
    ),
)
