"""A line learned by RMSProp from ten points in batches of two, with every loss by itself (reduction none).

    python examples/mlc/rmsprop_training.py

Only the learning rate is given: the decay of 0.99 is the framework's default. Afterwards the weights are found again
by walking the graph's layers.
"""

from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

FLOAT = MLCompute.MLCDataTypeFloat32
CASES = {
    0.3: (1.5, 2.3, -4.4, 5.2, -0.8, 2.7, 0.12, -3.12, 2.8, 4.2),
    0.7: (0.2, 1.3, 0.1, -1.7, 0.6, 1.7, 0.4, -0.45, 1.1, -1.0),
}
SLOPE, BATCH, EPOCHS = 0.47, 2, 20


def data(numbers: Any) -> Any:
    """Numbers as bytes and a length."""
    array = np.array(numbers, np.float32)
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def fit(offset: float, start: float | None = None) -> dict[str, Any]:
    """Learns `y = 0.47 x + offset` from a weight in [0, 1), drawn where none is given."""
    x, y = (MLCompute.MLCTensor.tensorWithShape_dataType_([BATCH, 1], FLOAT) for _ in range(2))
    make = MLCompute.MLCTensor
    uniform = MLCompute.MLCRandomInitializerTypeUniform
    if start is None:
        weight = make.tensorWithShape_randomInitializerType_dataType_([1, 1], uniform, FLOAT)
    else:
        weight = make.tensorWithShape_fillWithData_dataType_([1, 1], start, FLOAT)
    bias = make.tensorWithShape_fillWithData_dataType_([1, 1], 0, FLOAT)
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        1, 1, 1, 1
    )
    graph = MLCompute.MLCGraph.graph()
    graph.nodeWithLayer_source_(
        MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weight, bias, descriptor), x
    )
    loss = MLCompute.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(MLCompute.MLCReductionTypeNone, 1)
    rates = MLCompute.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
    rmsprop = MLCompute.MLCRMSPropOptimizer.optimizerWithDescriptor_(
        rates(0.01, 1, MLCompute.MLCRegularizationTypeNone, 0)
    )
    training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, rmsprop)
    assert training.addInputs_lossLabels_({"x": x}, {"y": y})
    assert training.compileWithOptions_device_(0, MLCompute.MLCDevice.cpuDevice())

    points = np.array(CASES[offset], np.float32)
    shapes: list[list[int]] = []

    def finished(result: Any, error: Any, seconds: float) -> None:
        assert error is None and len(np.frombuffer(result.data(), np.float32)) == BATCH
        shapes.append(result.descriptor().shape())

    for _ in range(EPOCHS):
        for first in range(0, len(points), BATCH):
            batch = points[first : first + BATCH]
            given, wanted = {"x": data(batch)}, {"y": data(SLOPE * batch + offset)}
            assert (
                training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
                    given, wanted, None, BATCH, 0, finished
                )
            )
    training.synchronizeUpdates()
    (dense,) = [one for one in graph.layers() if isinstance(one, MLCompute.MLCFullyConnectedLayer)]
    weight, bias = (np.frombuffer(one.data(), np.float32)[0].item() for one in (dense.weights(), dense.biases()))
    return {"weight": weight, "bias": bias, "shapes": shapes, "sources": graph.sourceTensorsForLayer_(dense), "x": x}


if __name__ == "__main__":
    for offset in CASES:
        found = fit(offset)
        print(f"y = {SLOPE} x + {offset}: found {found['weight']:.4f} x + {found['bias']:.4f}")
