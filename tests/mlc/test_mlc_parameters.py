"""Parameters made without data and filled with `bindAndWriteData:toDevice:` before there is a graph."""

from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from tests.mlc.kit import CPU, Kit, M, X, Y, data, descriptor, floats, rates, tensor

EXECUTE = "executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_"
DEVICES = {
    "cpu": M.MLCDevice.cpuDevice,
    "any": lambda: M.MLCDevice.deviceWithType_(M.MLCDeviceTypeAny),
    "default": M.MLCDevice.new,
    "gpu": M.MLCDevice.gpuDevice,
}
KINDS = [*("cpu", "any", "default"), pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["before the layer", "after the layer", "after the graph", "before compiling"])
def test_a_whole_program_that_binds_its_parameters(kind: str, moment: str) -> None:
    device, kit = DEVICES[kind](), Kit()
    expected = [floats(kit.weights).copy(), floats(kit.biases).copy()]
    buffers = [array.copy() for array in expected]
    weights, biases = tensor([1, 6, 1, 1]), tensor([1, 2, 1, 1])
    x, y, graph = tensor([4, 3]), tensor([4, 2]), M.MLCGraph.graph()

    def bind(now: str) -> None:
        if now == moment:
            assert weights.data() is None and weights.device() is None
            assert weights.bindAndWriteData_toDevice_(data(buffers[0]), device) is True
            assert biases.bindAndWriteData_toDevice_(data(buffers[1]), device) is True
            assert weights.device() == device and np.array_equal(floats(weights), expected[0])

    bind("before the layer")
    dense = M.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, biases, descriptor(3, 2))
    bind("after the layer")
    graph.nodeWithLayer_source_(dense, x)
    bind("after the graph")
    adam = M.MLCAdamOptimizer.optimizerWithDescriptor_(rates(0.1))
    training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], kit.loss, adam)
    assert training.addInputs_lossLabels_({"x": x}, {"y": y})
    bind("before compiling")
    assert training.compileWithOptions_device_(0, device), M.lastError()
    for _ in range(3):
        got: list[Any] = []
        run = getattr(training, EXECUTE)
        synchronous = M.MLCExecutionOptionsSynchronous
        assert run({"x": data(X)}, {"y": data(Y)}, None, 4, synchronous, lambda *given, got=got: got.append(given))
        assert np.allclose(floats(got[0][0]), floats(kit.step()[0]), rtol=1e-5)
    training.synchronizeUpdates()
    read = np.zeros(6, np.float32)
    assert weights.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(read, 24, True)
    assert np.allclose(read, floats(kit.weights), rtol=1e-5) and not np.allclose(read, expected[0])
    assert np.array_equal(buffers[0], read) and np.array_equal(floats(biases), buffers[1])  # the caller's memory


def test_a_shorter_buffer_is_refused_and_changes_nothing() -> None:
    weights = tensor([1, 6, 1, 1])
    assert weights.bindAndWriteData_toDevice_(data(np.zeros(5)), CPU) is False
    assert isinstance(M.lastError().native, sg.DataError) and "20 bytes for 24" in M.lastError().localizedDescription()
    assert weights.data() is None and weights.device() is None and not weights.native.is_bound
    assert weights.bindAndWriteData_toDevice_(data(np.arange(8)), CPU) is True  # the first bytes count
    assert np.array_equal(weights.native.numpy().ravel(), np.arange(6))


@pytest.mark.parametrize("name", ["lstm", "batch normalization", "embedding"])
def test_parameters_of_other_layers(name: str) -> None:
    made: list[Any] = []

    def empty(shape: list[int]) -> Any:
        made.append(tensor(shape))
        return made[-1]

    x = tensor([2, 3, 4, 4])
    if name == "lstm":
        x = tensor([2, 3, 4])
        settings = M.MLCLSTMDescriptor.descriptorWithInputSize_hiddenSize_layerCount_(4, 5, 1)
        gates = [[empty(shape) for _ in range(4)] for shape in ([5, 4], [5, 5], [5])]
        layer = M.MLCLSTMLayer.layerWithDescriptor_inputWeights_hiddenWeights_biases_(settings, *gates)
    elif name == "batch normalization":
        make = M.MLCBatchNormalizationLayer.layerWithFeatureChannelCount_mean_variance_beta_gamma_varianceEpsilon_
        layer = make(3, *(empty([1, 3, 1, 1]) for _ in range(4)), 1e-5)
    else:
        x = tensor([2], kind=M.MLCDataTypeInt32)
        settings = M.MLCEmbeddingDescriptor.descriptorWithEmbeddingCount_embeddingDimension_(7, 3)
        layer = M.MLCEmbeddingLayer.layerWithDescriptor_weights_(settings, empty([1, 7, 1, 3]))
    graph = M.MLCGraph.graph()
    assert graph.nodeWithLayer_source_(layer, x) is not None, M.lastError()
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_({"x": x})
    assert inference.compileWithOptions_device_(0, CPU) is False
    assert "bindAndWriteData_toDevice_" in M.lastError().localizedDescription()
    for one in made:
        count = one.native.descriptor.element_count
        assert one.bindAndWriteData_toDevice_(data(np.full(count, 0.5)), CPU) is True
    assert inference.compileWithOptions_device_(0, CPU) is True
    values = data(np.ones(2), np.int32) if name == "embedding" else data(np.ones(96))
    assert inference.executeWithInputsData_batchSize_options_completionHandler_({"x": values}, 0, 0, None) is True


def test_a_trained_input_is_filled_the_same_way() -> None:
    kit = Kit()
    assert kit.declared.setTrainingTensorParameters_([M.MLCTensorParameter.parameterWithTensor_(kit.x)])
    assert kit.declared.compileWithOptions_device_(0, CPU) is False
    assert "bindAndWriteData_toDevice_" in M.lastError().localizedDescription()
    start = X.copy()
    assert kit.x.bindAndWriteData_toDevice_(data(start), CPU) is True
    assert kit.declared.compileWithOptions_device_(0, CPU) is True
    run = getattr(kit.declared, EXECUTE)
    assert run({}, {"y": data(Y)}, None, 4, 0, None) is True and not np.array_equal(floats(kit.x), X.ravel())
