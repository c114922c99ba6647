"""The step in stepgraph."""

from typing import Any

import numpy as np
import torch

import stepgraph as sg
from benchmarks.models import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    NORMALIZATION_EPSILON,
    NORMALIZATION_MOMENTUM,
    Model,
)


class Operators:
    """The operators of `models.py`, as nodes of a graph."""

    def __init__(self, statistics: dict[str, np.ndarray], dropout: bool) -> None:
        self.graph = sg.Graph()
        self.statistics = {name: sg.Tensor(value.shape, data=value) for name, value in statistics.items()}
        self.keeps_all = not dropout

    def linear(self, x: sg.Tensor, weights: sg.Tensor, biases: sg.Tensor) -> sg.Tensor:
        outputs, inputs = weights.shape
        return self.graph.node(sg.FullyConnectedLayer(weights, biases, sg.ConvolutionDescriptor(1, inputs, outputs)), x)

    def convolution(self, x: sg.Tensor, weights: sg.Tensor, biases: sg.Tensor) -> sg.Tensor:
        outputs, inputs, *kernel = weights.shape
        descriptor = sg.ConvolutionDescriptor(tuple(kernel), inputs, outputs)
        return self.graph.node(sg.ConvolutionLayer(weights, biases, descriptor), x)

    def relu(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.node(sg.ActivationLayer.relu(), x)

    def max_pool(self, x: sg.Tensor, size: int) -> sg.Tensor:
        return self.graph.node(sg.PoolingLayer.max(size), x)

    def batch_norm(self, x: sg.Tensor, gamma: sg.Tensor, beta: sg.Tensor, name: str) -> sg.Tensor:
        mean, variance = self.statistics[f"{name}.mean"], self.statistics[f"{name}.variance"]
        settings = NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM
        return self.graph.node(sg.BatchNormalizationLayer(gamma.shape[0], mean, variance, beta, gamma, *settings), x)

    def dropout(self, x: sg.Tensor, rate: float) -> sg.Tensor:
        return self.graph.node(sg.DropoutLayer(0.0 if self.keeps_all else rate), x)

    def flatten(self, x: sg.Tensor) -> sg.Tensor:
        return self.graph.reshape((x.shape[0], -1), x)


class Stepgraph:
    """A compiled training graph. On the CPU it is given NumPy arrays, on a GPU arrays that are there already."""

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        inputs, labels = sg.Tensor(model.inputs), sg.Tensor((model.batch_size,), "int64")
        on = Operators(model.statistics(), dropout)
        parameters = {name: sg.Tensor(value.shape, data=value) for name, value in model.parameters().items()}
        model.network(on, parameters, inputs)
        optimizer = sg.AdamOptimizer(learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON)
        self.training = sg.TrainingGraph([on.graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
        self.training.add_inputs({"inputs": inputs}, loss_labels={"labels": labels})
        self.training.compile(sg.Device.of(device))
        values = (_on(device, array) for array in model.batch())
        self.inputs, self.labels = ({name: next(values)} for name in ("inputs", "labels"))
        self.execution: sg.Execution | None = None

    def step(self) -> None:
        self.execution = self.training.execute(self.inputs, self.labels)

    def wait(self) -> None:
        assert self.execution is not None
        self.execution.wait()

    @property
    def loss(self) -> float:
        assert self.execution is not None
        return float(self.execution.loss)  # type: ignore[arg-type]


def _on(device: str, array: np.ndarray) -> Any:
    return array if device == "cpu" else torch.from_numpy(array).to(device)
