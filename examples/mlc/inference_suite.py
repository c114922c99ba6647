"""Five small inference graphs with known results: additions, a convolution in two layouts, a dense layer.

python examples/mlc/inference_suite.py
"""

from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

FLOAT = MLCompute.MLCDataTypeFloat32
ADD = MLCompute.MLCArithmeticOperationAdd


def data(numbers: Any) -> Any:
    """Numbers as bytes and a length."""
    array = np.array(numbers, np.float32)
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def infer(graph: Any, inputs: dict[str, Any], batches: list[dict[str, Any]], device: Any) -> list[np.ndarray]:
    """Compiles a graph and runs it on each batch; results in the shape of the last layer's tensor."""
    inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_(inputs) and inference.compileWithOptions_device_(0, device)
    found: list[np.ndarray] = []

    def finished(result: Any, error: Any, seconds: float) -> None:
        assert error is None
        shape = result.descriptor().shape()
        numbers = np.zeros(shape, np.float32)
        assert result.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(numbers, numbers.nbytes, False)
        found.append(numbers)

    for batch in batches:
        given = {name: data(numbers) for name, numbers in batch.items()}
        options = MLCompute.MLCExecutionOptionsSynchronous
        assert inference.executeWithInputsData_batchSize_options_completionHandler_(given, 0, options, finished)
    return found


def added(device: Any) -> list[np.ndarray]:
    """Two inputs, three batches."""
    x, y = (MLCompute.MLCTensor.tensorWithShape_dataType_([1, 3], FLOAT) for _ in range(2))
    graph = MLCompute.MLCGraph.graph()
    graph.nodeWithLayer_sources_(MLCompute.MLCArithmeticLayer.layerWithOperation_(ADD), [x, y])
    rows = (((1, 2, 3), (7, 8, 9)), ((4, 5, 6), (10, 11, 12)), ((13, 14, 15), (16, 17, 18)))
    return infer(graph, {"x": x, "y": y}, [{"x": one, "y": other} for one, other in rows], device)


def chained(device: Any) -> np.ndarray:
    """A third input joins at the second node."""
    x, y, z = (MLCompute.MLCTensor.tensorWithShape_dataType_([1, 3], FLOAT) for _ in range(3))
    graph = MLCompute.MLCGraph.graph()
    first = graph.nodeWithLayer_sources_(MLCompute.MLCArithmeticLayer.layerWithOperation_(ADD), [x, y])
    graph.nodeWithLayer_sources_(MLCompute.MLCArithmeticLayer.layerWithOperation_(ADD), [first, z])
    ones = [1, 1, 1]
    return infer(graph, {"x": x, "y": y, "z": z}, [{"x": ones, "y": ones, "z": ones}], device)[0]


def convolution() -> Any:
    """1 × 1, three channels to one, all weights 1, no bias."""
    weights = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_([1, 3, 1, 1], 1, FLOAT)
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        1, 1, 3, 1
    )
    return MLCompute.MLCConvolutionLayer.layerWithWeights_biases_descriptor_(weights, None, descriptor)


PIXELS = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], np.float32)


def channels_first(device: Any) -> np.ndarray:
    """[1, 3, 2, 3] gives [1, 1, 2, 3]."""
    x = MLCompute.MLCTensor.tensorWithShape_dataType_([1, 3, 2, 3], FLOAT)
    graph = MLCompute.MLCGraph.graph()
    graph.nodeWithLayer_source_(convolution(), x)
    return infer(graph, {"x": x}, [{"x": np.stack([PIXELS] * 3)}], device)[0]


def channels_last(device: Any) -> np.ndarray:
    """The same with transposes around it: [1, 2, 3, 3] gives [1, 2, 3, 1]."""
    x = MLCompute.MLCTensor.tensorWithShape_dataType_([1, 2, 3, 3], FLOAT)
    graph = MLCompute.MLCGraph.graph()
    first = graph.nodeWithLayer_source_(MLCompute.MLCTransposeLayer.layerWithDimensions_([0, 3, 1, 2]), x)
    result = graph.nodeWithLayer_source_(convolution(), first)
    graph.nodeWithLayer_source_(MLCompute.MLCTransposeLayer.layerWithDimensions_([0, 2, 3, 1]), result)
    return infer(graph, {"x": x}, [{"x": np.stack([PIXELS] * 3, 2)}], device)[0]


def dense(bias: float, device: Any) -> np.ndarray:
    """Weights (1, 0.5) in the shape [1, 1, 2], x = (2, 2)."""
    x = MLCompute.MLCTensor.tensorWithShape_dataType_([1, 2], FLOAT)
    weights = MLCompute.MLCTensor.tensorWithShape_data_dataType_([1, 1, 2], data([1, 0.5]), FLOAT)
    biases = MLCompute.MLCTensor.tensorWithShape_fillWithData_dataType_([1, 1], bias, FLOAT)
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        1, 1, 2, 1
    )
    graph = MLCompute.MLCGraph.graph()
    graph.nodeWithLayer_source_(
        MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, biases, descriptor), x
    )
    return infer(graph, {"x": x}, [{"x": [2, 2]}], device)[0]


if __name__ == "__main__":
    cpu = MLCompute.MLCDevice.cpuDevice()
    for row in added(cpu):
        print("sum", *row[0])
    print("two sums", *chained(cpu)[0])
    print("convolution", *channels_first(cpu).ravel(), "in the other layout", *channels_last(cpu).ravel())
    print("dense", *dense(2, cpu)[0])
