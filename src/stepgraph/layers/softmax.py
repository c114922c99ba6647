"""Softmax along one dimension."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import require_dimension, whole_number
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import RawEnum


class SoftmaxOperation(RawEnum):
    """Kinds of softmax."""

    SOFTMAX = 0, "Softmax"
    LOG_SOFTMAX = 1, "Log Softmax"


class SoftmaxLayer(Layer):
    """`y = exp(x) / Σ exp(x)` along `dimension`, or its logarithm; the result has the source's shape.

    Same as `torch.softmax` and `torch.log_softmax`. The default dimension is 1, the channels.

    Example:
        >>> SoftmaxLayer.log_softmax().dimension
        1
    """

    operation: SoftmaxOperation
    dimension: int = 1

    default_label = "Softmax"
    full_precision = True

    def __post_init__(self) -> None:
        if not isinstance(self.operation, SoftmaxOperation):
            raise ArgumentError(
                self.where, f"the operation is {self.operation!r}", fix="use a member of SoftmaxOperation"
            )
        object.__setattr__(self, "dimension", whole_number(self, "dimension", self.dimension))

    @classmethod
    def softmax(cls, dimension: int = 1, *, label: str = "") -> SoftmaxLayer:
        """Probabilities that add up to 1 along `dimension`."""
        return cls(SoftmaxOperation.SOFTMAX, dimension, label=label)

    @classmethod
    def log_softmax(cls, dimension: int = 1, *, label: str = "") -> SoftmaxLayer:
        """Logarithms of these probabilities."""
        return cls(SoftmaxOperation.LOG_SOFTMAX, dimension, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has the dimension."""
        super().check(*sources)
        require_dimension(self, self.dimension, sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`softmax(x)` or `log(softmax(x))` along the dimension."""
        return SOFTMAX[self.operation](x, self.dimension)


SOFTMAX: dict[SoftmaxOperation, Callable[[torch.Tensor, int], torch.Tensor]] = {
    SoftmaxOperation.SOFTMAX: torch.softmax,
    SoftmaxOperation.LOG_SOFTMAX: torch.log_softmax,
}
