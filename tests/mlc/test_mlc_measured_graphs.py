"""What was measured of the original's graphs, at this face, and what is decided otherwise."""

from typing import Any

import numpy as np

from tests.mlc.kit import CPU, Kit, M, X, Y, data, floats, rates, tensor

RELU = M.MLCActivationLayer.reluLayer


def test_answers_of_nodes() -> None:
    graph, x = M.MLCGraph.graph(), tensor([2, 3])
    layer = RELU()
    result = graph.nodeWithLayer_source_(layer, x)
    for sources in ([x, x], [x, x, x], []):
        assert graph.nodeWithLayer_sources_(layer, sources) is None
        assert graph.nodeWithLayer_sources_disableUpdate_(layer, sources, False) is None
    assert graph.nodeWithLayer_sources_lossLabels_(layer, [x, x], []) is None
    assert graph.layers() == [layer] and graph.layers()[0] is layer
    assert graph.sourceTensorsForLayer_(layer)[0] is x and graph.resultTensorsForLayer_(layer)[0] is result
    assert graph.sourceTensorsForLayer_(RELU()) == [] and graph.resultTensorsForLayer_(None) == []
    assert M.MLCGraph.graph().nodeWithLayer_source_(layer, x) is None  # it belongs to the first graph
    assert graph.device() is None and graph.summarizedDOTDescription().startswith("digraph")
    assert graph.nodeWithLayer_source_(layer, result) is not None and len(graph.layers()) == 1


def test_answers_of_conveniences() -> None:
    graph, x = M.MLCGraph.graph(), tensor([2, 3])

    def shape(made: Any) -> Any:
        return None if made is None else made.descriptor().shape()

    join = graph.concatenateWithSources_dimension_
    assert [shape(join([x, tensor([2, 3])], one)) for one in (1, 0, 3)] == [[2, 6], [4, 3], None]
    assert [shape(graph.reshapeWithShape_source_(one, x)) for one in ([6], [3, 2], [7], None, [])] == [
        [6],
        [3, 2],
        None,  # decided: elements are counted
        None,
        None,
    ]
    turn = graph.transposeWithDimensions_source_
    assert [shape(turn(one, x)) for one in ([0, 1], [1, 0], [0])] == [[2, 3], [3, 2], None]
    assert shape(turn([0, 2, 1], tensor([2, 3, 4]))) == [2, 4, 3] and turn([0, 1, 2], tensor([1, 2, 3, 4])) is None
    assert [shape(one) for one in graph.splitWithSource_splitCount_dimension_(x, 2, 1)] == [[2, 2], [2, 1]]
    assert [shape(one) for one in graph.splitWithSource_splitCount_dimension_(x, 3, 0)] == [[1, 3], [1, 3]]
    assert graph.splitWithSource_splitSectionLengths_dimension_(x, [1, 5], 1) is None  # decided: lengths must add up


def test_answers_of_bindings() -> None:
    kit = Kit()
    bind = kit.graph.bindAndWriteData_forInputs_toDevice_synchronous_
    assert bind({}, {}, CPU, True) is True and bind({"other": data(X)}, {"x": kit.x}, CPU, True) is True
    assert bind({"x": data(X)}, None, CPU, True) is False and bind({"x": data(X)}, {"x": kit.x}, None, True) is False
    assert kit.graph.device() is None and kit.x.data() is None
    stranger = tensor([4, 3])
    assert bind({"z": data(X)}, {"z": stranger}, CPU, True) is True and stranger.device() is not None


def test_answers_of_inference() -> None:
    graph, x = M.MLCGraph.graph(), tensor([2, 3])
    result = graph.nodeWithLayer_source_(RELU(), x)
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.deviceMemorySize() == 0 and inference.device() is None
    assert inference.compileWithOptions_device_(0, None) is False  # no device yet
    assert inference.addInputs_(None) is inference.addInputs_({}) is inference.addInputs_({"x": x}) is True
    assert inference.addOutputs_(None) is inference.addOutputs_({"y": result}) is True
    assert inference.compileWithOptions_device_(0, CPU) is True and inference.device() == CPU
    assert inference.compileWithOptions_device_(0, None) is True  # keeps the device
    assert inference.deviceMemorySize() == 24 and x.device() == CPU
    out = bytearray(24)
    got: list[Any] = []
    execute = inference.executeWithInputsData_outputsData_batchSize_options_completionHandler_
    x_data, y_data = data([-1, 2, -3, 4, 0, 1]), M.MLCTensorData.dataWithBytesNoCopy_length_(out, 24)
    options = M.MLCExecutionOptionsSynchronous | M.MLCExecutionOptionsProfiling
    assert execute({"x": x_data}, {"y": y_data}, 0, options, lambda *given: got.append(given)) is True
    assert np.frombuffer(out, np.float32).tolist() == [0, 2, 0, 4, 0, 1]
    ((tensor_, error, seconds),) = got
    assert tensor_.tensorID() == result.tensorID() and error is None and seconds > 0
    assert tensor_.data() == result.data() == bytes(out)
    loss = inference.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
    assert loss({"x": x_data}, None, None, 0, 0, None) is False  # no labels were declared
    skip = M.MLCExecutionOptionsSkipWritingInputDataToDevice
    other = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert other.compileWithOptions_device_(0, CPU)
    assert other.executeWithInputsData_batchSize_options_completionHandler_({}, 0, skip, None) is False


def test_answers_of_compiling_with_constants() -> None:
    kit = Kit()
    for tensors, values in (
        (None, None),
        ({}, {}),
        ({"x": kit.x}, None),
        (None, {"x": data(X)}),
        ({"x": kit.x}, {"x": data(X)}),
    ):
        graph = M.MLCInferenceGraph.graphWithGraphObjects_([kit.graph])
        assert graph.compileWithOptions_device_inputTensors_inputTensorsData_(0, CPU, tensors, values) is True
    got: list[Any] = []
    assert graph.executeWithInputsData_batchSize_options_completionHandler_({}, 0, 0, lambda *given: got.append(given))
    assert got[0][1] is None


def test_answers_of_training() -> None:
    graph, x = M.MLCGraph.graph(), tensor([2, 3])
    layer = RELU()
    result = graph.nodeWithLayer_source_(layer, x)
    make = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_
    training, adam = make([graph], None, None), M.MLCAdamOptimizer.optimizerWithDescriptor_(rates(0.1))
    assert training.optimizer() is None and training.deviceMemorySize() == 0
    assert (
        training.compileOptimizer_(adam)
        is training.linkWithGraphs_([])
        is training.linkWithGraphs_([training])
        is False
    )
    assert training.gradientTensorForInput_(x) is None and training.resultGradientTensorsForLayer_(layer) == []
    assert training.allocateUserGradientForTensor_(tensor([2, 3])) is None  # unknown to the graph
    assert training.stopGradientForTensors_([tensor([2])]) is training.setTrainingTensorParameters_([]) is True
    assert training.compileWithOptions_device_(0, CPU) is True and training.deviceMemorySize() == 48
    assert training.executeForwardWithBatchSize_options_completionHandler_(2, 0, None) is False  # nothing is bound
    assert training.executeForwardWithBatchSize_options_outputsData_completionHandler_(2, 0, None, None) is False
    (source,) = training.sourceGradientTensorsForLayer_(layer)
    assert source.descriptor().shape() == [2, 3] and source is not x
    assert training.gradientDataForParameter_layer_(x, layer) is None
    assert make([graph], None, adam).optimizer() is adam
    assert training.resultTensorsForLayer_(layer)[0] is result


def test_graphs_without_layers_and_calls_before_compiling() -> None:
    for kind in (M.MLCInferenceGraph, M.MLCTrainingGraph):
        assert kind.graph().compileWithOptions_device_(0, CPU) is False
    kit = Kit()
    execute = (
        kit.declared.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
    )
    called: list[Any] = []
    assert execute({"x": data(X)}, {"y": data(Y)}, None, 4, 0, lambda *given: called.append(given)) is False
    assert not called  # a refused call has no handler


def test_linked_inference_graphs() -> None:
    first, second = Kit().inference, Kit().inference
    assert first.linkWithGraphs_([]) is first.linkWithGraphs_([first]) is first.linkWithGraphs_([second]) is True
    assert len(first.layers()) == 1
    assert first.linkWithGraphs_([Kit().training]) is False


def test_unsuitable_operations() -> None:
    graph, x = M.MLCGraph.graph(), tensor([2, 3])
    add = M.MLCArithmeticLayer.layerWithOperation_(M.MLCArithmeticOperationAdd)
    root = M.MLCArithmeticLayer.layerWithOperation_(M.MLCArithmeticOperationSqrt)
    logic = M.MLCComparisonLayer.layerWithOperation_(M.MLCComparisonOperationLogicalAND)
    assert graph.nodeWithLayer_source_(add, x) is graph.nodeWithLayer_sources_(root, [x, x]) is None
    assert graph.nodeWithLayer_sources_(logic, [x, x]) is None


VALUES = [
    ("HardSigmoid", (0.2, 0.5), [0.7, 0.9, 1, 1]),
    ("SoftPlus", (), [1.313262, 2.126928, 3.048587, 4.01815]),
    ("SoftSign", (), [0.5, 0.6666667, 0.75, 0.8]),
    ("ReLUN", (1, 1), [1, 1, 1, 1]),
    ("ReLUN", (0, 6), [1, 2, 3, 4]),
    ("LogSigmoid", (), [-0.3132617, -0.126928, -0.04858733, -0.01815]),
    ("SoftShrink", (0.5, 1), [0.5, 1.5, 2.5, 3.5]),
    ("Threshold", (1, 1), [1, 2, 3, 4]),
    ("Clamp", (1, 1), [1, 1, 1, 1]),
    ("Clamp", (-1, 2), [1, 2, 2, 2]),
    ("GELU", (), [0.841192, 1.9546, 2.99636, 3.99993]),
    ("TanhShrink", (), [0.2384059, 1.035972, 2.004945, 3.000671]),
    ("SELU", (), [1.050701, 2.101402, 3.152103, 4.202804]),
    ("HardSwish", (), [0.6666667, 1.6666667, 3, 4]),
]


def test_values_of_activations() -> None:
    graph, x = M.MLCGraph.graph(), tensor([4])
    made = {}
    for i, (kind, numbers, _) in enumerate(VALUES):
        raw = getattr(M, f"MLCActivationType{kind}")
        make = M.MLCActivationDescriptor
        settings = make.descriptorWithType_a_b_(raw, *numbers) if numbers else make.descriptorWithType_(raw)
        made[str(i)] = graph.nodeWithLayer_source_(M.MLCActivationLayer.layerWithDescriptor_(settings), x)
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert (
        inference.addInputs_({"x": x}) and inference.addOutputs_(made) and inference.compileWithOptions_device_(0, CPU)
    )
    assert inference.executeWithInputsData_batchSize_options_completionHandler_({"x": data([1, 2, 3, 4])}, 0, 0, None)
    for i, (kind, _, wanted) in enumerate(VALUES):
        assert np.allclose(floats(made[str(i)]), wanted, rtol=0, atol=1e-5), kind


# ------------------------------------------------------------------------------------- seen in programs that ran there


def run(training: Any, inputs: Any, labels: Any, batch: int) -> Any:
    """One synchronous step; the handler's tensor."""
    got: list[Any] = []
    execute = training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
    assert execute(inputs, labels, None, batch, M.MLCExecutionOptionsSynchronous, lambda *given: got.append(given)), (
        str(M.lastError())
    )
    assert got[0][1] is None
    return got[0][0]


def test_either_graph_may_be_compiled_first() -> None:
    for first in ("inference", "training"):
        kit = Kit()
        getattr(kit, first)
        assert kit.training.device() == kit.inference.device() == CPU
        kit.step()
        execute = kit.inference.executeWithInputsData_batchSize_options_completionHandler_
        assert execute({"x": data(X)}, 4, 0, None)
        wanted = X @ floats(kit.weights).reshape(2, 3).T + floats(kit.biases)
        assert np.allclose(floats(kit.out).reshape(4, 2), wanted, atol=1e-5)  # the weights after the step


def test_running_statistics_are_in_the_caller_s_memory() -> None:
    mean, variance = np.zeros(3, np.float32), np.ones(3, np.float32)
    tensors = [
        M.MLCTensor.tensorWithShape_data_dataType_([1, 3, 1, 1], one, M.MLCDataTypeFloat32) for one in (mean, variance)
    ]
    make = M.MLCBatchNormalizationLayer.layerWithFeatureChannelCount_mean_variance_beta_gamma_varianceEpsilon_momentum_
    graph, x, y = M.MLCGraph.graph(), tensor([4, 3]), tensor([4, 3])
    graph.nodeWithLayer_source_(make(3, *tensors, None, None, 1e-5, 0.9), x)
    loss = M.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(M.MLCReductionTypeMean, 1.0)
    training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, None)
    assert training.addInputs_lossLabels_({"x": x}, {"y": y}) and training.compileWithOptions_device_(0, CPU)
    run(training, {"x": data(X)}, {"y": data(np.zeros((4, 3)))}, 4)
    training.synchronizeUpdates()
    assert np.allclose(mean, 0.1 * X.mean(0), atol=1e-6)
    assert np.allclose(variance, 0.9 + 0.1 * X.var(0), atol=1e-6)  # the biased variance


def test_one_hot_labels_of_whole_numbers() -> None:
    found = []
    for kind, number in ((M.MLCDataTypeFloat32, np.float32), (M.MLCDataTypeInt64, np.int64)):
        kit = Kit()
        loss = M.MLCLossLayer.softmaxCrossEntropyLossWithReductionType_labelSmoothing_classCount_weight_(
            M.MLCReductionTypeNone, 0.0, 2, 1.0
        )
        training, y = (
            M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([kit.graph], loss, kit.adam),
            tensor([4, 2], kind=kind),
        )
        assert training.addInputs_lossLabels_({"x": kit.x}, {"y": y}) and training.compileWithOptions_device_(0, CPU)
        found.append(floats(run(training, {"x": data(X)}, {"y": data(np.eye(2)[[0, 1, 1, 0]], number)}, 4)))
    assert found[0].shape == (4,) and np.array_equal(*found)


def test_a_yolo_loss_has_one_number_for_each_sample() -> None:
    anchors = np.array([1, 1, 2, 2], np.float32)
    settings = M.MLCYOLOLossDescriptor.descriptorWithAnchorBoxes_anchorBoxCount_(anchors.tobytes(), 2)
    settings.setShouldRescore_(False)
    graph, x, y = M.MLCGraph.graph(), tensor([3, 14, 2, 2]), tensor([3, 14, 2, 2])
    graph.nodeWithLayer_source_(M.MLCActivationLayer.linearLayerWithScale_bias_(1.0, 0.0), x)
    layer = M.MLCYOLOLossLayer.layerWithDescriptor_(settings)
    training = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], layer, None)
    assert training.addInputs_lossLabels_({"x": x}, {"y": y}) and training.compileWithOptions_device_(0, CPU)
    result = run(training, {"x": data(np.zeros((3, 14, 2, 2)))}, {"y": data(np.zeros((3, 14, 2, 2)))}, 3)
    # Nothing is there: every cell's two anchors cost 5 log 2 each.
    assert (
        np.allclose(floats(result), 5 * 4 * 2 * np.log(2), rtol=1e-5)
        and layer.yoloLossDescriptor().shouldRescore() is False
    )


def test_layer_normalization_wants_its_shape() -> None:
    make = M.MLCLayerNormalizationLayer.layerWithNormalizedShape_beta_gamma_varianceEpsilon_
    assert make([4], tensor([4], 0.0), tensor([4], 1.0), 1e-5).normalizedShape() == [4]
    assert make([4], tensor([3], 0.0), tensor([4], 1.0), 1e-5) is None
