"""A line through four points, as an ML Compute program fits it: y = 2 x + 5 from x = 0..3, then x = 4..7.

    python examples/mlc/linear_regression.py

One dense layer from zero weights, 501 steps of Adam, the dense layer's output read inside the completion handler, the
weights read after `synchronizeUpdates`, and an inference graph over the same layers.
"""

from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

STEPS = 501


def data(numbers: list[float]) -> Any:
    """Numbers as the framework takes them: bytes and a length."""
    array = np.array(numbers, np.float32)
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def floats(tensor: Any, count: int) -> np.ndarray:
    """The first numbers of a tensor, wherever it lives."""
    numbers = np.zeros(count, np.float32)
    assert tensor.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(numbers, numbers.nbytes, False)
    return numbers


def fit(device: Any) -> dict[str, Any]:
    """Fits the line on `device`; rows printed on the way, weights before and after synchronizing, predictions."""
    x, y = MLCompute.MLCTensor.tensorWithShape_([4, 1, 1, 1]), MLCompute.MLCTensor.tensorWithShape_([4, 1])
    zeros = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_
    weight = zeros([1, 1, 1, 1], 0, MLCompute.MLCDataTypeFloat32)
    bias = zeros([1, 1, 1, 1], 0, MLCompute.MLCDataTypeFloat32)
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        1, 1, 1, 1
    )
    dense = MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weight, bias, descriptor)

    graph = MLCompute.MLCGraph.graph()
    output = graph.nodeWithLayer_source_(dense, x)
    loss = MLCompute.MLCLossLayer.layerWithDescriptor_(
        MLCompute.MLCLossDescriptor.descriptorWithType_reductionType_(
            MLCompute.MLCLossTypeMeanSquaredError, MLCompute.MLCReductionTypeMean
        )
    )
    rates = MLCompute.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
    adam = MLCompute.MLCAdamOptimizer.optimizerWithDescriptor_(rates(0.3, 1, MLCompute.MLCRegularizationTypeNone, 0))

    training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, adam)
    assert training.addInputs_lossLabels_({"x": x}, {"y": y})
    assert training.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)

    rows: dict[int, np.ndarray] = {}
    xs, ys = data([0, 1, 2, 3]), data([5, 7, 9, 11])
    for step in range(STEPS):

        def finished(result: Any, error: Any, seconds: float, step: int = step) -> None:
            if step % 100 == 0:
                rows[step] = floats(output, 4)

        assert training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
            {"x": xs}, {"y": ys}, None, 4, MLCompute.MLCExecutionOptionsSynchronous, finished
        )
    before = [np.frombuffer(one.data(), np.float32)[0].item() for one in (weight, bias)]
    training.synchronizeUpdates()
    after = [np.frombuffer(one.data(), np.float32)[0].item() for one in (weight, bias)]

    inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_({"x": x})
    assert inference.compileWithOptions_device_(MLCompute.MLCGraphCompilationOptionsNone, device)
    predictions: list[np.ndarray] = []
    assert inference.executeWithInputsData_batchSize_options_completionHandler_(
        {"x": data([4, 5, 6, 7])},
        4,
        MLCompute.MLCExecutionOptionsSynchronous,
        lambda result, error, seconds: predictions.append(floats(result, 4)),
    )
    return {"rows": rows, "before": before, "after": after, "predictions": predictions}


if __name__ == "__main__":
    found = fit(MLCompute.MLCDevice.alloc().init())
    for step, row in found["rows"].items():
        print(f"step {step:3d}   {'  '.join(f'{one:8.4f}' for one in row)}")
    print(f"weight {found['after'][0]:.4f}, bias {found['after'][1]:.4f}")
    print("x = 4, 5, 6, 7 gives", ", ".join(f"{one:.3f}" for one in found["predictions"][0]))
