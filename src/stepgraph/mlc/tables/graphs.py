"""Graphs: wiring, training, inference."""

from __future__ import annotations

from typing import Any

import stepgraph as sg
from stepgraph.errors import StateError
from stepgraph.layers.layer import first_graph
from stepgraph.mlc.table import NIL, NOTHING_IN_IT, VOID, Class, call, make, native_name, read, reads, unavailable
from stepgraph.mlc.tables.tensors import DEVICE_DATA
from stepgraph.mlc.values import (
    BOOL,
    COMPILE_OPTIONS,
    DATA_BY_NAME,
    DATAS,
    DEVICE,
    EXECUTE_OPTIONS,
    HANDLER,
    INT,
    INTS,
    LAYER,
    REDUCTION,
    SHAPE,
    TENSOR,
    TENSOR_BY_NAME,
    TENSORS,
    an,
    list_of,
    optional,
)

NAMES, DATA = optional(TENSOR_BY_NAME, nil=dict), optional(DATA_BY_NAME, nil=dict)
SEQUENCE_LENGTHS = ("sortedSequenceLengths", "sortedSequenceLength")
GRAPHS = list_of(an(sg.Graph))
CALL: dict[str, Any] = {"batch_size": INT, "options": EXECUTE_OPTIONS}
DONE: dict[str, Any] = {"completion": HANDLER}
INPUTS: dict[str, Any] = {"inputs_data": DATA}
LABELS: dict[str, Any] = {"loss_labels_data": DATA, "loss_label_weights_data": DATA}
OUTPUTS: dict[str, Any] = {"outputs_data": DATA}
COMPILE: dict[str, Any] = {"options": COMPILE_OPTIONS, "device": optional(DEVICE)}
CONSTANTS: dict[str, Any] = {"input_tensors": NAMES, "input_tensors_data": DATA}
BIND: dict[str, Any] = {"data": DATA_BY_NAME, "for_inputs": TENSOR_BY_NAME, "device": DEVICE}


@native_name("node", "layer", "sources")
def node(graph: sg.Graph, layer: sg.Layer, sources: Any, **settings: Any) -> sg.Tensor:
    """A node with one source or several; as in the original, a layer belongs to one graph."""
    if first_graph(layer) not in (None, graph):
        raise StateError(layer.where, "the layer already belongs to another graph", fix="create another layer")
    return graph.node(layer, sources, **settings)


@native_name("bind_and_write_data")
def bind(graph: sg.Graph, data: dict[str, Any], for_inputs: dict[str, Any], **settings: Any) -> None:
    """Binds the names that are in both dictionaries."""
    graph.bind_and_write_data({name: data[name] for name in data if name in for_inputs}, for_inputs, **settings)


@native_name("compile")
def compile_for(graph: Any, device: sg.Device | None, **settings: Any) -> None:
    """Compiles for a device; nil keeps the device of a graph that is compiled, as measured."""
    if isinstance(graph, sg.TrainingGraph):
        graph.keep_predictions()  # the original keeps results readable
    graph.compile(**settings) if device is None else graph.compile(device, **settings)


@native_name("compile")
def compile_with(
    graph: Any, input_tensors: dict[str, Any], input_tensors_data: dict[str, Any], **settings: Any
) -> None:
    """Compiles with those inputs as constants for which there is data; data without a tensor is passed over."""
    constants = {name: t for name, t in input_tensors.items() if name in input_tensors_data or t.has_data}
    data = {name: one for name, one in input_tensors_data.items() if name in constants}
    compile_for(graph, input_tensors=constants, input_tensors_data=data, **settings)


@native_name("execute")
def execute(graph: Any, inputs_data: dict[str, Any], **settings: Any) -> Any:
    """A call whose data may name the lengths of an LSTM's sequences by the framework's own keys."""
    for key in SEQUENCE_LENGTHS:
        if key in inputs_data and key not in graph.inputs:
            lengths = {node.sources[-1] for node in graph.nodes if isinstance(node.layer, sg.LSTMLayer)}
            names = [name for name, tensor in graph.inputs.items() if tensor in lengths and name not in inputs_data]
            inputs_data = {names[0] if one == key and names else one: data for one, data in inputs_data.items()}
    return graph.execute(inputs_data, **settings)


@native_name("execute")
def evaluate(graph: sg.InferenceGraph, **settings: Any) -> Any:
    """The forms with loss labels, refused where none were declared."""
    if not graph.loss_labels:
        raise StateError(
            "execute", "no loss labels were declared", fix="declare them with addInputs_lossLabels_lossLabelWeights_"
        )
    return execute(graph, **settings)


MLC_GRAPH = Class(
    "MLCGraph",
    sg.Graph,
    "NSObject",
    (
        read("device"),
        read("layers", note="the loss layer given to a training graph is the last"),
        read("summarizedDOTDescription", note="draws the nodes of every graph; the original's MLCGraph drew none"),
        make("graph", swift="init()"),
        call("nodeWithLayer:source:", node, refusal=NIL, layer=LAYER, sources=TENSOR, swift="node(with:source:)"),
        call("nodeWithLayer:sources:", node, refusal=NIL, layer=LAYER, sources=TENSORS, swift="node(with:sources:)"),
        call(
            "nodeWithLayer:sources:disableUpdate:",
            node,
            refusal=NIL,
            layer=LAYER,
            sources=TENSORS,
            disable_update=BOOL,
            swift="node(with:sources:disableUpdate:)",
        ),
        call(
            "nodeWithLayer:sources:lossLabels:",
            node,
            refusal=NIL,
            layer=LAYER,
            sources=TENSORS,
            loss_labels=TENSORS,
            swift="node(with:sources:lossLabels:)",
        ),
        call(
            "splitWithSource:splitCount:dimension:",
            "split",
            refusal=NIL,
            source=TENSOR,
            split_count=INT,
            dimension=INT,
            swift="split(source:splitCount:dimension:)",
        ),
        call(
            "splitWithSource:splitSectionLengths:dimension:",
            "split",
            refusal=NIL,
            source=TENSOR,
            split_section_lengths=INTS,
            dimension=INT,
            swift="split(source:splitSectionLengths:dimension:)",
            note="lengths must add up",
        ),
        call(
            "concatenateWithSources:dimension:",
            "concatenate",
            refusal=NIL,
            sources=TENSORS,
            dimension=INT,
            swift="concatenate(sources:dimension:)",
        ),
        call(
            "reshapeWithShape:source:",
            "reshape",
            refusal=NIL,
            shape=SHAPE,
            source=TENSOR,
            swift="reshape(shape:source:)",
            note="elements are counted",
        ),
        call(
            "transposeWithDimensions:source:",
            "transpose",
            refusal=NIL,
            dimensions=INTS,
            source=TENSOR,
            swift="transpose(dimensions:source:)",
        ),
        call("selectWithSources:condition:", "select", refusal=NIL, sources=TENSORS, condition=TENSOR, swift="–"),
        call(
            "scatterWithDimension:source:indices:copyFrom:reductionType:",
            "scatter",
            refusal=NIL,
            dimension=INT,
            source=TENSOR,
            indices=TENSOR,
            copy_from=TENSOR,
            reduction_type=REDUCTION,
            swift="scatter(withDimension:source:indices:copyFrom:reductionType:)",
        ),
        call(
            "gatherWithDimension:source:indices:",
            "gather",
            refusal=NIL,
            dimension=INT,
            source=TENSOR,
            indices=TENSOR,
            swift="gather(withDimension:source:indices:)",
        ),
        call(
            "bindAndWriteData:forInputs:toDevice:batchSize:synchronous:",
            bind,
            **BIND,
            batch_size=INT,
            synchronous=BOOL,
            swift="bindAndWriteData(_:forInputs:to:batchSize:synchronous:)",
            note="names in both dictionaries are bound",
        ),
        call(
            "bindAndWriteData:forInputs:toDevice:synchronous:",
            bind,
            **BIND,
            synchronous=BOOL,
            swift="bindAndWriteData(_:forInputs:to:synchronous:)",
        ),
        call(
            "sourceTensorsForLayer:",
            "source_tensors",
            refusal=NOTHING_IN_IT,
            layer=LAYER,
            swift="sourceTensors(for:)",
        ),
        call(
            "resultTensorsForLayer:",
            "result_tensors",
            refusal=NOTHING_IN_IT,
            layer=LAYER,
            swift="resultTensors(for:)",
        ),
    ),
    new=sg.Graph,
)

MLC_INFERENCE_GRAPH = Class(
    "MLCInferenceGraph",
    sg.InferenceGraph,
    "MLCGraph",
    (
        read("deviceMemorySize"),
        make("graphWithGraphObjects:", graphs=GRAPHS, swift="init(graphObjects:)"),
        call("addInputs:", "add_inputs", inputs=NAMES, swift="addInputs(_:)"),
        call(
            "addInputs:lossLabels:lossLabelWeights:",
            "add_inputs",
            inputs=NAMES,
            loss_labels=NAMES,
            loss_label_weights=NAMES,
            swift="addInputs(_:lossLabels:lossLabelWeights:)",
        ),
        call("addOutputs:", "add_outputs", outputs=NAMES, swift="addOutputs(_:)"),
        call("compileWithOptions:device:", compile_for, **COMPILE, swift="compile(options:device:)"),
        call(
            "compileWithOptions:device:inputTensors:inputTensorsData:",
            compile_with,
            **COMPILE,
            **CONSTANTS,
            swift="compile(options:device:inputTensors:inputTensorsData:)",
        ),
        call("linkWithGraphs:", "link", graphs=list_of(an(sg.InferenceGraph)), swift="link(with:)"),
        call(
            "executeWithInputsData:batchSize:options:completionHandler:",
            execute,
            **INPUTS,
            **CALL,
            **DONE,
            swift="execute(inputsData:batchSize:options:completionHandler:)",
        ),
        call(
            "executeWithInputsData:outputsData:batchSize:options:completionHandler:",
            execute,
            **INPUTS,
            **OUTPUTS,
            **CALL,
            **DONE,
            swift="execute(inputsData:outputsData:batchSize:options:completionHandler:)",
        ),
        call(
            "executeWithInputsData:lossLabelsData:lossLabelWeightsData:batchSize:options:completionHandler:",
            evaluate,
            **INPUTS,
            **LABELS,
            **CALL,
            **DONE,
            swift="execute(inputsData:lossLabelsData:lossLabelWeightsData:batchSize:options:completionHandler:)",
            note="NO where no loss labels were declared",
        ),
        call(
            "executeWithInputsData:lossLabelsData:lossLabelWeightsData:outputsData:batchSize:options:completionHandler:",
            evaluate,
            **INPUTS,
            **LABELS,
            **OUTPUTS,
            **CALL,
            **DONE,
            swift="execute(inputsData:lossLabelsData:lossLabelWeightsData:outputsData:batchSize:options:"
            "completionHandler:)",
        ),
        *unavailable(note="an empty graph"),
    ),
    new=sg.InferenceGraph,
)

MLC_TRAINING_GRAPH = Class(
    "MLCTrainingGraph",
    sg.TrainingGraph,
    "MLCGraph",
    (
        *reads("optimizer deviceMemorySize"),
        make(
            "graphWithGraphObjects:lossLayer:optimizer:",
            graphs=GRAPHS,
            loss_layer=optional(LAYER),
            optimizer=optional(an(sg.Optimizer)),
            swift="init(graphObjects:lossLayer:optimizer:)",
        ),
        call(
            "addInputs:lossLabels:",
            "add_inputs",
            inputs=NAMES,
            loss_labels=NAMES,
            swift="addInputs(_:lossLabels:)",
        ),
        call(
            "addInputs:lossLabels:lossLabelWeights:",
            "add_inputs",
            inputs=NAMES,
            loss_labels=NAMES,
            loss_label_weights=NAMES,
            swift="addInputs(_:lossLabels:lossLabelWeights:)",
        ),
        call("addOutputs:", "add_outputs", outputs=NAMES, swift="addOutputs(_:)"),
        call("stopGradientForTensors:", "stop_gradient", tensors=TENSORS, swift="stopGradient(for:)"),
        call("compileWithOptions:device:", compile_for, **COMPILE, swift="compile(options:device:)"),
        call(
            "compileWithOptions:device:inputTensors:inputTensorsData:",
            compile_with,
            **COMPILE,
            **CONSTANTS,
            swift="compile(options:device:inputTensors:inputTensorsData:)",
        ),
        call("compileOptimizer:", "compile_optimizer", optimizer=an(sg.Optimizer), swift="compileOptimizer(_:)"),
        call("linkWithGraphs:", "link", graphs=list_of(an(sg.TrainingGraph)), swift="link(with:)"),
        call(
            "gradientTensorForInput:",
            "gradient_tensor",
            refusal=NIL,
            input=TENSOR,
            swift="gradientTensor(forInput:)",
        ),
        call(
            "sourceGradientTensorsForLayer:",
            "source_gradient_tensors",
            refusal=NOTHING_IN_IT,
            layer=LAYER,
            swift="sourceGradientTensors(for:)",
        ),
        call(
            "resultGradientTensorsForLayer:",
            "result_gradient_tensors",
            refusal=NOTHING_IN_IT,
            layer=LAYER,
            swift="resultGradientTensors(for:)",
        ),
        call(
            "gradientDataForParameter:layer:",
            "gradient_data",
            refusal=NIL,
            parameter=TENSOR,
            layer=LAYER,
            swift="gradientData(forParameter:layer:)",
            note="bytes; for LSTM layers too",
        ),
        call(
            "allocateUserGradientForTensor:",
            "allocate_user_gradient",
            refusal=NIL,
            tensor=TENSOR,
            swift="allocateUserGradient(for:)",
        ),
        call(
            "executeWithInputsData:lossLabelsData:lossLabelWeightsData:batchSize:options:completionHandler:",
            execute,
            **INPUTS,
            **LABELS,
            **CALL,
            **DONE,
            swift="execute(inputsData:lossLabelsData:lossLabelWeightsData:batchSize:options:completionHandler:)",
            note="the handler's tensor is the loss before the update, or the last result without a loss",
        ),
        call(
            "executeWithInputsData:lossLabelsData:lossLabelWeightsData:outputsData:batchSize:options:completionHandler:",
            execute,
            **INPUTS,
            **LABELS,
            **OUTPUTS,
            **CALL,
            **DONE,
            swift="execute(inputsData:lossLabelsData:lossLabelWeightsData:outputsData:batchSize:options:"
            "completionHandler:)",
        ),
        *(
            call(
                f"execute{phase}WithBatchSize:options:{'outputsData:' * bool(outputs)}completionHandler:",
                f"execute_{phase.lower()}",
                **CALL,
                **outputs,
                **DONE,
                swift=f"execute{phase}(batchSize:options:{'outputsData:' * bool(outputs)}completionHandler:)",
                note=note,
            )
            for phase, note in (
                ("Forward", "NO without bound data"),
                ("Gradient", "NO without a forward pass before it"),
            )
            for outputs in ({}, OUTPUTS)
        ),
        call(
            "executeOptimizerUpdateWithOptions:completionHandler:",
            "execute_optimizer_update",
            options=EXECUTE_OPTIONS,
            **DONE,
            swift="executeOptimizerUpdate(options:completionHandler:)",
            note="NO without gradients",
        ),
        call("synchronizeUpdates", refusal=VOID, swift="synchronizeUpdates()"),
        call(
            "setTrainingTensorParameters:",
            "set_training_tensor_parameters",
            parameters=list_of(an(sg.TensorParameter)),
            swift="setTrainingTensorParameters(_:)",
        ),
        call(
            "bindOptimizerData:deviceData:withTensor:",
            "bind_optimizer_data",
            data=DATAS,
            device_data=DEVICE_DATA,
            tensor=TENSOR,
            swift="bindOptimizerData(_:deviceData:with:)",
        ),
    ),
    new=sg.TrainingGraph,
)

CLASSES = (MLC_GRAPH, MLC_INFERENCE_GRAPH, MLC_TRAINING_GRAPH)
