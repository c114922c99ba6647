"""Cases of the fully connected layer."""

from typing import Any

import numpy as np
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.convolution import ConvolutionDescriptor
from stepgraph.layers.linear import FullyConnectedLayer
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import RandomInitializerType
from tests.layers.case import Bad, Case, normal


def packed(inputs: int, outputs: int) -> FullyConnectedLayer:
    """A layer with weights and biases in the original's packed shapes."""
    weights = Tensor((1, outputs * inputs, 1, 1), random=RandomInitializerType.UNIFORM)
    biases = Tensor((1, outputs, 1, 1), random=RandomInitializerType.UNIFORM)
    return FullyConnectedLayer(weights, biases, ConvolutionDescriptor((1, 1), inputs, outputs))


def reference(x: np.ndarray, weights: np.ndarray, biases: np.ndarray | None = None) -> np.ndarray:
    """`y[o] = b[o] + Σ W[o · inputs + i] x[i]`, over the channels of one pixel or over the last axis."""
    flat = weights.ravel()
    is_pixel = x.ndim == 4 and x.shape[2:] == (1, 1)
    rows = x.reshape(x.shape[0], -1) if is_pixel else x.reshape(-1, x.shape[-1])
    inputs, outputs = rows.shape[1], flat.size // rows.shape[1]
    y = np.zeros((rows.shape[0], outputs))
    for o in range(outputs):
        y[:, o] = rows @ flat[o * inputs : (o + 1) * inputs] + (0 if biases is None else biases.ravel()[o])
    return y.reshape(x.shape[0], outputs, 1, 1) if is_pixel else y.reshape(*x.shape[:-1], outputs)


def twin(x: Any, weights: Any, biases: Any = None) -> Any:
    return F.linear(x, weights.reshape(-1, x.shape[-1]), None if biases is None else biases.reshape(-1))


def pixel_twin(x: Any, weights: Any, biases: Any) -> Any:
    channels = x.shape[1]
    return F.conv2d(x, weights.reshape(-1, channels, 1, 1), biases.reshape(-1))


CASES = [
    Case(
        "fully connected",
        lambda: FullyConnectedLayer.create(5, 3),
        (normal(4, 5),),
        reference,
        twin,
        bad=(
            Bad(((4, 6),), ShapeError, "the last dimension of the source is 6, but the layer takes 5 inputs"),
            Bad((np.zeros((4, 5), np.int32),), DataTypeError, "the source is int32, but a floating type is needed"),
            Bad(((4, 5), (4, 5)), ShapeError, "2 sources were passed, but 1 are needed"),
        ),
    ),
    Case(
        "fully connected without biases",
        lambda: FullyConnectedLayer.create(5, 3, biases=False),
        (normal(4, 5),),
        reference,
        twin,
    ),
    Case("fully connected, packed weights", lambda: packed(5, 3), (normal(2, 4, 5),), reference, twin),
    Case("fully connected, one sample", lambda: packed(5, 3), (normal(5),), reference, twin),
    Case("fully connected, one pixel", lambda: packed(5, 3), (normal(4, 5, 1, 1),), reference, pixel_twin),
]
