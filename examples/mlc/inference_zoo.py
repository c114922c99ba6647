"""Small programs of many hands: sums, products, a dense layer, transposes; batch size 0 everywhere.

python examples/mlc/inference_zoo.py
"""

from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

FLOAT = MLCompute.MLCDataTypeFloat32
SYNCHRONOUS = MLCompute.MLCExecutionOptionsSynchronous


def data(numbers: Any) -> Any:
    """Numbers as bytes and a length."""
    array = np.array(numbers, np.float32)
    return MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def tensor(shape: list[int], numbers: Any = None) -> Any:
    """A tensor, with data where numbers are given."""
    if numbers is None:
        return MLCompute.MLCTensor.tensorWithShape_dataType_(shape, FLOAT)
    return MLCompute.MLCTensor.tensorWithShape_data_dataType_(shape, data(numbers), FLOAT)


def run(graph: Any, inputs: dict[str, tuple[Any, Any]], options: int = 0, handler: Any = None) -> np.ndarray:
    """An inference graph over `graph`: tensors and numbers by name in, the last layer's numbers out."""
    device = MLCompute.MLCDevice.deviceWithType_(MLCompute.MLCDeviceTypeAny)
    inference = MLCompute.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_({name: one for name, (one, _) in inputs.items()})
    assert inference.compileWithOptions_device_(options, device)
    found: list[np.ndarray] = []

    def finished(result: Any, error: Any, seconds: float) -> None:
        numbers = np.zeros(result.descriptor().shape(), np.float32)
        assert result.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(numbers, numbers.nbytes, False)
        found.append(numbers)
        if handler is not None:
            handler(numbers)

    given = {name: numbers if hasattr(numbers, "bytes") else data(numbers) for name, (_, numbers) in inputs.items()}
    assert inference.executeWithInputsData_batchSize_options_completionHandler_(given, 0, SYNCHRONOUS, finished)
    return found[0]


def sum_of_three(rows: list[Any], shape: list[int], options: int = 0) -> np.ndarray:
    """Two additions in a row."""
    one, two, three = (tensor(shape) for _ in rows)
    graph = MLCompute.MLCGraph.graph()
    add = MLCompute.MLCArithmeticLayer.layerWithOperation_
    first = graph.nodeWithLayer_sources_(add(MLCompute.MLCArithmeticOperationAdd), [one, two])
    graph.nodeWithLayer_sources_(add(MLCompute.MLCArithmeticOperationAdd), [first, three])
    named = zip(("data1", "data2", "data3"), (one, two, three), rows, strict=True)
    return run(graph, {name: (where, numbers) for name, where, numbers in named}, options)


def evaluate(x: Any, y: Any, graph: Any) -> np.ndarray:
    """A sum in a training graph without a loss or an optimizer, compiled before its inputs are declared."""
    add = MLCompute.MLCArithmeticLayer.layerWithOperation_(MLCompute.MLCArithmeticOperationAdd)
    left, right = tensor([len(x)], x), tensor([len(y)], y)
    result = graph.nodeWithLayer_sources_(add, [left, right])
    training = MLCompute.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], None, None)
    assert training.compileWithOptions_device_(0, MLCompute.MLCDevice.cpuDevice())
    assert training.addInputs_lossLabels_({"left": left, "right": right}, None)
    assert training.addOutputs_({"sum": result})
    found: list[np.ndarray] = []
    assert training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
        {"left": data(x), "right": data(y)},
        None,
        None,
        0,
        SYNCHRONOUS,
        lambda result, error, seconds: found.append(np.frombuffer(result.data(), np.float32).copy()),
    )
    return found[0]


def dense() -> np.ndarray:
    """Weights of ones, no bias: each output is the sum of the row."""
    x = tensor([2, 4])
    descriptor = MLCompute.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        2, 4, 4, 2
    )
    layer = MLCompute.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(
        tensor([1, 8], np.ones(8)), None, descriptor
    )
    graph = MLCompute.MLCGraph.graph()
    graph.nodeWithLayer_source_(layer, x)
    return run(graph, {"x": (x, [[0, 1, 0, 1], [1, 1, 1, 1]])})


def there_and_back(numbers: np.ndarray) -> np.ndarray:
    """A transpose and its inverse."""
    x = tensor(list(numbers.shape))
    graph = MLCompute.MLCGraph.graph()
    graph.transposeWithDimensions_source_([0, 2, 3, 1], graph.transposeWithDimensions_source_([0, 3, 1, 2], x))
    return run(graph, {"x": (x, numbers)})


def product(x: Any, y: Any) -> np.ndarray:
    """A matrix product, inputs called "0" and "1", with debug layers."""
    left, right = tensor(list(np.shape(x))), tensor(list(np.shape(y)))
    graph = MLCompute.MLCGraph.graph()
    layer = MLCompute.MLCMatMulLayer.layerWithDescriptor_(MLCompute.MLCMatMulDescriptor.descriptor())
    graph.nodeWithLayer_sources_(layer, [left, right])
    return run(graph, {"0": (left, x), "1": (right, y)}, MLCompute.MLCGraphCompilationOptionsDebugLayers)


def sgemm(a: np.ndarray, b: np.ndarray, c: np.ndarray, alpha: float = 1.0) -> None:
    """C = alpha A B + C: the handler writes the result over the memory that C came in."""
    (m, k), n = a.shape, b.shape[1]
    x, y, z = tensor([1, m, k]), tensor([1, k, n]), tensor([1, m, n])
    descriptor = MLCompute.MLCMatMulDescriptor.descriptorWithAlpha_transposesX_transposesY_(alpha, False, False)
    graph = MLCompute.MLCGraph.graph()
    multiplied = graph.nodeWithLayer_sources_(MLCompute.MLCMatMulLayer.layerWithDescriptor_(descriptor), [x, y])
    add = MLCompute.MLCArithmeticLayer.layerWithOperation_(MLCompute.MLCArithmeticOperationAdd)
    graph.nodeWithLayer_sources_(add, [multiplied, z])
    memory = MLCompute.MLCTensorData.dataWithBytesNoCopy_length_(c, c.nbytes)

    def overwrite(numbers: np.ndarray) -> None:
        c[:] = numbers[0]

    run(graph, {"x": (x, a), "y": (y, b), "z": (z, memory)}, MLCompute.MLCGraphCompilationOptionsLinkGraphs, overwrite)


if __name__ == "__main__":
    print("three columns", sum_of_three([range(1, 7), range(7, 13), range(6, 0, -1)], [6, 1]).ravel())
    print("4 + 2 =", *evaluate([4], [2], MLCompute.MLCGraph.graph()))
    print("dense", dense().tolist())
    print("product", product([[11, 2], [3, 4]], [[1, 2], [3, 4]]).tolist())
    c = np.ones((2, 2), np.float32)
    sgemm(np.array([[1, 2], [3, 4]], np.float32), np.array([[1, 2], [3, 4]], np.float32), c)
    print("C = A B + C", c.tolist())
