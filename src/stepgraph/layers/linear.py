"""Fully connected layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from stepgraph.errors import ShapeError
from stepgraph.layers.convolution import ConvolutionDescriptor
from stepgraph.layers.found import found_at_node, last_extent
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.random import initialize
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import RandomInitializerType


class FullyConnectedLayer(Layer):
    """`y = x Wᵀ + b` over the last axis, or over the channels of a `[batch, channels, 1, 1]` source.

    Shapes: `[..., inputs] → [..., outputs]`, `[batch, inputs, 1, 1] → [batch, outputs, 1, 1]`. Weights hold
    `outputs * inputs` numbers, output-major, in any shape (`[outputs, inputs]`, Apple's `[1, outputs * inputs, 1,
    1]`); biases hold `outputs`.

    Same as `torch.nn.Linear`, which does not support `[batch, channels, 1, 1]`.

    Example:
        >>> FullyConnectedLayer.create(784, 10).weights.shape
        (10, 784)
    """

    weights: Tensor
    biases: Tensor | None
    descriptor: ConvolutionDescriptor

    default_label = "FullyConnected"
    weights_parameter = ParameterOf("weights")
    biases_parameter = ParameterOf("biases")

    def __post_init__(self) -> None:
        inputs, outputs = self.descriptor.input_feature_channel_count, self.descriptor.output_feature_channel_count
        for name, tensor, count in (("weights", self.weights, inputs * outputs), ("biases", self.biases, outputs)):
            if tensor is not None and tensor.descriptor.element_count != count:
                raise ShapeError(
                    self.where,
                    f"the {name} hold {tensor.descriptor.element_count} numbers, not {count} for {inputs} → {outputs}",
                    fix=f"pass {name} with {count} elements, or use FullyConnectedLayer.create({inputs}, {outputs})",
                    **{name: tensor.descriptor},
                )

    @classmethod
    @found_at_node("inputs", last_extent)
    def create(
        cls,
        inputs: int,
        outputs: int,
        *,
        biases: bool = True,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> FullyConnectedLayer:
        """A layer with new weights `[outputs, inputs]` and, by default, zero biases `[outputs]`."""
        descriptor = ConvolutionDescriptor(1, inputs, outputs)
        values = initialize(initializer, (outputs, inputs), inputs, outputs)
        bias = Tensor((outputs,), fill=0.0) if biases else None
        return cls(Tensor((outputs, inputs), data=values), bias, descriptor, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source ends in `inputs` numbers, or in `inputs` channels of one pixel."""
        super().check(*sources)
        self.require_type(sources[0], self.weights)
        inputs, shape = self.descriptor.input_feature_channel_count, sources[0].shape
        if shape[-1] != inputs and not _is_pixel(shape, inputs):
            flat = math.prod(shape[1:]) == inputs
            raise ShapeError(
                self.where,
                f"the last dimension of the source is {shape[-1]}, but the layer takes {inputs} inputs",
                source=sources[0],
                fix=f"reshape the source to [{shape[0]}, {inputs}]" if flat else f"make it take {shape[-1]} inputs",
            )

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`x Wᵀ + b`."""
        inputs, outputs = self.descriptor.input_feature_channel_count, self.descriptor.output_feature_channel_count
        weights = scope.array(self.weights, outputs, inputs)
        biases = None if self.biases is None else scope.array(self.biases, outputs)
        return fully_connected(x, weights, biases)


def fully_connected(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
    """`x Wᵀ + b`, with `x` `[..., inputs]` or `[batch, inputs, 1, 1]` and `W` `[outputs, inputs]`."""
    if _is_pixel(tuple(x.shape), weights.shape[1]):
        return F.linear(x.flatten(1), weights, biases)[..., None, None]
    return F.linear(x, weights, biases)


def _is_pixel(shape: tuple[int, ...], channels: int) -> bool:
    return len(shape) == 4 and shape[1:] == (channels, 1, 1)
