"""Descriptors of layers and losses: values that stepgraph makes immutable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

import stepgraph as sg
from stepgraph.mlc.table import Class, Row, make, read, reads, unavailable, write
from stepgraph.mlc.values import BOOL, DATA, FLOAT, INT, REDUCTION, Kind, one_of, optional, pair

ACTIVATION = one_of(sg.ActivationType)
CHANNELS: dict[str, Any] = {"input_feature_channel_count": INT, "output_feature_channel_count": INT}
DEPTHWISE: dict[str, Any] = {"input_feature_channel_count": INT, "channel_multiplier": INT}
PADDING: dict[str, Any] = {"padding_policy": one_of(sg.PaddingPolicy), "padding_sizes": pair(0)}
STRIDES: dict[str, Any] = {"strides": pair(1), **PADDING}
DILATED: dict[str, Any] = {"strides": pair(1), "dilation_rates": pair(1), **PADDING}
WINDOW = (
    "kernelWidth kernelHeight strideInX strideInY dilationRateInX dilationRateInY paddingPolicy paddingSizeInX"
    " paddingSizeInY"
)
ANCHORS = Kind(
    DATA.wanted,
    lambda value: memory if isinstance(memory := DATA.convert(value), sg.TensorData) else sg.TensorData(memory),
)


def by_width(factory: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`factory` for a kernel whose width is given before its height."""

    def sized(kernel_width: int, kernel_height: int, **settings: Any) -> Any:
        return factory(kernel_sizes=(kernel_height, kernel_width), **settings)

    sized.native_name = name  # type: ignore[attr-defined]
    return sized


def float32_pairs(boxes: Any) -> np.ndarray:
    """Anchor boxes as raw memory: `w0 h0 w1 h1 …`."""
    return np.array(boxes, np.float32)


def convolutions(
    prefix: str, member: str, channels: dict[str, Any], grouped: dict[str, Any], swift: str
) -> tuple[Row, ...]:
    """The three factories that each type of convolution has."""
    labels = {
        "input_feature_channel_count": "inputFeatureChannelCount",
        "output_feature_channel_count": "outputFeatureChannelCount",
        "channel_multiplier": "channelMultiplier",
        "group_count": "groupCount",
    }
    named = ":".join(labels[one] for one in channels)
    groups = "".join(f"{labels[one]}:" for one in grouped)
    name = f"ConvolutionDescriptor.{member}" if member else "ConvolutionDescriptor"
    factory = getattr(sg.ConvolutionDescriptor, member) if member else sg.ConvolutionDescriptor
    written = ", ".join(f"{one}={labels[one]}" for one in channels)
    tail = "paddingPolicy:paddingSizes:"
    return (
        make(
            f"{prefix}KernelWidth:kernelHeight:{named}:",
            by_width(factory, f"{name}(kernel_sizes=(kernelHeight, kernelWidth), {written})"),
            kernel_width=INT,
            kernel_height=INT,
            **channels,
            swift=swift,
        ),
        make(
            f"{prefix}KernelSizes:{named}:strides:{tail}",
            member,
            kernel_sizes=pair(1),
            **channels,
            **STRIDES,
            swift="–",
        ),
        make(
            f"{prefix}KernelSizes:{named}:{groups}strides:dilationRates:{tail}",
            member,
            kernel_sizes=pair(1),
            **channels,
            **grouped,
            **DILATED,
            swift="–",
        ),
    )


MLC_ACTIVATION_DESCRIPTOR = Class(
    "MLCActivationDescriptor",
    sg.ActivationDescriptor,
    "NSObject",
    (
        *reads("activationType a b c"),
        make("descriptorWithType:", type=ACTIVATION),
        make("descriptorWithType:a:", type=ACTIVATION, a=FLOAT),
        make("descriptorWithType:a:b:", type=ACTIVATION, a=FLOAT, b=FLOAT),
        make("descriptorWithType:a:b:c:", type=ACTIVATION, a=FLOAT, b=FLOAT, c=FLOAT),
        *unavailable(note="type None, all numbers 0"),
    ),
    new=lambda: sg.ActivationDescriptor(sg.ActivationType.NONE, 0.0, 0.0, 0.0),
    copy=copy.copy,
)

MLC_CONVOLUTION_DESCRIPTOR = Class(
    "MLCConvolutionDescriptor",
    sg.ConvolutionDescriptor,
    "NSObject",
    (
        read("convolutionType", "type"),
        *reads(f"inputFeatureChannelCount outputFeatureChannelCount groupCount {WINDOW}"),
        *reads("isConvolutionTranspose usesDepthwiseConvolution"),
        make(
            "descriptorWithType:kernelSizes:inputFeatureChannelCount:outputFeatureChannelCount:groupCount:strides:"
            "dilationRates:paddingPolicy:paddingSizes:",
            type=one_of(sg.ConvolutionType),
            kernel_sizes=pair(1),
            **CHANNELS,
            group_count=INT,
            **DILATED,
            swift="init(type:kernelSizes:inputFeatureChannelCount:outputFeatureChannelCount:groupCount:strides:"
            "dilationRates:paddingPolicy:)",
            note="pairs are [height, width]",
        ),
        *convolutions("descriptorWith", "", CHANNELS, {"group_count": INT}, "–"),
        *convolutions(
            "convolutionTransposeDescriptorWith",
            "transposed",
            CHANNELS,
            {"group_count": INT},
            "init(transposeWithKernelWidth:kernelHeight:inputFeatureChannelCount:outputFeatureChannelCount:)",
        ),
        *convolutions(
            "depthwiseConvolutionDescriptorWith",
            "depthwise",
            DEPTHWISE,
            {},
            "init(depthwiseWithKernelWidth:kernelHeight:inputFeatureChannelCount:channelMultiplier:)",
        ),
    ),
    new=lambda: sg.ConvolutionDescriptor(1, 1, 1),
    copy=copy.copy,
)


def poolings(name: str, kind: sg.PoolingType, counting: dict[str, Any], tail: str) -> tuple[Row, ...]:
    """The two factories that each type of pooling has."""
    settings: dict[str, Any] = {"kernel_sizes": pair(1), "strides": pair(None)}
    head, end = f"{name}PoolingDescriptorWithKernelSizes:strides:", f"paddingPolicy:paddingSizes:{tail}"
    swift = "init(type:kernelSizes:strides:dilationRates:paddingPolicy:)"
    rates: dict[str, Any] = {"dilation_rates": pair(1)}
    return (
        make(
            f"{head}{end}", type=kind, **settings, **PADDING, **counting, swift=swift, note="nil strides: the kernel's"
        ),
        make(f"{head}dilationRates:{end}", type=kind, **settings, **rates, **PADDING, **counting, swift=swift),
    )


MLC_POOLING_DESCRIPTOR = Class(
    "MLCPoolingDescriptor",
    sg.PoolingDescriptor,
    "NSObject",
    (
        read("poolingType", "type", empty=0),
        *reads(WINDOW, empty=0),
        read("countIncludesPadding", empty=False),
        make(
            "poolingDescriptorWithType:kernelSize:stride:",
            type=one_of(sg.PoolingType),
            kernel_sizes=INT,
            strides=INT,
            swift="init(type:kernelSizes:strides:dilationRates:paddingPolicy:)",
            note="policy Same",
        ),
        *poolings("max", sg.PoolingType.MAX, {}, ""),
        *poolings("average", sg.PoolingType.AVERAGE, {"count_includes_padding": BOOL}, "countIncludesPadding:"),
        *poolings("l2Norm", sg.PoolingType.L2_NORM, {}, ""),
        *unavailable(note="all 0"),
    ),
    copy=copy.copy,
)

MLC_EMBEDDING_DESCRIPTOR = Class(
    "MLCEmbeddingDescriptor",
    sg.EmbeddingDescriptor,
    "NSObject",
    (
        *reads("embeddingCount embeddingDimension", empty=0),
        *reads("paddingIndex maximumNorm pNorm"),
        read("scalesGradientByFrequency", empty=False),
        make("descriptorWithEmbeddingCount:embeddingDimension:", embedding_count=INT, embedding_dimension=INT),
        make(
            "descriptorWithEmbeddingCount:embeddingDimension:paddingIndex:maximumNorm:pNorm:scalesGradientByFrequency:",
            embedding_count=INT,
            embedding_dimension=INT,
            padding_index=optional(INT),
            maximum_norm=optional(FLOAT),
            p_norm=optional(FLOAT),
            scales_gradient_by_frequency=BOOL,
            note="a nil pNorm reads back as 2",
        ),
        *unavailable(),
    ),
    copy=copy.copy,
)

_LSTM: dict[str, Any] = {"input_size": INT, "hidden_size": INT, "layer_count": INT}
_BIASES: dict[str, Any] = {"uses_biases": BOOL}
_FIRST: dict[str, Any] = {"batch_first": BOOL}
_BOTH: dict[str, Any] = {"is_bidirectional": BOOL}
_DROPOUT: dict[str, Any] = {"dropout": FLOAT}
_SEQUENCES: dict[str, Any] = {"returns_sequences": BOOL}
_MODE: dict[str, Any] = {"result_mode": one_of(sg.LSTMResultMode)}
_LSTM_SIZES = "descriptorWithInputSize:hiddenSize:layerCount:"

MLC_LSTM_DESCRIPTOR = Class(
    "MLCLSTMDescriptor",
    sg.LSTMDescriptor,
    "NSObject",
    (
        *reads("inputSize hiddenSize layerCount", empty=0),
        *reads("usesBiases batchFirst isBidirectional returnsSequences", empty=False),
        read("dropout", empty=0.0),
        read("resultMode", empty=0),
        make(_LSTM_SIZES, **_LSTM),
        make(f"{_LSTM_SIZES}usesBiases:isBidirectional:dropout:", **_LSTM, **_BIASES, **_BOTH, **_DROPOUT),
        make(
            f"{_LSTM_SIZES}usesBiases:batchFirst:isBidirectional:dropout:",
            **_LSTM,
            **_BIASES,
            **_FIRST,
            **_BOTH,
            **_DROPOUT,
            note="batchFirst NO means [steps, batch, features] here",
        ),
        make(
            f"{_LSTM_SIZES}usesBiases:batchFirst:isBidirectional:returnsSequences:dropout:",
            **_LSTM,
            **_BIASES,
            **_FIRST,
            **_BOTH,
            **_SEQUENCES,
            **_DROPOUT,
        ),
        make(
            f"{_LSTM_SIZES}usesBiases:batchFirst:isBidirectional:returnsSequences:dropout:resultMode:",
            **_LSTM,
            **_BIASES,
            **_FIRST,
            **_BOTH,
            **_SEQUENCES,
            **_DROPOUT,
            **_MODE,
        ),
        *unavailable(),
    ),
    copy=copy.copy,
)

MLC_MAT_MUL_DESCRIPTOR = Class(
    "MLCMatMulDescriptor",
    sg.MatMulDescriptor,
    "NSObject",
    (
        read("alpha", empty=0.0),
        *reads("transposesX transposesY", empty=False),
        make("descriptorWithAlpha:transposesX:transposesY:", alpha=FLOAT, transposes_x=BOOL, transposes_y=BOOL),
        make("descriptor"),
        *unavailable(note="alpha 0"),
    ),
    copy=copy.copy,
    note="a copy keeps the transposes; the original's lost them",
)

MLC_MULTIHEAD_ATTENTION_DESCRIPTOR = Class(
    "MLCMultiheadAttentionDescriptor",
    sg.MultiheadAttentionDescriptor,
    "NSObject",
    (
        *reads("modelDimension keyDimension valueDimension headCount", empty=0),
        read("dropout", empty=0.0),
        *reads("hasBiases hasAttentionBiases addsZeroAttention", empty=False),
        make(
            "descriptorWithModelDimension:keyDimension:valueDimension:headCount:dropout:hasBiases:hasAttentionBiases:"
            "addsZeroAttention:",
            model_dimension=INT,
            key_dimension=INT,
            value_dimension=INT,
            head_count=INT,
            dropout=FLOAT,
            has_biases=BOOL,
            has_attention_biases=BOOL,
            adds_zero_attention=BOOL,
        ),
        make("descriptorWithModelDimension:headCount:", model_dimension=INT, head_count=INT),
        *unavailable(),
    ),
    copy=copy.copy,
)

_LOSS: dict[str, Any] = {"type": one_of(sg.LossType), "reduction_type": REDUCTION}
_SMOOTH: dict[str, Any] = {**_LOSS, "weight": FLOAT, "label_smoothing": FLOAT, "class_count": INT}

MLC_LOSS_DESCRIPTOR = Class(
    "MLCLossDescriptor",
    sg.LossDescriptor,
    "NSObject",
    (
        *reads("lossType reductionType", empty=0),
        *reads("weight labelSmoothing epsilon delta", empty=0.0),
        read("classCount", empty=0),
        make("descriptorWithType:reductionType:", **_LOSS, note="None, Sum and Mean only; others answer nil"),
        make("descriptorWithType:reductionType:weight:", **_LOSS, weight=FLOAT),
        make("descriptorWithType:reductionType:weight:labelSmoothing:classCount:", **_SMOOTH),
        make(
            "descriptorWithType:reductionType:weight:labelSmoothing:classCount:epsilon:delta:",
            **_SMOOTH,
            epsilon=FLOAT,
            delta=FLOAT,
        ),
        *unavailable(),
    ),
    copy=copy.copy,
)

_YOLO_NUMBERS = (
    "scaleSpatialPositionLoss scaleSpatialSizeLoss scaleNoObjectConfidenceLoss scaleObjectConfidenceLoss scaleClassLoss"
    " minimumIOUForObjectPresence maximumIOUForObjectAbsence"
)

MLC_YOLO_LOSS_DESCRIPTOR = Class(
    "MLCYOLOLossDescriptor",
    sg.YOLOLossDescriptor,
    "NSObject",
    (
        read("anchorBoxCount", empty=0),
        read("anchorBoxes", shown=float32_pairs, note="float32 pairs as bytes"),
        read("shouldRescore", empty=False),
        write("shouldRescore", BOOL, replacing=True),
        *reads(_YOLO_NUMBERS, empty=0.0),
        *(write(name, FLOAT, replacing=True) for name in _YOLO_NUMBERS.split()),
        make("descriptorWithAnchorBoxes:anchorBoxCount:", anchor_boxes=ANCHORS, anchor_box_count=INT),
        *unavailable(),
    ),
    copy=copy.copy,
    note="a layer takes the numbers as they are when it is made; a copy keeps them all, the original's did not",
)

CLASSES = (
    MLC_ACTIVATION_DESCRIPTOR,
    MLC_CONVOLUTION_DESCRIPTOR,
    MLC_POOLING_DESCRIPTOR,
    MLC_EMBEDDING_DESCRIPTOR,
    MLC_LSTM_DESCRIPTOR,
    MLC_MAT_MUL_DESCRIPTOR,
    MLC_MULTIHEAD_ATTENTION_DESCRIPTOR,
    MLC_LOSS_DESCRIPTOR,
    MLC_YOLO_LOSS_DESCRIPTOR,
)
