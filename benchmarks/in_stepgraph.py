"""The step in stepgraph."""

from collections.abc import Mapping

import numpy as np
import torch

import stepgraph as sg
from benchmarks.models import BETAS, EPSILON, NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM, Model
from stepgraph.runtime.switch import FUSED_FROM

OPTIONS = sg.GraphCompilationOptions


class Operators:
    """The operators of `networks.py`, as nodes of a graph; `inputs` has parameters that belong to no layer."""

    def __init__(self, statistics: dict[str, np.ndarray], dropout: bool) -> None:
        self.graph = sg.Graph()
        self.statistics = {name: sg.Tensor(value.shape, data=value) for name, value in statistics.items()}
        self.keeps_all = not dropout
        self.inputs: list[sg.Tensor] = []

    def linear(self, x: sg.Tensor, weights: sg.Tensor, biases: sg.Tensor) -> sg.Tensor:
        outputs, inputs = weights.shape
        return self.graph.node(sg.FullyConnectedLayer(weights, biases, sg.ConvolutionDescriptor(1, inputs, outputs)), x)

    def convolution(self, x: sg.Tensor, weights: sg.Tensor, biases: sg.Tensor | None, stride: int = 1) -> sg.Tensor:
        outputs, inputs, *kernel = weights.shape
        border = {"padding_policy": sg.PaddingPolicy.USE_PADDING_SIZE, "padding_sizes": kernel[0] // 2}
        descriptor = sg.ConvolutionDescriptor(tuple(kernel), inputs, outputs, strides=stride, **border)
        return self.graph.node(sg.ConvolutionLayer(weights, biases, descriptor), x)

    def depthwise_convolution(self, x: sg.Tensor, weights: sg.Tensor, stride: int) -> sg.Tensor:
        channels, _, *kernel = weights.shape
        border = {"padding_policy": sg.PaddingPolicy.USE_PADDING_SIZE, "padding_sizes": kernel[0] // 2}
        descriptor = sg.ConvolutionDescriptor.depthwise(tuple(kernel), channels, strides=stride, **border)
        return self.graph.node(sg.ConvolutionLayer(weights, None, descriptor), x)

    def transposed_convolution(self, x: sg.Tensor, weights: sg.Tensor, biases: sg.Tensor) -> sg.Tensor:
        inputs, outputs, *kernel = weights.shape
        by_output = np.ascontiguousarray(weights.numpy().swapaxes(0, 1))
        descriptor = sg.ConvolutionDescriptor.transposed(tuple(kernel), inputs, outputs, strides=tuple(kernel))
        return self.graph.node(sg.ConvolutionLayer(sg.Tensor(by_output.shape, data=by_output), biases, descriptor), x)

    def relu(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.node(sg.ActivationLayer.relu(), x)

    def gelu(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.node(sg.ActivationLayer.gelu(), x)

    def add(self, x: sg.Tensor, y: sg.Tensor) -> sg.Tensor:
        return self.graph.node(sg.ArithmeticLayer.add(), x, y)

    def add_parameter(self, x: sg.Tensor, parameter: sg.Tensor) -> sg.Tensor:
        self.inputs.append(parameter)
        return self.add(x, parameter)

    def max_pool(self, x: sg.Tensor, size: int) -> sg.Tensor:
        return self.graph.node(sg.PoolingLayer.max(size), x)

    def average_pool(self, x: sg.Tensor, size: int) -> sg.Tensor:
        return self.graph.node(sg.PoolingLayer.average(size), x)

    def mean_of_pixels(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.reshape(x.shape[:2], self.graph.node(sg.ReductionLayer.mean((2, 3)), x))

    def mean_of_steps(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.reshape((x.shape[0], x.shape[2]), self.graph.node(sg.ReductionLayer.mean(1), x))

    def concatenate(self, x: sg.Tensor, y: sg.Tensor) -> sg.Tensor:
        return self.graph.concatenate([x, y])

    def batch_norm(self, x: sg.Tensor, gamma: sg.Tensor, beta: sg.Tensor, name: str) -> sg.Tensor:
        mean, variance = self.statistics[f"{name}.mean"], self.statistics[f"{name}.variance"]
        settings = NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM
        return self.graph.node(sg.BatchNormalizationLayer(gamma.shape[0], mean, variance, beta, gamma, *settings), x)

    def layer_norm(self, x: sg.Tensor, gamma: sg.Tensor, beta: sg.Tensor) -> sg.Tensor:
        return self.graph.node(sg.LayerNormalizationLayer(gamma.shape, beta, gamma, NORMALIZATION_EPSILON), x)

    def dropout(self, x: sg.Tensor, rate: float) -> sg.Tensor:
        return self.graph.node(sg.DropoutLayer(0.0 if self.keeps_all else rate), x)

    def embedding(self, x: sg.Tensor, weights: sg.Tensor) -> sg.Tensor:
        return self.graph.node(sg.EmbeddingLayer(sg.EmbeddingDescriptor(*weights.shape), weights), x)

    def attention(self, x: sg.Tensor, p: dict[str, sg.Tensor], name: str, heads: int) -> sg.Tensor:
        weights = [*_parts(p[f"{name}.joint.weights"], 3), p[f"{name}.output.weights"]]
        biases = [*_parts(p[f"{name}.joint.biases"], 3), p[f"{name}.output.biases"]]
        descriptor = sg.MultiheadAttentionDescriptor(x.shape[-1], heads)
        return self.graph.node(sg.MultiheadAttentionLayer(descriptor, weights, biases), x, x, x)

    def last_of_lstm(self, x: sg.Tensor, p: dict[str, sg.Tensor], name: str) -> sg.Tensor:
        inputs, hidden = (_parts(p[f"{name}.{part}.weights"], 4) for part in ("input", "hidden"))
        descriptor = sg.LSTMDescriptor(*inputs[0].shape[::-1], returns_sequences=False)
        layer = sg.LSTMLayer(descriptor, inputs, hidden, biases=_parts(p[f"{name}.biases"], 4))
        return self.flatten(self.graph.node(layer, x))

    def lstm_both_ways(self, x: sg.Tensor, p: dict[str, sg.Tensor], name: str) -> sg.Tensor:
        depth = sum(key.startswith(f"{name}.") and key.endswith(".forward.biases") for key in p)
        ways = [f"{name}.layer{i}.{way}" for way in ("forward", "backward") for i in range(depth)]
        inputs, hidden, biases = (
            [part for way in ways for part in _parts(p[f"{way}.{kind}"], 4)]
            for kind in ("input.weights", "hidden.weights", "biases")
        )
        width, features = inputs[0].shape
        descriptor = sg.LSTMDescriptor(features, width, depth, is_bidirectional=True)
        return self.graph.node(sg.LSTMLayer(descriptor, inputs, hidden, biases=biases), x)

    def flatten(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.reshape((x.shape[0], -1), x)

    def rows(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.reshape((-1, x.shape[-1]), x)

    def split_rows(self, x: sg.Tensor, width: int) -> sg.Tensor:
        return self.graph.reshape((-1, width), x)

    def pixels_as_rows(self, x: sg.Tensor) -> sg.Tensor:
        return self.rows(self.graph.transpose((0, 2, 3, 1), x))


class Stepgraph:
    """A compiled training graph. It is given arrays of PyTorch that are on the device already, as PyTorch itself is.

    Operators are fused while training runs, on a GPU soon, on the CPU tiny steps later; the fused step is timed.
    """

    options: Mapping[str, sg.GraphCompilationOptions] = {"cpu": OPTIONS.NONE, "cuda": OPTIONS.FUSE_LAYERS}
    parallel: sg.Parallel | None = None

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        rows = model.batch_size if self.parallel is None else sg.BATCH  # shards have fewer rows
        inputs = sg.Tensor((rows, *model.inputs[1:]), "int64" if model.vocabulary else "float32")
        labels = sg.Tensor((rows * model.labels_each,), "int64")
        on = Operators(model.statistics(), dropout)
        parameters = {name: sg.Tensor(value.shape, data=value) for name, value in model.parameters().items()}
        model.network(on, parameters, inputs)
        optimizer = sg.AdamOptimizer(learning_rate=model.learning_rate, beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON)
        self.training = sg.TrainingGraph([on.graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
        trained = {f"parameter{i}": tensor for i, tensor in enumerate(on.inputs)}
        self.training.add_inputs({"inputs": inputs, **trained}, loss_labels={"labels": labels})
        self.training.set_training_tensor_parameters([sg.TensorParameter(tensor) for tensor in on.inputs])
        self.training.compile(sg.Device.of(device), self.options[device], parallel=self.parallel)
        values = (_on(device, array) for array in model.batch())
        self.inputs, self.labels = ({name: next(values)} for name in ("inputs", "labels"))
        self.execution: sg.Execution | None = None

    def settle(self) -> None:
        """Goes to where a tiny step is fused on the CPU, which waits for the compiler."""
        if self.training.compilation.programs.switches:
            self.training.optimizer.time_step = FUSED_FROM
            self.step()

    def step(self) -> None:
        self.execution = self.training.execute(self.inputs, self.labels)

    def wait(self) -> None:
        assert self.execution is not None
        self.execution.wait()

    @property
    def loss(self) -> float:
        assert self.execution is not None
        return float(self.execution.loss)  # type: ignore[arg-type]


class AtFirst(Stepgraph):
    """The step that runs before anything is fused."""

    options: Mapping[str, sg.GraphCompilationOptions] = {"cpu": OPTIONS.NONE, "cuda": OPTIONS.NONE}


class Unfused(Stepgraph):
    """A step that is never fused, as on a CPU without a compiler."""

    options: Mapping[str, sg.GraphCompilationOptions] = dict.fromkeys(("cpu", "cuda"), OPTIONS.DISABLE_LAYER_FUSION)


class Reference(Stepgraph):
    """PyTorch's own kernels, nothing chosen or fused."""

    options: Mapping[str, sg.GraphCompilationOptions] = {"cpu": OPTIONS.DETERMINISTIC, "cuda": OPTIONS.DETERMINISTIC}


class Fused(Stepgraph):
    """A step fused by PyTorch's compiler, on the CPU too."""

    options: Mapping[str, sg.GraphCompilationOptions] = {"cpu": OPTIONS.FUSE_LAYERS, "cuda": OPTIONS.FUSE_LAYERS}


def _on(device: str, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _parts(tensor: sg.Tensor, count: int) -> list[sg.Tensor]:
    """Equal parts of a stacked parameter, each a tensor of its own."""
    return [sg.Tensor(part.shape, data=part) for part in np.split(tensor.numpy(), count)]
