"""What `lastError()` tells: a code for every class of errors, the original's words, and nothing after a success."""

from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph import errors
from tests.mlc.kit import CPU, Kit, M, X, Y, data, descriptor, tensor

EXECUTE = "executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_"
KINDS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.StepgraphError) and one is not errors.StepgraphError
]


def test_every_class_of_errors_has_a_code_of_its_own() -> None:
    codes = {kind: M.MLCError(kind("where", "it is wrong")).code() for kind in KINDS}
    assert len(KINDS) >= 13 and sorted(codes.values()) == list(range(1, len(KINDS) + 1)), codes
    assert codes[sg.ArgumentError] == 1 and codes[sg.ExecutionError] == 8  # programs may have kept them
    assert M.MLCError(ValueError("x")).code() == 0


def test_the_page_lists_the_codes() -> None:
    from stepgraph.mlc.page import page

    for kind in KINDS:
        assert f"| {M.MLCError(kind('where', 'it is wrong')).code()} | `{kind.__name__}` |" in page()


def unlabeled(kit: Kit) -> Any:
    graph = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([kit.graph], kit.loss, kit.adam)
    return graph.compileWithOptions_device_(0, CPU)


def unlinked(kit: Kit) -> Any:
    assert kit.declared.compileWithOptions_device_(0, CPU)
    return kit.declared.linkWithGraphs_([kit.declared])


def without_optimizer(kit: Kit) -> Any:
    graph = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([kit.graph], kit.loss, None)
    assert graph.addInputs_lossLabels_({"x": kit.x}, {"y": kit.y}) and graph.compileWithOptions_device_(0, CPU)
    return graph.executeOptimizerUpdateWithOptions_completionHandler_(0, None)


def unknown_output(kit: Kit) -> Any:
    run = "executeForwardWithBatchSize_options_outputsData_completionHandler_"
    kit.bind()
    return getattr(kit.training, run)(4, 0, {"batch_size": data(Y)}, None)


def few_weights(kit: Kit) -> Any:
    make = M.MLCConvolutionLayer.layerWithWeights_biases_descriptor_
    return make(tensor([1, 5, 3, 3], 0.0), None, descriptor(3, 2, (3, 3)))


def groups(kit: Kit) -> Any:
    make = M.MLCGroupNormalizationLayer.layerWithFeatureChannelCount_groupCount_beta_gamma_varianceEpsilon_
    return make(4, 3, tensor([1, 4, 1, 1], 0.0), tensor([1, 4, 1, 1], 1.0), 1e-5)


SAYINGS: list[tuple[Any, str, list[str]]] = [
    (unlabeled, "MLCLossLayer 'Loss' (", ["Fix: addInputs_lossLabels_."]),
    (unlinked, "MLCTrainingGraph.linkWithGraphs_: ", ["without MLCGraphCompilationOptionsLinkGraphs"]),
    (
        lambda kit: kit.declared.compileWithOptions_device_(0, None),
        "MLCTrainingGraph.compileWithOptions_device_: ",
        ["MLCDevice.deviceWithType_(MLCDeviceTypeAny) or MLCDevice.cpuDevice()"],
    ),
    (
        without_optimizer,
        "MLCTrainingGraph.executeOptimizerUpdateWithOptions_completionHandler_: ",
        ["Fix: call compileOptimizer_."],
    ),
    (unknown_output, "MLCTrainingGraph.", ["'batch_size' is not an output", "declare it with addOutputs_"]),
    (few_weights, "MLCConvolutionLayer 'Convolution' (", ["pass weights of shape [2, 3, 3, 3]."]),
    (groups, "MLCGroupNormalizationLayer ", ["groupCount is 3"]),
    (
        lambda kit: M.MLCLossDescriptor.descriptorWithType_reductionType_(1, M.MLCReductionTypeMax),
        "MLCLossDescriptor.descriptorWithType_reductionType_: ",
        ["reduced by MLCReductionTypeMax", "MLCReductionTypeNone, MLCReductionTypeSum or MLCReductionTypeMean"],
    ),
    (
        lambda kit: M.MLCScatterLayer.layerWithDimension_reductionType_(1, M.MLCReductionTypeMean),
        "MLCScatterLayer ",
        ["reductionType is MLCReductionTypeMean", "MLCReductionTypeNone (overwrite) or MLCReductionTypeSum (add)"],
    ),
    (
        lambda kit: M.MLCTensor.tensorWithShape_randomInitializerType_([2], 99),
        "MLCTensor.tensorWithShape_randomInitializerType_: randomInitializerType is 99",
        ["Fix: pass a constant of MLCRandomInitializerType."],
    ),
    (lambda kit: kit.x.setLabel_(3), "MLCTensor.setLabel_: label is 3", ["Fix: pass a string."]),
    (
        lambda kit: kit.training.allocateUserGradientForTensor_(kit.x),
        "MLCTrainingGraph.allocateUserGradientForTensor_: MLCTensor('data",
        ["Fix: pass what nodeWithLayer_sources_ returned."],
    ),
    (
        lambda kit: M.MLCLSTMLayer.layerWithDescriptor_inputWeights_hiddenWeights_biases_(
            M.MLCLSTMDescriptor.descriptorWithInputSize_hiddenSize_layerCount_(3, 2, 1), [], [], []
        ),
        "MLCLSTMLayer ",
        ["inputWeights"],
    ),
]


@pytest.mark.parametrize("row", SAYINGS, ids=lambda row: row[1].split()[0] + " " + row[2][0])
def test_messages_speak_the_original_s_words(row: tuple[Any, str, list[str]]) -> None:
    program, start, words = row
    kit = Kit()
    assert program(kit) in (None, False)
    told = M.lastError().localizedDescription()
    assert told.startswith(start), told
    for one in words:
        assert one in told, told
    assert "create" not in told and str(M.lastError()) == told


def test_the_caller_s_own_words_stay_as_they_are() -> None:
    graph, odd = M.MLCGraph.graph(), tensor([2, 3])
    odd.setLabel_("add_inputs of a Tensor")
    graph.nodeWithLayer_source_(M.MLCActivationLayer.reluLayer(), odd)
    inference = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
    assert inference.addInputs_({"LINK_GRAPHS": odd}) and inference.compileWithOptions_device_(0, CPU)
    execute = inference.executeWithInputsData_batchSize_options_completionHandler_
    assert execute({"LINK_GRAPHS": data(np.zeros(2))}, 0, 0, None) is False
    assert "MLCTensor 'add_inputs of a Tensor' (input 'LINK_GRAPHS'): " in M.lastError().localizedDescription()


def test_the_native_error_keeps_stepgraph_s_words() -> None:
    assert unlabeled(Kit()) is False
    assert "add_inputs(..., loss_labels={...})" in str(M.lastError().native)


def test_errors_that_a_handler_gets_speak_the_same_way() -> None:
    work = sg.ExecutionError("TrainingGraph.execute", "the Tensor was lost", fix="call execute_forward again")
    told = M.MLCError(work).localizedDescription()
    assert told == (
        "MLCTrainingGraph.execute: the MLCTensor was lost.\n"
        "Fix: call executeForwardWithBatchSize_options_completionHandler_ again."
    )


def test_after_a_success_there_is_no_error() -> None:
    kit, tanh = Kit(), M.MLCActivationLayer.tanhLayer()

    def fail() -> None:
        assert M.MLCReshapeLayer.layerWithShape_(None) is None and M.lastError() is not None

    run = getattr(kit.training, EXECUTE)
    for success in (
        M.MLCActivationLayer.reluLayer,  # a factory, a node, a call, a query, a property, a setter
        lambda: kit.graph.nodeWithLayer_source_(tanh, kit.out),
        lambda: run({"x": data(X)}, {"y": data(Y)}, None, 4, 0, None),
        lambda: kit.training.resultTensorsForLayer_(kit.dense),
        kit.out.label,
        lambda: kit.out.setLabel_("out"),
        M.MLCTensor.new,
        lambda: M.MLCTensor.new().label(),
        kit.adam.copy,
        lambda: M.MLCActivationTypeDebugDescription(1),
        lambda: M.MLCTensor.tensorWithDescriptor_(None),
    ):
        fail()
        success()
        assert M.lastError() is None


def test_an_answer_of_nil_is_no_error() -> None:
    kit = Kit()
    assert M.MLCReshapeLayer.layerWithShape_(None) is None
    assert kit.training.gradientTensorForInput_(tensor([4, 3])) is None and M.lastError() is None


def test_what_a_handler_was_refused_does_not_outlive_the_call() -> None:
    kit, errors_within = Kit(), []

    def handler(result: Any, error: Any, seconds: float) -> None:
        assert M.MLCReshapeLayer.layerWithShape_(None) is None
        errors_within.append(M.lastError())
        raise RuntimeError("a bug of the program")

    assert getattr(kit.training, EXECUTE)({"x": data(X)}, {"y": data(Y)}, None, 4, 0, handler) is True
    assert errors_within[0] is not None and M.lastError() is None
