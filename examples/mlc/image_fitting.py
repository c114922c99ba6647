"""A picture learned row by row: position in, color out, mean absolute error summed over the row.

    python examples/mlc/image_fitting.py

Positions enter as sines and cosines of ten octaves. The completion handler's tensor is the sum of the row's errors.
"""

import math
from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

SIZE, WIDTH, DEPTH, OCTAVES, EPOCHS = 64, 64, 3, 10, 300
SYNCHRONOUS = MLCompute.MLCExecutionOptionsSynchronous


def picture() -> np.ndarray:
    """A smooth picture: half a sine of x, half a cosine of y, x y, and 1."""
    y, x = np.meshgrid(np.arange(SIZE) / SIZE, np.arange(SIZE) / SIZE, indexing="ij")
    colors = np.sin(math.pi * x), 0.5 + 0.5 * np.cos(math.pi * y), x * y, np.ones_like(x)
    return np.stack(colors, 2).astype(np.float32)


def encoded(row: int) -> np.ndarray:
    """The positions of a row, 40 numbers each."""
    x, y = np.arange(SIZE) / SIZE, np.full(SIZE, row / SIZE)
    waves = [wave(2**k * math.pi * one) for k in range(OCTAVES) for one in (x, y) for wave in (np.sin, np.cos)]
    return np.stack(waves, 1).astype(np.float32)


def dense(inputs: int, outputs: int) -> Any:
    """A fully connected layer with Glorot weights."""
    glorot = MLCompute.MLCRandomInitializerTypeGlorotUniform
    weights = MLCompute.MLCTensor.tensorWithShape_randomInitializerType_([outputs, inputs], glorot)
    biases = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_(
        [1, outputs, 1, 1], 0, MLCompute.MLCDataTypeFloat32
    )
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        1, 1, inputs, outputs
    )
    return MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, biases, descriptor)


def data(array: np.ndarray) -> Any:
    """An array where it lies."""
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def network(device: Any) -> tuple[Any, Any]:
    """The training graph and the inference graph."""
    x, y = (MLCompute.MLCTensor.tensorWithShape_(shape) for shape in ([SIZE, 4 * OCTAVES, 1, 1], [SIZE, 4]))
    graph = MLCompute.MLCGraph.graph()
    hidden = x
    for inputs in [4 * OCTAVES] + [WIDTH] * DEPTH:
        hidden = graph.nodeWithLayer_source_(dense(inputs, WIDTH), hidden)
        hidden = graph.nodeWithLayer_source_(MLCompute.MLCActivationLayer.reluLayer(), hidden)
    graph.nodeWithLayer_source_(dense(WIDTH, 4), hidden)
    loss = MLCompute.MLCLossLayer.meanAbsoluteErrorLossWithReductionType_weight_(MLCompute.MLCReductionTypeSum, 1)
    rates = MLCompute.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_
    adam = MLCompute.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_(
        rates(1e-4, 1, MLCompute.MLCRegularizationTypeNone, 0), 0.9, 0.999, 1e-7, 1
    )
    training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, adam)
    assert training.addInputs_lossLabels_({"x": x}, {"y": y}) and training.compileWithOptions_device_(0, device)
    inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_({"x": x}) and inference.compileWithOptions_device_(0, device)
    return training, inference


def run(device: Any, epochs: int = EPOCHS) -> dict[str, Any]:
    """Learns the picture; the mean error of a color in each epoch, and the picture as it was learned."""
    MLCompute.MLCPlatform.setRNGSeedTo_(2)
    image = picture()
    training, inference = network(device)
    positions, colors = [data(encoded(row)) for row in range(SIZE)], [data(image[row]) for row in range(SIZE)]
    execute = training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
    errors: list[float] = []
    sums: list[float] = []

    def finished(result: Any, error: Any, seconds: float) -> None:
        sums.append(np.frombuffer(result.data(), np.float32)[0].item())

    for _ in range(epochs):
        sums.clear()
        for row in range(SIZE):
            assert execute({"x": positions[row]}, {"y": colors[row]}, None, SIZE, SYNCHRONOUS, finished)
        errors.append(sum(sums) / image.size)
    learned = np.zeros_like(image)
    for row in range(SIZE):
        infer = inference.executeWithInputsData_batchSize_options_completionHandler_

        def keep(result: Any, error: Any, seconds: float, row: int = row) -> None:
            learned[row] = np.frombuffer(result.data(), np.float32).reshape(SIZE, 4)

        assert infer({"x": positions[row]}, SIZE, SYNCHRONOUS, keep)
    return {"errors": errors, "learned": learned, "image": image, "last row": sums[-1]}


if __name__ == "__main__":
    found = run(MLCompute.MLCDevice.cpuDevice())
    for epoch in (1, 10, 50, 100, 300):
        print(f"epoch {epoch:3d}   mean absolute error {found['errors'][epoch - 1]:.4f}")
    print(f"of the learned picture: {np.abs(found['learned'] - found['image']).mean():.4f}")
