"""A node of a graph: one use of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Node:
    """One use of a layer: its sources and results.

    Args:
        layer: the layer.
        sources: what it reads.
        results: what it computes.
        labels: for a loss, what it compares with.
        disable_update: whether none of the layer's parameters is trained because of this node.
        line: the line of the user's program that created it.
        is_loss: whether it is a loss.
        frozen: single parameters that this node does not train; other nodes may.
    """

    layer: Layer
    sources: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    labels: tuple[Tensor, ...] = ()
    disable_update: bool = False
    line: str = ""
    is_loss: bool = False
    frozen: frozenset[Tensor] = frozenset()

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The layer's parameters that this node trains, as long as their tensors are updatable."""
        if self.disable_update:
            return ()
        return tuple(t for t in dict.fromkeys(self.layer.parameters.values()) if t not in self.frozen)

    @property
    def frozen_count(self) -> int:
        """The number of elements that this node does not train."""
        return sum(tensor.descriptor.element_count for tensor in untrained([self]))

    @property
    def is_frozen(self) -> bool:
        """Whether the layer has parameters, and this node trains none of them."""
        return bool(self.layer.parameters) and not self.trained

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """All tensors passed to the layer's forward: sources, then loss labels and label weights."""
        return self.sources + self.labels

    @property
    def where(self) -> str:
        """The name of this node in messages."""
        return f"{type(self.layer).__name__} '{self.layer.label}' ({self.line})"


def untrained(nodes: Iterable[Node]) -> set[Tensor]:
    """The parameters that none of these nodes trains."""
    found, trained = set[Tensor](), set[Tensor]()
    for node in nodes:
        found.update(node.layer.parameters.values())
        trained.update(node.trained)
    return found - trained
