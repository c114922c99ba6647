"""Gated feed-forward layers: SwiGLU, GeGLU and their relatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.activation import ActivationDescriptor, ActivationType, activate
from stepgraph.layers.found import found_at_node, last_extent
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.random import initialize
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import RandomInitializerType

SILU = ActivationDescriptor(ActivationType.SILU)
_PARTS = ("gate", "up", "down")


class GatedFeedForwardLayer(Layer):
    """`y = (f(x Wgᵀ + bg) (x Wuᵀ + bu)) Wdᵀ + bd`: two hidden vectors, one of which gates the other.

    | activation | name | used by |
    |---|---|---|
    | `SILU` | SwiGLU | Llama, Mistral, Qwen |
    | `GELU`, `GELU_ERF` | GeGLU | Gemma, T5 1.1; ModernBERT |
    | `SIGMOID`, `RELU` | GLU, ReGLU | |

    Shapes: `[..., inputs] → [..., outputs]`. Weights are gate, up and down: `[hidden, inputs]`, `[hidden, inputs]`,
    `[outputs, hidden]`; biases hold `hidden`, `hidden` and `outputs` numbers.

    `torch.nn` has no such layer; it is three `torch.nn.Linear`.

    Args:
        weights: of gate, up and down.
        biases: of the same three, or None.
        activation: of the gate.

    Example:
        >>> layer = GatedFeedForwardLayer.create(64, 172)
        >>> layer.infer(TensorDescriptor((8, 20, 64)))[0].shape
        (8, 20, 64)
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor] | None = None
    activation: ActivationDescriptor = SILU

    default_label = "GatedFeedForward"
    weights_parameters = ParameterOf("weights")
    biases_parameters = ParameterOf("biases")

    def __post_init__(self) -> None:
        for name in ("weights", "biases"):
            tensors = getattr(self, name)
            if tensors is None:
                continue
            if len(tensors) != 3:
                problem = f"{len(tensors)} {name} were passed, but 3 are needed ({', '.join(_PARTS)})"
                raise ArgumentError(self.where, problem, fix="pass 3 tensors, or use GatedFeedForwardLayer.create(...)")
            object.__setattr__(self, name, tuple(tensors))
        (hidden, inputs), (outputs, _) = (self._matrix(part, self.weights[part]) for part in (0, 2))
        for part, shape in enumerate(((hidden, inputs), (hidden, inputs), (outputs, hidden))):
            self._require(f"{_PARTS[part]} weights", self.weights[part], shape)
            if self.biases is not None:
                self._require(f"{_PARTS[part]} biases", self.biases[part], shape[:1])

    def _matrix(self, part: int, tensor: Tensor) -> tuple[int, int]:
        if len(tensor.shape) != 2:
            problem = f"the {_PARTS[part]} weights are {list(tensor.shape)}, not a matrix"
            raise ShapeError(self.where, problem, fix="pass [hidden, inputs], [hidden, inputs], [outputs, hidden]")
        return tensor.shape[0], tensor.shape[1]

    def _require(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            problem = f"the {name} are {list(tensor.shape)}, but the others need {list(shape)}"
            raise ShapeError(self.where, problem, fix=f"pass {name} of shape {list(shape)}")

    @classmethod
    @found_at_node("inputs", last_extent)
    def create(
        cls,
        inputs: int,
        hidden: int,
        outputs: int | None = None,
        *,
        activation: ActivationType | ActivationDescriptor = ActivationType.SILU,
        biases: bool = False,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> GatedFeedForwardLayer:
        """A layer with new weights and, if wanted, zero biases; by default SwiGLU with as many outputs as inputs.

        Transformers usually have about 8/3 as many hidden features as inputs: as many parameters as an ungated layer
        with four times as many.
        """
        outputs = inputs if outputs is None else outputs
        for name, count in (("inputs", inputs), ("hidden", hidden), ("outputs", outputs)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ArgumentError(cls.__name__, f"{name} is {count!r}", fix="pass an integer ≥ 1")
        shapes = (hidden, inputs), (hidden, inputs), (outputs, hidden)
        weights = [Tensor(shape, data=initialize(initializer, shape, shape[1], shape[0])) for shape in shapes]
        zeros = [Tensor(shape[:1], fill=0.0) for shape in shapes] if biases else None
        chosen = activation if isinstance(activation, ActivationDescriptor) else ActivationDescriptor(activation)
        return cls(weights, zeros, chosen, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source ends in `inputs` numbers of the weights' type."""
        super().check(*sources)
        source, inputs = sources[0], self.weights[0].shape[1]
        self.require_type(source, self.weights[0])
        if source.shape[-1] != inputs:
            problem = f"the last dimension of the source is {source.shape[-1]}, but the layer takes {inputs} inputs"
            raise ShapeError(self.where, problem, source=source, fix=f"make it take {source.shape[-1]} inputs")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Two products, the gate, and the product back."""
        weights = [scope.array(one) for one in self.weights]
        biases = [None] * 3 if self.biases is None else [scope.array(one) for one in self.biases]
        return gated_feed_forward(x, weights, biases, activation=self.activation)


def gated_feed_forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    activation: ActivationDescriptor,
) -> torch.Tensor:
    """`(f(x Wgᵀ + bg) (x Wuᵀ + bu)) Wdᵀ + bd`."""
    gate, up = (F.linear(x, weights[part], biases[part]) for part in (0, 1))
    return F.linear(activate(gate, descriptor=activation) * up, weights[2], biases[2])
