"""A node of a graph: one use of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Node:
    """One use of a layer: its sources and results."""

    layer: Layer
    sources: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    labels: tuple[Tensor, ...] = ()
    disable_update: bool = False
    line: str = ""
    is_loss: bool = False

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """All tensors passed to the layer's forward: sources, then loss labels and label weights."""
        return self.sources + self.labels

    @property
    def where(self) -> str:
        """The name of this node in messages."""
        return f"{type(self.layer).__name__} '{self.layer.label}' ({self.line})"
