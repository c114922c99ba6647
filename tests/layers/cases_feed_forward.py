"""Rows of the conformance table: the gated feed-forward layer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.activation import ActivationType
from stepgraph.layers.feed_forward import GatedFeedForwardLayer
from stepgraph.types import RandomInitializerType
from tests.layers.case import Bad, Case, normal


def layer(activation: ActivationType, outputs: int | None = None, biases: bool = False) -> GatedFeedForwardLayer:
    made = GatedFeedForwardLayer.create(
        4, 6, outputs, activation=activation, biases=biases, initializer=RandomInitializerType.UNIFORM
    )
    for seed, tensor in enumerate(made.biases or ()):
        tensor.torch().copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return made


def gated(function: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """Row by row, sum by sum."""

    def reference(x: np.ndarray, weights: Any, biases: Any = (0.0, 0.0, 0.0)) -> np.ndarray:
        found = []
        for row in x.reshape(-1, x.shape[-1]):
            gate, up = (np.array([w @ row for w in weights[i]]) + biases[i] for i in (0, 1))
            found.append(np.array([w @ (function(gate) * up) for w in weights[2]]) + biases[2])
        return np.array(found).reshape(*x.shape[:-1], -1)

    return reference


def twin(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Three linear layers, as models in PyTorch have them."""

    def call(x: torch.Tensor, weights: Any, biases: Any = (None, None, None)) -> torch.Tensor:
        gate, up = (F.linear(x, weights[i], biases[i]) for i in (0, 1))
        return F.linear(function(gate) * up, weights[2], biases[2])

    return call


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


CASES = [
    Case(
        "feed-forward-swiglu",
        lambda: layer(ActivationType.SILU),
        (normal(2, 3, 4),),
        gated(lambda x: x / (1 + np.exp(-x))),
        twin(F.silu),
        bad=(
            Bad(((2, 3, 5),), ShapeError, "the last dimension of the source is 5, but the layer takes 4 inputs"),
            Bad((np.zeros((2, 4), np.float16),), DataTypeError, "the source is float16, but its weights are float32"),
            Bad((np.zeros((2, 4), np.int32),), DataTypeError, "int32"),
        ),
    ),
    Case(
        "feed-forward-geglu",
        lambda: layer(ActivationType.GELU, outputs=3, biases=True),
        (normal(5, 4),),
        gated(gelu),
        twin(lambda x: F.gelu(x, approximate="tanh")),
    ),
]
