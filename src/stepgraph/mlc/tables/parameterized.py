"""Layers that hold tensors: weights, biases, statistics."""

from __future__ import annotations

from typing import Any

import stepgraph as sg
from stepgraph.mlc.table import make, reads
from stepgraph.mlc.tables.layers import layer
from stepgraph.mlc.values import FLOAT, INT, INTS, TENSOR, TENSORS, an, list_of, optional

TENSOR_OR_NIL, TENSORS_OR_NIL = optional(TENSOR), optional(TENSORS)
CONVOLUTION: dict[str, Any] = {
    "weights": TENSOR,
    "biases": TENSOR_OR_NIL,
    "descriptor": an(sg.ConvolutionDescriptor),
}
CHANNELS: dict[str, Any] = {"feature_channel_count": INT}
RUNNING: dict[str, Any] = {"mean": TENSOR, "variance": TENSOR}
SHIFT: dict[str, Any] = {"beta": TENSOR_OR_NIL, "gamma": TENSOR_OR_NIL, "variance_epsilon": FLOAT}
GATES: dict[str, Any] = {
    "descriptor": an(sg.LSTMDescriptor),
    "input_weights": TENSORS,
    "hidden_weights": TENSORS,
}
PEEPHOLES: dict[str, Any] = {"peephole_weights": TENSORS_OR_NIL}
ACTIVATIONS: dict[str, Any] = {
    "gate_activations": list_of(an(sg.ActivationDescriptor)),
    "output_result_activation": an(sg.ActivationDescriptor),
}
BY_COUNT = "the number of elements counts, not the shape; nil where it does not fit"

CLASSES = (
    layer(
        "MLCConvolutionLayer",
        sg.ConvolutionLayer,
        *reads("descriptor weights biases weightsParameter biasesParameter"),
        make("layerWithWeights:biases:descriptor:", **CONVOLUTION, note=f"{BY_COUNT} (the original: an empty layer)"),
    ),
    layer(
        "MLCFullyConnectedLayer",
        sg.FullyConnectedLayer,
        *reads("descriptor weights biases weightsParameter biasesParameter"),
        make("layerWithWeights:biases:descriptor:", **CONVOLUTION, note=f"output-major; {BY_COUNT}"),
    ),
    layer(
        "MLCBatchNormalizationLayer",
        sg.BatchNormalizationLayer,
        *reads("featureChannelCount mean variance beta gamma betaParameter gammaParameter varianceEpsilon momentum"),
        make(
            "layerWithFeatureChannelCount:mean:variance:beta:gamma:varianceEpsilon:",
            **CHANNELS,
            **RUNNING,
            **SHIFT,
            note="momentum 0.99, the share that is kept",
        ),
        make(
            "layerWithFeatureChannelCount:mean:variance:beta:gamma:varianceEpsilon:momentum:",
            **CHANNELS,
            **RUNNING,
            **SHIFT,
            momentum=FLOAT,
        ),
    ),
    layer(
        "MLCInstanceNormalizationLayer",
        sg.InstanceNormalizationLayer,
        *reads("featureChannelCount mean variance beta gamma betaParameter gammaParameter varianceEpsilon momentum"),
        make("layerWithFeatureChannelCount:beta:gamma:varianceEpsilon:", **CHANNELS, **SHIFT),
        make("layerWithFeatureChannelCount:beta:gamma:varianceEpsilon:momentum:", **CHANNELS, **SHIFT, momentum=FLOAT),
        make(
            "layerWithFeatureChannelCount:mean:variance:beta:gamma:varianceEpsilon:momentum:",
            **CHANNELS,
            mean=TENSOR_OR_NIL,
            variance=TENSOR_OR_NIL,
            **SHIFT,
            momentum=FLOAT,
        ),
    ),
    layer(
        "MLCGroupNormalizationLayer",
        sg.GroupNormalizationLayer,
        *reads("featureChannelCount groupCount beta gamma betaParameter gammaParameter varianceEpsilon"),
        make(
            "layerWithFeatureChannelCount:groupCount:beta:gamma:varianceEpsilon:", **CHANNELS, group_count=INT, **SHIFT
        ),
    ),
    layer(
        "MLCLayerNormalizationLayer",
        sg.LayerNormalizationLayer,
        *reads("normalizedShape beta gamma betaParameter gammaParameter varianceEpsilon"),
        make("layerWithNormalizedShape:beta:gamma:varianceEpsilon:", normalized_shape=INTS, **SHIFT),
    ),
    layer(
        "MLCEmbeddingLayer",
        sg.EmbeddingLayer,
        *reads("descriptor weights weightsParameter"),
        make(
            "layerWithDescriptor:weights:",
            descriptor=an(sg.EmbeddingDescriptor),
            weights=TENSOR,
            note="on any device, anywhere in a graph",
        ),
    ),
    layer(
        "MLCLSTMLayer",
        sg.LSTMLayer,
        *reads("descriptor gateActivations outputResultActivation inputWeights hiddenWeights peepholeWeights biases"),
        *reads("inputWeightsParameters hiddenWeightsParameters peepholeWeightsParameters biasesParameters"),
        make(
            "layerWithDescriptor:inputWeights:hiddenWeights:biases:",
            **GATES,
            biases=TENSORS_OR_NIL,
            note="gates: input, forget (`hidden`), candidate (`cell`), output",
        ),
        make(
            "layerWithDescriptor:inputWeights:hiddenWeights:peepholeWeights:biases:",
            **GATES,
            **PEEPHOLES,
            biases=TENSORS_OR_NIL,
            note="peepholes are matrices, or vectors for diagonals",
        ),
        make(
            "layerWithDescriptor:inputWeights:hiddenWeights:peepholeWeights:biases:gateActivations:"
            "outputResultActivation:",
            **GATES,
            **PEEPHOLES,
            biases=TENSORS_OR_NIL,
            **ACTIVATIONS,
            note="four gate activations, else nil",
        ),
    ),
    layer(
        "MLCMultiheadAttentionLayer",
        sg.MultiheadAttentionLayer,
        *reads("descriptor weights biases attentionBiases weightsParameters biasesParameters"),
        make(
            "layerWithDescriptor:weights:biases:attentionBiases:",
            descriptor=an(sg.MultiheadAttentionDescriptor),
            weights=TENSORS,
            biases=TENSORS_OR_NIL,
            attention_biases=TENSORS_OR_NIL,
            note="packed and natural weight shapes",
        ),
    ),
)
