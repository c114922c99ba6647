"""Graphs made of other graphs, with names for what goes in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.graph import Graph
from stepgraph.layers.node import Node
from stepgraph.runtime.feeds import Feeds, Names
from stepgraph.tensors.tensor import Tensor


class DeclaredGraph(Graph):
    """What is declared about a graph before it is compiled.

    Args:
        graphs: the graphs whose nodes are adopted, in order; they stay usable and may be shared.
    """

    def __init__(self, graphs: Sequence[Graph] = ()) -> None:
        super().__init__()
        if not isinstance(graphs, Sequence):
            raise DataTypeError(
                type(self).__name__, f"graphs is {type(graphs).__name__}, not a list", fix="give a list of Graph"
            )
        for graph in graphs:
            if not isinstance(graph, Graph):
                raise DataTypeError(
                    type(self).__name__, f"{type(graph).__name__} is not a graph", fix="give a list of Graph"
                )
        if len(set(graphs)) != len(graphs):
            raise ArgumentError(type(self).__name__, "a graph was given twice", fix="give each graph once")
        self._graphs = tuple(graphs)
        # Replaced as a whole, never changed in place, so that a failed call can put back what was there.
        self._feeds = Feeds()
        self._outputs: Names = {}
        self._linked: tuple[Any, ...] = (self,)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The adopted nodes, then the graph's own."""
        return tuple(node for graph in self._graphs for node in graph.nodes) + tuple(self._nodes)

    @property
    def _layer_count(self) -> int:
        return sum(graph._layer_count for graph in self._graphs) + super()._layer_count

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs by name; those that `compile` found by itself included."""
        return dict(self._feeds.inputs)

    @property
    def loss_labels(self) -> dict[str, Tensor]:
        """The labels by name."""
        return dict(self._feeds.labels)

    @property
    def loss_label_weights(self) -> dict[str, Tensor]:
        """The label weights by name."""
        return dict(self._feeds.weights)

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The declared outputs by name."""
        return dict(self._outputs)

    @property
    def linked_graphs(self) -> tuple[Any, ...]:
        """The graphs joined with `link`, this one included."""
        return self._linked

    def _is_batched(self, tensor: Tensor) -> bool:
        return not self._feeds.tensors or tensor.shape[0] == self._feeds.batch

    def add_inputs(
        self, inputs: Names, loss_labels: Names | None = None, loss_label_weights: Names | None = None
    ) -> None:
        """Names the tensors that `execute` is given data for: inputs, labels, label weights. Calls accumulate."""
        self._feeds = self._feeds.declare(inputs, loss_labels, loss_label_weights)
