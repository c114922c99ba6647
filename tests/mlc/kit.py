"""A small program in PyObjC's style, and arguments for every selector, by the names stepgraph gives its parameters."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

import stepgraph.mlc as MLCompute

M = MLCompute
CPU = M.MLCDevice.cpuDevice()
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)


def data(values: Any, kind: Any = np.float32) -> Any:
    """An `MLCTensorData` over an array."""
    array = np.ascontiguousarray(values, kind)
    return M.MLCTensorData.dataWithBytesNoCopy_length_(array, array.nbytes)


def tensor(shape: list[int], values: Any = None, kind: int = M.MLCDataTypeFloat32) -> Any:
    """A tensor, with data if given: an array, or one number for all."""
    if values is None:
        return M.MLCTensor.tensorWithShape_dataType_(shape, kind)
    if np.ndim(values) == 0:
        return M.MLCTensor.tensorWithShape_fillWithData_dataType_(shape, values, kind)
    return M.MLCTensor.tensorWithShape_data_dataType_(shape, data(values), kind)


def floats(source: Any) -> np.ndarray:
    """The numbers of a tensor, or of bytes."""
    return np.frombuffer(source.data() if hasattr(source, "data") and callable(source.data) else source, np.float32)


def descriptor(inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1)) -> Any:
    """A convolution descriptor of the short form."""
    factory = M.MLCConvolutionDescriptor
    return factory.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(
        kernel[1], kernel[0], inputs, outputs
    )


def rates(learning_rate: float) -> Any:
    """An optimizer descriptor with nothing but a learning rate."""
    factory = M.MLCOptimizerDescriptor
    return factory.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_(
        learning_rate, 1.0, M.MLCRegularizationTypeNone, 0.0
    )


class Kit:
    """`x → fully connected → mean squared error`, trained by Adam: always the same numbers."""

    def __init__(self) -> None:
        generator = np.random.default_rng(2)
        self.x, self.y = tensor([4, 3]), tensor([4, 2])
        self.weights = tensor([1, 6, 1, 1], generator.normal(size=6))
        self.biases = tensor([1, 2, 1, 1], generator.normal(size=2))
        dense = M.MLCFullyConnectedLayer
        self.dense = dense.layerWithWeights_biases_descriptor_(self.weights, self.biases, descriptor(3, 2))
        self.graph = M.MLCGraph.graph()
        self.out = self.graph.nodeWithLayer_source_(self.dense, self.x)
        self.loss = M.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(M.MLCReductionTypeMean, 1.0)
        self.adam = M.MLCAdamOptimizer.optimizerWithDescriptor_(rates(0.1))

    @cached_property
    def declared(self) -> Any:
        """The training graph, not compiled."""
        graph = M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([self.graph], self.loss, self.adam)
        assert graph.addInputs_lossLabels_({"x": self.x}, {"y": self.y})
        assert graph.addOutputs_({"out": self.out})
        return graph

    @cached_property
    def training(self) -> Any:
        """The training graph, compiled."""
        options = M.MLCGraphCompilationOptionsLinkGraphs | M.MLCGraphCompilationOptionsComputeAllGradients
        assert self.declared.compileWithOptions_device_(options, CPU)
        return self.declared

    @cached_property
    def inference(self) -> Any:
        """The inference graph, compiled."""
        graph = M.MLCInferenceGraph.graphWithGraphObjects_([self.graph])
        assert graph.addInputs_({"x": self.x}) and graph.addOutputs_({"out": self.out})
        assert graph.compileWithOptions_device_(M.MLCGraphCompilationOptionsLinkGraphs, CPU)
        return graph

    @cached_property
    def evaluation(self) -> Any:
        """An inference graph with a loss in it."""
        graph, loss = M.MLCGraph.graph(), M.MLCLossLayer.huberLossWithReductionType_delta_weight_(2, 1.0, 1.0)
        x, y = tensor([4, 2]), tensor([4, 2])
        value = graph.nodeWithLayer_sources_lossLabels_(loss, [x], [y])
        made = M.MLCInferenceGraph.graphWithGraphObjects_([graph])
        assert made.addInputs_lossLabels_lossLabelWeights_({"x": x}, {"y": y}, None)
        assert made.addOutputs_({"out": value}) and made.compileWithOptions_device_(0, CPU)
        return made

    def bind(self) -> None:
        """Binds inputs and labels for running phase by phase."""
        bound = {"x": data(X), "y": data(Y)}
        assert self.training.bindAndWriteData_forInputs_toDevice_synchronous_(
            bound, {"x": self.x, "y": self.y}, CPU, True
        )

    def forward(self) -> None:
        """A forward pass."""
        self.bind()
        assert self.training.executeForwardWithBatchSize_options_completionHandler_(4, 0, None)

    def gradient(self) -> None:
        """A forward and a gradient pass."""
        self.forward()
        assert self.training.executeGradientWithBatchSize_options_completionHandler_(4, 0, None)

    def step(self) -> list[Any]:
        """One training step; what its handler was given."""
        got: list[Any] = []
        execute = (
            self.training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
        )
        assert execute({"x": data(X)}, {"y": data(Y)}, None, 4, 0, lambda *given: got.append(given))
        return list(got[0])

    def state(self) -> list[Any]:
        """Everything that training changes."""
        native = self.training.native
        tensors = [self.weights.native, self.biases.native]
        buffers = [bytes(one.bytes) for t in tensors for one in t.optimizer_data]
        gradients = self.training.gradientDataForParameter_layer_(self.weights, self.dense)
        numbers = [self.adam.learningRate(), self.adam.timeStep(), self.adam.appliesGradientClipping()]
        shown = [native.memory_plan.device_memory_size, self.x.label(), self.dense.label(), self.training.layers()]
        flags = [t.is_updatable for t in tensors]
        values = [t.numpy().tobytes() for t in tensors]
        return [values, buffers, None if gradients is None else bytes(gradients), numbers, shown, flags]


def channels(value: float) -> Callable[[Kit], Any]:
    return lambda kit: tensor([1, 3, 1, 1], value)


def several(count: int, shape: list[int]) -> Callable[[Kit], Any]:
    return lambda kit: [tensor(shape, 0.1) for _ in range(count)]


def lstm(kit: Kit) -> Any:
    return M.MLCLSTMDescriptor.descriptorWithInputSize_hiddenSize_layerCount_(3, 2, 1)


def activation(kit: Kit) -> Any:
    return M.MLCActivationDescriptor.descriptorWithType_(M.MLCActivationTypeSigmoid)


def anchors(kit: Kit) -> bytes:
    return np.array([1, 2, 4, 3], np.float32).tobytes()


# Arguments by stepgraph's parameter names; a number stands for itself. Those of one call differ, so that none can
# take another's place unnoticed.
ARGUMENTS: dict[str, Any] = {
    **{key: [2, 3] for key in ("shape", "padding", "strides", "kernel_sizes", "normalized_shape", "dimensions")},
    **{"width": 5, "height": 6, "channels": 3, "inputs": 2, "outputs": 7, "batch_size": 4, "kernel_width": 4},
    **{"input_feature_channel_count": 3, "output_feature_channel_count": 6, "feature_channel_count": 3},
    **dict.fromkeys(("kernel_height", "group_count", "channel_multiplier", "length", "seed", "time_step"), 3),
    **dict.fromkeys(("layer_count", "class_count", "split_count", "head_count", "embedding_dimension"), 2),
    **{"input_size": 4, "hidden_size": 5, "model_dimension": 4, "key_dimension": 6, "value_dimension": 8},
    **{"learning_rate": 0.5, "gradient_rescale": 0.75, "maximum_clipping_norm": 1.5, "custom_global_norm": 2.5},
    **{"a": 0.5, "b": 0.625, "c": 0.75, "scale": 0.5, "alpha": 0.375, "delta": 0.125, "epsilon": 0.0625},
    **{"weight": 0.5, "replacement": 0.75, "threshold": 0.5, "beta1": 0.25, "beta2": 0.125, "momentum_scale": 0.875},
    **dict.fromkeys(("rate", "dropout", "momentum", "label_smoothing"), 0.25),
    **dict.fromkeys(("minimum", "gradient_clip_min", "bias", "negative_slope", "value"), -1),
    **dict.fromkeys(("maximum", "gradient_clip_max", "beta", "variance_epsilon", "constant_value", "fill"), 1),
    **{key: [1, 2] for key in ("dilation_rates", "padding_sizes")},
    **dict.fromkeys(("sorted_sequences", "synchronous", "synchronize_with_device", "count_includes_padding"), True),
    **dict.fromkeys(("uses_biases", "batch_first", "is_bidirectional", "returns_sequences", "has_biases"), True),
    **dict.fromkeys(
        ("has_attention_biases", "adds_zero_attention", "transposes_x", "transposes_y", "is_centered"), True
    ),
    **dict.fromkeys(("applies_gradient_clipping", "uses_nesterov_momentum", "uses_ams_grad", "aligns_corners"), True),
    **dict.fromkeys(("scales_gradient_by_frequency", "disable_update", "selects_multiple_compute_devices"), True),
    **dict.fromkeys(("type", "operation", "sample_mode", "result_mode", "padding_policy", "random", "kind"), 1),
    **dict.fromkeys(("regularization_type", "gradient_clipping_type", "reduction_type", "data_type", "dimension"), 1),
    **dict.fromkeys(("options", "padding_index"), 0),
    "axis": 0,
    "regularization_scale": 0.1,
    "maximum_norm": 1.0,
    "p_norm": 2.0,
    "embedding_count": 5,
    "sequence_lengths": [3, 2],
    "lengths": [3, 2],
    "split_section_lengths": [1, 2],
    "start": [0, 0],
    "end": [2, 3],
    "stride": None,
    "gpus": [],
    "anchor_boxes": anchors,
    "anchor_box_count": 2,
    "buffer": lambda kit: bytearray(16),
    "deallocator": lambda kit: lambda memory, length: None,
    "destination": lambda kit: bytearray(24),
    "data": lambda kit: data(np.arange(6)),
    "device": CPU,
    "device_data": None,
    "tensor": lambda kit: kit.weights,
    "optimizer_data": lambda kit: [data(np.zeros(6)), data(np.zeros(6))],
    "completion": lambda kit: lambda tensor, error, seconds: None,
    "graphs": lambda kit: [kit.graph],
    "loss_layer": lambda kit: kit.loss,
    "optimizer": lambda kit: kit.adam,
    "layer": lambda kit: kit.dense,
    "parameter": lambda kit: kit.weights,
    "input": lambda kit: kit.x,
    "source": lambda kit: tensor([2, 3]),
    "sources": lambda kit: [tensor([2, 3]), tensor([2, 3])],
    "tensors": lambda kit: [kit.out],
    "inputs_data": lambda kit: {"x": data(X)},
    "loss_labels_data": lambda kit: {"y": data(Y)},
    "loss_label_weights_data": None,
    "outputs_data": lambda kit: {"out": data(np.zeros((4, 2)))},
    "for_inputs": lambda kit: {"x": kit.x},
    "input_tensors": lambda kit: {"x": kit.x},
    "input_tensors_data": lambda kit: {"x": data(X)},
    "loss_labels": lambda kit: {"y": kit.y},
    "loss_label_weights": None,
    "weights": lambda kit: kit.weights,
    "biases": lambda kit: kit.biases,
    "descriptor": lambda kit: descriptor(3, 2),
    "yolo_loss_descriptor": lambda kit: M.MLCYOLOLossDescriptor.descriptorWithAnchorBoxes_anchorBoxCount_(
        anchors(kit), 2
    ),
    "indices": lambda kit: tensor([3], kind=M.MLCDataTypeInt32),
    "condition": lambda kit: tensor([2, 3], kind=M.MLCDataTypeBoolean),
    "copy_from": lambda kit: tensor([2, 5]),
    "parameters": lambda kit: [M.MLCTensorParameter.parameterWithTensor_(tensor([4, 3], X))],
    "gate_activations": lambda kit: [activation(kit)] * 4,
    "output_result_activation": activation,
}
