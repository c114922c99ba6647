"""Whole sequences of calls at the face, and how faces and native objects belong together."""

import array
import copy
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from tests.mlc.kit import CPU, Kit, M, X, Y, data, descriptor, floats, rates, tensor

EXECUTE = "executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_"


def sgd(rate: float) -> Any:
    return M.MLCSGDOptimizer.optimizerWithDescriptor_(rates(rate))


def graph_of(kit: Kit, loss: Any = None, optimizer: Any = None) -> Any:
    return M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([kit.graph], loss, optimizer)


# ------------------------------------------------------------------------------------------------ faces and natives


def test_the_same_native_object_has_the_same_face() -> None:
    kit = Kit()
    assert kit.graph.layers()[0] is kit.dense and kit.dense.weights() is kit.weights
    assert kit.declared.optimizer() is kit.adam and kit.out.descriptor() is kit.out.descriptor()
    assert isinstance(kit.out.native, sg.Tensor) and isinstance(kit.training.native, sg.TrainingGraph)


def test_both_styles_mix() -> None:
    x = sg.Tensor((2, 3))
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), x)
    from stepgraph.mlc.face import face_of

    face = face_of(graph)
    assert isinstance(face, M.MLCGraph) and face.isKindOfClass_(M.MLCGraph)
    result = face.nodeWithLayer_source_(sg.ActivationLayer.tanh(), hidden)  # native layer and tensor
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.compileWithOptions_device_(0, sg.Device.cpu())
    found = inference.native.execute({x.label: X[:2]}).result
    assert np.array_equal(found.numpy(), result.native.numpy()) and np.allclose(
        floats(result).reshape(2, 3), np.tanh(np.maximum(X[:2], 0)), atol=1e-6
    )


def test_a_layer_of_one_s_own_is_a_layer_here() -> None:
    class Double(sg.Layer):
        def forward(self, x: Any, *, scope: Any) -> Any:
            return 2 * x

    graph = M.MLCGraph.graph()
    assert graph.nodeWithLayer_source_(Double(), tensor([2])) is not None
    assert type(graph.layers()[0]) is M.MLCLayer and graph.layers()[0].label() == "Double"


def test_classes_follow_the_original_s() -> None:
    assert issubclass(M.MLCTrainingGraph, M.MLCGraph) and issubclass(M.MLCYOLOLossLayer, M.MLCLossLayer)
    assert isinstance(Kit().dense, M.MLCLayer) and not isinstance(Kit().dense, M.MLCConvolutionLayer)


def test_copies_and_python_s_own() -> None:
    adam = M.MLCAdamOptimizer.optimizerWithDescriptor_(rates(0.1))
    assert copy.copy(adam) is not adam and copy.copy(adam).learningRate() == adam.learningRate()
    assert Kit().dense.copy() is None  # layers are not copied
    layer = M.MLCActivationLayer.reluLayer()
    layer.label = "first"
    assert layer.label() == "first" and "first" in repr(layer) and layer.description() == str(layer)
    with pytest.raises(AttributeError):
        layer.descriptor = None  # read-only, and no selector of that name
    assert len({adam, adam}) == 1 and adam != copy.copy(adam) and adam != 3


def test_bytes_of_tensors() -> None:
    given = np.arange(4, dtype=np.float32)
    made = tensor([4], given)
    found = made.data()
    assert len(found) == found.length() == 16 and bytes(found) == given.tobytes() and found
    same = given.tobytes()
    assert found == same and (found != same) is False and found != b"other" and isinstance(found.bytes(), memoryview)
    for buffer in (found, given, given.tobytes(), bytearray(given), memoryview(given), array.array("f", given)):
        again = M.MLCTensor.tensorWithShape_data_dataType_([4], buffer, M.MLCDataTypeFloat32)  # all of them are data
        assert np.array_equal(floats(again), given), type(buffer)
    wrapped = M.MLCTensorData.dataWithBytesNoCopy_length_(array.array("f", [1, 2]), 8)
    assert np.frombuffer(wrapped.bytes(), np.float32).tolist() == [1, 2]


# ------------------------------------------------------------------------------------------------------- sequences


def test_three_phases_equal_one_call() -> None:
    whole, apart = Kit(), Kit()
    got: list[Any] = []
    for _ in range(2):
        loss = floats(whole.step()[0]).copy()
        got.clear()
        apart.bind()
        t = apart.training
        assert t.executeForwardWithBatchSize_options_completionHandler_(4, 0, lambda *given: got.append(given))
        assert np.array_equal(floats(got[0][0]), loss)
        assert t.executeGradientWithBatchSize_options_completionHandler_(4, 0, lambda *given: got.append(given))
        gradient = np.frombuffer(t.gradientDataForParameter_layer_(apart.weights, apart.dense), np.float32)
        assert gradient.shape == (6,) and np.abs(gradient).max() > 0
        assert t.executeOptimizerUpdateWithOptions_completionHandler_(0, lambda *given: got.append(given))
        assert [given[:2] for given in got[1:]] == [(None, None)] * 2
    for one, other in ((whole.weights, apart.weights), (whole.biases, apart.biases)):
        assert one.data() == other.data()
    assert whole.training.gradientDataForParameter_layer_(whole.weights, whole.dense) is None  # not kept by one call


def test_an_optimizer_of_one_s_own() -> None:
    kit = Kit()
    kit.gradient()
    gradient = np.frombuffer(kit.training.gradientDataForParameter_layer_(kit.weights, kit.dense), np.float32)
    wanted = floats(kit.weights) - 0.5 * gradient
    assert kit.weights.bindAndWriteData_toDevice_(data(wanted), CPU) is True
    kit.forward()
    assert np.allclose(floats(kit.out).reshape(4, 2), X @ wanted.reshape(2, 3).T + floats(kit.biases), atol=1e-5)


def test_gradients_from_outside() -> None:
    kit = Kit()
    training = graph_of(kit, optimizer=sgd(0.1))
    assert training.addInputs_lossLabels_({"x": kit.x}, None) and training.compileWithOptions_device_(0, CPU)
    handle = training.allocateUserGradientForTensor_(kit.out)
    assert handle.descriptor().shape() == [4, 2] and training.allocateUserGradientForTensor_(kit.out) is handle
    bind = training.bindAndWriteData_forInputs_toDevice_batchSize_synchronous_
    assert bind({"x": data(X)}, {"x": kit.x}, CPU, 4, True)
    assert training.executeForwardWithBatchSize_options_completionHandler_(4, 0, None)
    slope = np.ones((4, 2), np.float32)
    assert handle.bindAndWriteData_toDevice_(data(slope), CPU) is True  # or through the graph's method
    before = floats(kit.weights).copy()
    assert training.executeGradientWithBatchSize_options_completionHandler_(4, 0, None)
    assert training.executeOptimizerUpdateWithOptions_completionHandler_(0, None)
    assert np.allclose(floats(kit.weights), before - 0.1 * (slope.T @ X).ravel(), atol=1e-6)


def test_an_optimizer_that_comes_late() -> None:
    kit = Kit()
    training = graph_of(kit, kit.loss)
    assert training.addInputs_lossLabels_({"x": kit.x}, {"y": kit.y}) and training.compileWithOptions_device_(0, CPU)
    before = bytes(kit.weights.data())
    assert getattr(training, EXECUTE)({"x": data(X)}, {"y": data(Y)}, None, 4, 0, None)
    assert bytes(kit.weights.data()) == before and training.compileOptimizer_(kit.adam) is True
    assert getattr(training, EXECUTE)({"x": data(X)}, {"y": data(Y)}, None, 4, 0, None)
    assert bytes(kit.weights.data()) != before and training.optimizer() is kit.adam


def test_evaluation_in_a_training_graph() -> None:
    kit = Kit()
    state, got = kit.state(), []
    options = M.MLCExecutionOptionsForwardForInference | M.MLCExecutionOptionsSynchronous
    execute = getattr(kit.training, EXECUTE)
    assert execute({"x": data(X)}, {"y": data(Y)}, None, 4, options, lambda *given: got.append(given))
    assert kit.state() == state and np.isclose(floats(got[0][0])[0], np.square(floats(kit.out) - Y.ravel()).mean())


def test_inputs_that_are_trained() -> None:
    graph, x, y = M.MLCGraph.graph(), tensor([2], [1, 2]), tensor([2])
    graph.nodeWithLayer_source_(M.MLCActivationLayer.linearLayerWithScale_bias_(2.0, 0.0), x)
    loss = M.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(M.MLCReductionTypeSum, 1.0)
    training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, sgd(0.1))
    assert training.addInputs_lossLabels_(None, {"y": y})
    assert training.setTrainingTensorParameters_([M.MLCTensorParameter.parameterWithTensor_(x)])
    assert training.compileWithOptions_device_(0, CPU)
    for _ in range(50):
        assert getattr(training, EXECUTE)({}, {"y": data([6, 8])}, None, 0, 0, None)
    assert np.allclose(floats(x), [3, 4], atol=1e-3)


def test_resuming() -> None:
    first = Kit()
    first.step()
    first.step()
    saved = [
        (floats(t).copy(), [np.array(one.bytes()).copy() for one in t.optimizerData()])
        for t in (first.weights, first.biases)
    ]
    step, last = first.adam.timeStep(), floats(first.step()[0]).copy()
    second = Kit()
    make = M.MLCAdamOptimizer.optimizerWithDescriptor_beta1_beta2_epsilon_timeStep_
    second.adam = make(rates(0.1), 0.9, 0.999, 1e-8, step)
    for t, (values, buffers) in zip((second.weights, second.biases), saved, strict=True):
        assert t.bindAndWriteData_toDevice_(data(values), CPU)
        wrapped = [M.MLCTensorData.dataWithBytesNoCopy_length_(one, one.nbytes) for one in buffers]
        assert second.declared.bindOptimizerData_deviceData_withTensor_(wrapped, None, t)
    assert np.array_equal(floats(second.step()[0]), last)
    first.step(), second.step()
    assert first.weights.data() == second.weights.data()


def test_linked_graphs() -> None:
    """Two halves with a foreign doubling in between train like one network."""
    first, second, x, middle, y = M.MLCGraph.graph(), M.MLCGraph.graph(), tensor([4, 3]), tensor([4, 2]), tensor([4, 2])
    weights = tensor([2, 3], np.full(6, 0.1))
    dense = M.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, None, descriptor(3, 2))
    out = first.nodeWithLayer_source_(dense, x)
    second.nodeWithLayer_source_(M.MLCActivationLayer.tanhLayer(), middle)
    make = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_
    loss = M.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(M.MLCReductionTypeSum, 1.0)
    one, two = make([first], None, sgd(0.1)), make([second], loss, None)
    assert one.addInputs_lossLabels_({"x": x}, None) and two.addInputs_lossLabels_({"m": middle}, {"y": y})
    options = M.MLCGraphCompilationOptionsLinkGraphs | M.MLCGraphCompilationOptionsComputeAllGradients
    assert one.compileWithOptions_device_(options, CPU) and two.compileWithOptions_device_(options, CPU)
    assert one.linkWithGraphs_([two]) is True
    seed = one.allocateUserGradientForTensor_(out)
    assert one.bindAndWriteData_forInputs_toDevice_synchronous_({"x": data(X)}, {"x": x}, CPU, True)
    assert one.executeForwardWithBatchSize_options_completionHandler_(4, 0, None)
    doubled = 2 * floats(out).reshape(4, 2)
    bound = {"m": data(doubled), "y": data(Y)}
    assert two.bindAndWriteData_forInputs_toDevice_synchronous_(bound, {"m": middle, "y": y}, CPU, True)
    assert two.executeForwardWithBatchSize_options_completionHandler_(4, 0, None)
    assert two.executeGradientWithBatchSize_options_completionHandler_(4, 0, None)
    back = 2 * floats(two.gradientTensorForInput_(middle)).reshape(4, 2)
    assert one.bindAndWriteData_forInputs_toDevice_synchronous_({"g": data(back)}, {"g": seed}, CPU, True)
    assert one.executeGradientWithBatchSize_options_completionHandler_(4, 0, None)
    found = np.frombuffer(one.gradientDataForParameter_layer_(weights, dense), np.float32)
    wide = np.tanh(doubled)
    wanted = (2 * 2 * (wide - Y) * (1 - wide**2)).T @ X
    assert np.allclose(found, wanted.ravel(), atol=1e-4)
    assert one.executeOptimizerUpdateWithOptions_completionHandler_(0, None)


def test_frozen_layers() -> None:
    kit = Kit()
    kit.dense.weightsParameter().setIsUpdatable_(False)
    before = bytes(kit.weights.data()), bytes(kit.biases.data())
    kit.step()
    assert bytes(kit.weights.data()) == before[0] and bytes(kit.biases.data()) != before[1]
    graph, weights = M.MLCGraph.graph(), tensor([2, 3], np.ones(6))
    dense = M.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, None, descriptor(3, 2))
    graph.nodeWithLayer_sources_disableUpdate_(dense, [kit.x], True)
    training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], kit.loss, sgd(0.1))
    assert training.addInputs_lossLabels_({"x": kit.x}, {"y": kit.y}) and training.compileWithOptions_device_(0, CPU)
    assert getattr(training, EXECUTE)({"x": data(X)}, {"y": data(Y)}, None, 4, 0, None)
    assert floats(weights).tolist() == [1] * 6 and training.gradientDataForParameter_layer_(weights, dense) is None


def test_outputs_and_other_batch_sizes() -> None:
    kit = Kit()
    out = np.zeros((4, 2), np.float32)
    execute = kit.training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_outputsData_batchSize_options_completionHandler_
    memory = M.MLCTensorData.dataWithBytesNoCopy_length_(out, out.nbytes)
    before = X @ floats(kit.weights).reshape(2, 3).T + floats(kit.biases)
    got: list[Any] = []
    assert execute({"x": data(X)}, {"y": data(Y)}, None, {"out": memory}, 3, 0, lambda *given: got.append(given))
    assert np.allclose(out[:3], before[:3], atol=1e-5) and np.array_equal(out[3], [0, 0])
    assert np.isclose(floats(got[0][0])[0], np.square(before[:3] - Y[:3]).mean(), atol=1e-5)  # divided by 3 rows


def test_debugging_keeps_a_layer_readable() -> None:
    kit = Kit()
    inner = kit.graph.nodeWithLayer_source_(M.MLCActivationLayer.tanhLayer(), kit.out)
    kit.graph.nodeWithLayer_source_(M.MLCActivationLayer.sigmoidLayer(), inner)
    tanh = kit.graph.layers()[1]
    tanh.setIsDebuggingEnabled_(True)
    training = graph_of(kit, kit.loss, kit.adam)
    assert training.addInputs_lossLabels_({"x": kit.x}, {"y": kit.y})
    assert training.compileWithOptions_device_(M.MLCGraphCompilationOptionsDebugLayers, CPU)
    assert getattr(training, EXECUTE)({"x": data(X)}, {"y": data(Y)}, None, 4, 0, None)
    assert inner.data().length() == 32 and training.resultGradientTensorsForLayer_(tanh)[0].data().length() == 32
    assert kit.out.data() is None  # nobody asked for it


def test_the_drawing_shows_where_gradients_stop() -> None:
    kit = Kit()
    assert kit.declared.summarizedDOTDescription().count("style=dashed") == 1  # the labels
    assert kit.declared.stopGradientForTensors_([kit.x])
    assert kit.declared.summarizedDOTDescription().count("style=dashed") == 2


def test_a_user_gradient_allocated_before_compiling_can_be_written() -> None:
    kit = Kit()
    handle = kit.declared.allocateUserGradientForTensor_(kit.out)
    assert handle.bindAndWriteData_toDevice_(data(Y), CPU) is True
    assert kit.training.device() == handle.device()


@pytest.mark.parametrize("key", ["sortedSequenceLengths", "sortedSequenceLength"])
@pytest.mark.parametrize("declared", [True, False])
def test_lengths_of_sequences_by_the_framework_s_key(key: str, declared: bool) -> None:
    sizes = M.MLCLSTMDescriptor.descriptorWithInputSize_hiddenSize_layerCount_(1, 1, 1)
    ones = [[tensor([1], 1.0) for _ in range(4)] for _ in range(2)]
    layer = M.MLCLSTMLayer.layerWithDescriptor_inputWeights_hiddenWeights_biases_(sizes, *ones, None)
    graph, x, lengths = M.MLCGraph.graph(), tensor([2, 3, 1]), tensor([2], kind=M.MLCDataTypeInt32)
    result = graph.nodeWithLayer_sources_(layer, [x, lengths])
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_({"x": x, key: lengths} if declared else {"x": x})
    assert inference.compileWithOptions_device_(0, CPU)
    given = {"x": data(np.ones(6)), key: data([3, 1], np.int32)}
    assert inference.executeWithInputsData_batchSize_options_completionHandler_(given, 0, 0, None)
    found = floats(result).reshape(2, 3)
    assert found[0].all() and found[1].tolist() == [found[0, 0], 0, 0]
