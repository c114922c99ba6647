"""How filters and fed images of two-dimensional convolutions lie in memory, where images have their channels last.

The convolution reads filters with the channels of its source last. A transposed one reads them input-major, with the
channels of its result last.
"""

from __future__ import annotations

import torch

from stepgraph.compiler.step import Step
from stepgraph.layers.convolution import ConvolutionLayer
from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import Tensor

LAST = torch.channels_last


def are_laid_out(step: Step, layer: Layer) -> bool:
    """Whether a step reads the filters of a layer in an order of their own."""
    return step.channels_last and isinstance(layer, ConvolutionLayer) and layer.descriptor.dimensions == 2


def laid_out(layer: ConvolutionLayer, weights: torch.Tensor) -> torch.Tensor:
    """Filters `[outputs, inputs / groups, height, width]` in the order that the layer reads, copied if necessary."""
    if layer.descriptor.is_convolution_transpose and layer.descriptor.group_count == 1:
        return weights.transpose(0, 1).contiguous(memory_format=LAST).transpose(0, 1)
    return weights.contiguous(memory_format=LAST)


def orders(step: Step) -> dict[Tensor, ConvolutionLayer]:
    """Copies of parameters in the compute type that are kept in the order of a layer: of the first that reads them.

    Parameters in other shapes, such as `[1, outputs * inputs, height, width]`, are reordered in each step.
    """
    found: dict[Tensor, ConvolutionLayer] = {}
    for layer in (node.layer for node in step.nodes):
        if are_laid_out(step, layer):
            assert isinstance(layer, ConvolutionLayer)
            if layer.weights in step.rounded_set and layer.weights.shape == layer.descriptor.weights_shape:
                found.setdefault(layer.weights, layer)
    return found


def images(step: Step) -> frozenset[Tensor]:
    """Fed images that may have their channels last in memory: only convolutions read them, which reorder others."""
    readers: dict[Tensor, list[bool]] = {}
    for node in step.nodes:
        for tensor in node.arguments:
            readers.setdefault(tensor, []).append(are_laid_out(step, node.layer))
    return frozenset(tensor for tensor in step.feeds if all(readers.get(tensor, [False])))


def strides(step: Step) -> dict[Tensor, tuple[int, ...]]:
    """The strides of these copies, by parameter."""
    found = orders(step).items()
    return {t: laid_out(layer, torch.empty(t.shape, device="meta")).stride() for t, layer in found}
