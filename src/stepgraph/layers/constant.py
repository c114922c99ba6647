"""Numbers and arrays in a graph."""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.layers.layer import Layer, Scope, constant
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType


class ConstantLayer(Layer):
    """An array that never changes, as a result without sources; `graph.constant` and operators create it.

    Example:
        >>> ConstantLayer(Tensor((2, 3), fill=1.0)).infer()[0].shape
        (2, 3)
    """

    value: Tensor = constant()

    default_label = "Constant"
    source_counts = (0, 0)

    def check(self, *sources: TensorDescriptor) -> None:
        """Accepts every type."""

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Every type."""
        return True

    def forward(self, *, scope: Scope) -> torch.Tensor:
        """The array."""
        return scope.array(self.value)
