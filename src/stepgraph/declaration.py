"""What is declared about a training or inference graph: wiring, names, loss, what is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepgraph.errors import StateError, StepgraphError, UnknownNameError
from stepgraph.graph import make_node
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.feeds import Feeds, Names
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True)
class Declaration:
    """What was wired and named. A value: declaring more gives another one.

    Args:
        kind: the class of the graph, as messages name it.
        trains: whether it is a training graph.
        adopted: the nodes of the graphs it was made from, one tuple for each.
        own: the nodes that were added to it.
        feeds: names for data; after a compilation also those that it found by itself.
        outputs: results that stay readable, by name.
        loss_layer: compares the last result with the labels.
        loss_node: that layer as a node; None where there is none, or where labels are missing or do not fit.
        loss_results: the tensors of that node, which stay the same while their shapes do.
        optimizer: updates the parameters.
        parameters: inputs that are trained.
        stopped: tensors that pass no gradient back.
        user_gradients: gradients from outside, by the result they are for.
    """

    kind: str
    trains: bool
    adopted: tuple[tuple[Node, ...], ...] = ()
    own: tuple[Node, ...] = ()
    feeds: Feeds = field(default_factory=Feeds)
    outputs: Names = field(default_factory=dict)
    loss_layer: Layer | None = None
    loss_node: Node | None = None
    loss_results: tuple[Tensor, ...] = ()
    optimizer: Optimizer | None = None
    parameters: tuple[Tensor, ...] = ()
    stopped: frozenset[Tensor] = frozenset()
    user_gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)

    @cached_property
    def wired(self) -> tuple[Node, ...]:
        """The nodes without the loss."""
        return (*(node for nodes in self.adopted for node in nodes), *self.own)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in order."""
        return self.wired if self.loss_node is None else (*self.wired, self.loss_node)

    @property
    def layers(self) -> list[Layer]:
        """Every layer once, in the order of its first node; the loss layer is the last."""
        found = dict.fromkeys(node.layer for node in self.wired)
        if self.loss_layer is not None:
            found.pop(self.loss_layer, None)
            found[self.loss_layer] = None
        return list(found)

    def with_loss(self) -> Declaration:
        """The same with the loss behind the last result; raises where it has nothing to compare with."""
        layer, wired = self.loss_layer, self.wired
        if layer is None or not wired:
            return replace(self, loss_node=None)
        used = {tensor for node in wired for tensor in node.labels}
        labels = [t for t in (*self.feeds.labels.values(), *self.feeds.weights.values()) if t not in used]
        known = self.loss_node
        if known is not None and known.sources == wired[-1].results[:1] and known.labels[: len(labels)] == (*labels,):
            return self
        if layer.is_loss and not any(t not in used for t in self.feeds.labels.values()):
            fix = "add_inputs(..., loss_labels={...})"
            raise StateError(layer.where, "the loss has no labels to compare with", fix=fix)
        node = make_node(layer, wired[-1].results[:1], labels, False, layer.line)
        same = [t.descriptor for t in self.loss_results] == [t.descriptor for t in node.results]
        results = self.loss_results if same else node.results
        if layer.owner is None:  # type: ignore[attr-defined]
            layer.layer_id = len(self.layers)  # type: ignore[misc]
        return replace(self, loss_node=replace(node, results=results, is_loss=True), loss_results=results)

    def shown(self) -> Declaration:
        """The same with the loss where it fits; whether it must is for `compile` to say."""
        try:
            return self.with_loss()
        except StepgraphError:
            return replace(self, loss_node=None)

    def is_batched(self, tensor: Tensor) -> bool:
        """Whether the first extent of a tensor follows the batch size; before a compilation that of each does."""
        return not self.feeds.tensors or tensor.shape[0] == self.feeds.batch

    def require_outputs(self, outputs: Names, gradients: Iterable[Tensor]) -> None:
        """Refuses outputs that no layer makes and that are no gradients."""
        known = {*(tensor for node in self.nodes for tensor in node.results), *gradients}
        for name, tensor in outputs.items():
            if tensor not in known:
                problem = f"no layer makes the output '{name}' ({tensor!r})"
                raise UnknownNameError("add_outputs", problem, fix="pass what node() returned")
