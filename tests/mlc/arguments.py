"""Where one class or one selector needs other arguments than `kit.ARGUMENTS`, and an object of each class."""

from typing import Any

import numpy as np

from tests.mlc.kit import (
    ARGUMENTS,
    CPU,
    Kit,
    M,
    X,
    activation,
    anchors,
    channels,
    data,
    descriptor,
    lstm,
    rates,
    several,
    tensor,
)

NORMALIZATION = {
    "mean": channels(0),
    "variance": channels(1),
    "beta": channels(0),
    "gamma": channels(1),
    "variance_epsilon": 1e-5,
}
PROJECTIONS = {"weights": several(4, [4, 4]), "biases": several(4, [4]), "attention_biases": None}
BY_CLASS: dict[str, dict[str, Any]] = {
    "MLCConvolutionLayer": {
        "weights": lambda kit: tensor([1, 6, 3, 3], 0.1),
        "descriptor": lambda kit: descriptor(3, 2, (3, 3)),
    },
    "MLCBatchNormalizationLayer": NORMALIZATION,
    "MLCInstanceNormalizationLayer": NORMALIZATION,
    "MLCGroupNormalizationLayer": NORMALIZATION,
    "MLCLayerNormalizationLayer": {**NORMALIZATION, "normalized_shape": [3]},
    "MLCActivationLayer": {"descriptor": activation, "beta": 2.0},
    "MLCPoolingLayer": {
        "descriptor": lambda kit: M.MLCPoolingDescriptor.poolingDescriptorWithType_kernelSize_stride_(1, 2, 2)
    },
    "MLCPoolingDescriptor": {"kernel_sizes": [2, 2], "strides": [2, 2]},
    "MLCMatMulLayer": {"descriptor": lambda kit: M.MLCMatMulDescriptor.descriptor()},
    "MLCEmbeddingLayer": {
        "descriptor": lambda kit: M.MLCEmbeddingDescriptor.descriptorWithEmbeddingCount_embeddingDimension_(3, 2)
    },
    "MLCLSTMLayer": {
        "descriptor": lstm,
        "input_weights": several(4, [2, 3]),
        "hidden_weights": several(4, [2, 2]),
        "peephole_weights": several(4, [2, 2]),
        "biases": several(4, [2]),
    },
    "MLCMultiheadAttentionLayer": {
        "descriptor": lambda kit: M.MLCMultiheadAttentionDescriptor.descriptorWithModelDimension_headCount_(4, 2),
        **PROJECTIONS,
    },
    "MLCLossLayer": {
        "descriptor": lambda kit: M.MLCLossDescriptor.descriptorWithType_reductionType_(1, 1),
        "weights": lambda kit: tensor([4, 2], 1.0),
    },
    "MLCOptimizerDescriptor": {"gradient_clip_min": -1.0},
    **{
        key: {"descriptor": lambda kit: rates(0.1)}
        for key in ("MLCSGDOptimizer", "MLCAdamOptimizer", "MLCAdamWOptimizer", "MLCRMSPropOptimizer")
    },
    "MLCReshapeLayer": {"shape": [3, 2]},
    "MLCTransposeLayer": {"dimensions": [1, 0]},
    "MLCTensorParameter": {"tensor": lambda kit: tensor([2, 3], 0.0)},
    "MLCTensorData": {"length": 16},
    "MLCDevice": {"kind": 0},
    "MLCTrainingGraph": {
        "data": lambda kit: [data(np.zeros(6)), data(np.zeros(6))],
        "inputs": lambda kit: {"x": kit.x},
    },
    "MLCInferenceGraph": {"inputs": lambda kit: {"x": kit.x}, "outputs": lambda kit: {"out": kit.out}},
    "MLCTensor": {"length": 24, "device_data": None},
}
OUT = {"outputs": lambda kit: {"out": kit.out}}
SEQUENCE = {"length": 3, "data": lambda kit: data(np.zeros(48)), "batch_size": 2}
IMAGE = {"data": lambda kit: data(np.arange(360)), "fill": 0.5}
QUANTIZED = {"data_type": M.MLCDataTypeInt8, "scale": 2.0, "bias": 0}
PER_ROW = {"scale": lambda kit: tensor([2], 2.0), "bias": lambda kit: tensor([2], 0.0)}
BY_SELECTOR: dict[str, dict[str, Any]] = {
    "MLCTensorDescriptor.descriptorWithShape:sequenceLengths:sortedSequences:dataType:": {"shape": [2, 3, 4]},
    "MLCTensor.bindOptimizerData:deviceData:": {"data": lambda kit: [data(np.zeros(6))]},
    "MLCTensor.tensorByQuantizingToType:scale:bias:": QUANTIZED,
    "MLCTensor.tensorByQuantizingToType:scale:bias:axis:": {**QUANTIZED, **PER_ROW},
    "MLCTensor.tensorByDequantizingToType:scale:bias:": {"scale": 2.0, "bias": 0},
    "MLCTensor.tensorByDequantizingToType:scale:bias:axis:": {**PER_ROW},
    "MLCGraph.nodeWithLayer:source:": {
        "layer": lambda kit: M.MLCActivationLayer.reluLayer(),
        "sources": lambda kit: kit.x,
    },
    **{
        key: {"layer": lambda kit: M.MLCArithmeticLayer.layerWithOperation_(M.MLCArithmeticOperationAdd)}
        for key in ("MLCGraph.nodeWithLayer:sources:", "MLCGraph.nodeWithLayer:sources:disableUpdate:")
    },
    "MLCGraph.nodeWithLayer:sources:lossLabels:": {
        "layer": lambda kit: kit.loss,
        "sources": lambda kit: [tensor([2, 3])],
        "loss_labels": lambda kit: [tensor([2, 3])],
    },
    "MLCPoolingDescriptor.poolingDescriptorWithType:kernelSize:stride:": {"kernel_sizes": 2, "strides": 2},
    "MLCReductionLayer.layerWithReductionType:dimension:": {"dimensions": 1},
    "MLCGraph.reshapeWithShape:source:": {"shape": [3, 2]},
    "MLCGraph.transposeWithDimensions:source:": {"dimensions": [1, 0]},
    **{
        f"MLCGraph.bindAndWriteData:forInputs:toDevice:{end}synchronous:": {"data": lambda kit: {"x": data(X)}}
        for end in ("", "batchSize:")
    },
    "MLCTrainingGraph.addOutputs:": OUT,
    "MLCTrainingGraph.linkWithGraphs:": {"graphs": lambda kit: []},
    "MLCTrainingGraph.allocateUserGradientForTensor:": {"tensor": lambda kit: kit.out},
    "MLCInferenceGraph.linkWithGraphs:": {"graphs": lambda kit: []},
    **{
        f"MLCInferenceGraph.executeWithInputsData:lossLabelsData:lossLabelWeightsData:{end}": {
            "inputs_data": lambda kit: {"x": data(X[:, :2])},
            "outputs_data": lambda kit: {"out": data(np.zeros(1))},
        }
        for end in ("batchSize:options:completionHandler:", "outputsData:batchSize:options:completionHandler:")
    },
    **{
        f"MLCTrainingGraph.executeGradientWithBatchSize:options:{end}": {"outputs_data": None}
        for end in ("completionHandler:", "outputsData:completionHandler:")
    },
    "MLCTrainingGraph.compileWithOptions:device:inputTensors:inputTensorsData:": {"options": 0},
    "MLCLossDescriptor.descriptorWithType:reductionType:weight:labelSmoothing:classCount:": {"type": 2},
}
for name in ("", "randomInitializerType:", "fillWithData:", "data:"):
    BY_SELECTOR[f"MLCTensor.tensorWithDescriptor:{name}"] = {
        "shape": lambda kit: M.MLCTensorDescriptor.descriptorWithShape_dataType_([2, 3], M.MLCDataTypeFloat32)
    }
for name in ("randomInitializerType:", "data:"):
    many = f"MLCTensor.tensorWithSequenceLengths:sortedSequences:featureChannelCount:batchSize:{name}"
    BY_SELECTOR[many] = SEQUENCE
    BY_SELECTOR[f"MLCTensor.tensorWithSequenceLength:featureChannelCount:batchSize:{name}"] = SEQUENCE
BY_SELECTOR["MLCTensor.tensorWithSequenceLength:featureChannelCount:batchSize:"] = SEQUENCE
for end in ("data:", "data:dataType:", "fillWithData:dataType:"):
    BY_SELECTOR[f"MLCTensor.tensorWithWidth:height:featureChannelCount:batchSize:{end}"] = IMAGE

PREPARED = {
    "executeForwardWithBatchSize:options:completionHandler:": Kit.bind,
    "executeForwardWithBatchSize:options:outputsData:completionHandler:": Kit.bind,
    "executeGradientWithBatchSize:options:completionHandler:": Kit.forward,
    "executeGradientWithBatchSize:options:outputsData:completionHandler:": Kit.forward,
    "executeOptimizerUpdateWithOptions:completionHandler:": Kit.gradient,
    "gradientDataForParameter:layer:": Kit.gradient,
}


def made(kit: Kit, name: str, selector: str) -> Any:
    """An object of a class, through one of its factories."""
    table = getattr(M, name).table
    row = next(row for row in table.rows if row.selector == selector)
    return getattr(getattr(M, name), row.spelling)(*arguments(kit, name, row))


def instance(kit: Kit, name: str, selector: str = "") -> Any:
    """An object of a class that may be asked anything."""
    if name == "MLCTrainingGraph":
        return kit.training
    if name == "MLCInferenceGraph":
        return kit.evaluation if "lossLabelsData" in selector else kit.inference
    if name == "MLCTensor":
        kind = M.MLCDataTypeInt8 if "Dequantizing" in selector else M.MLCDataTypeFloat32
        return tensor([2, 3], 1, kind)
    special = {
        "MLCGraph": kit.graph,
        "MLCOptimizer": M.MLCOptimizer.new(),
        "MLCLayer": M.MLCActivationLayer.reluLayer(),
        "MLCTensorOptimizerDeviceData": M.MLCTensorOptimizerDeviceData.new(),
        "MLCYOLOLossDescriptor": M.MLCYOLOLossDescriptor.descriptorWithAnchorBoxes_anchorBoxCount_(anchors(kit), 2),
        "MLCDevice": CPU,
    }
    if name in special:
        return special[name]
    factory = next(row for row in getattr(M, name).table.rows if row.kind == "class method")
    return made(kit, name, factory.selector)


def arguments(kit: Kit, name: str, row: Any) -> list[Any]:
    """What a program would pass."""
    chosen = {**ARGUMENTS, **BY_CLASS.get(name, {}), **BY_SELECTOR.get(f"{name}.{row.selector}", {})}
    return [
        value(kit) if callable(value := chosen[one]) and not hasattr(value, "native") else value for one in row.takes
    ]
