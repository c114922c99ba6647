"""The declaration of a training or inference graph: wiring, names, loss, trained tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepgraph import draw
from stepgraph.errors import StateError, StepgraphError, UnknownNameError
from stepgraph.graph import make_node
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.feeds import Feeds, Names
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True)
class Declaration:
    """The wiring and names of a graph. It is immutable: declaring more creates a new one.

    Args:
        kind: the class name of the graph, for messages.
        trains: whether it is a training graph.
        adopted: the nodes of the adopted graphs, one tuple per graph.
        own: the nodes added to the graph itself.
        feeds: names for data; after a compilation, including those it found automatically.
        outputs: results that stay readable, by name.
        named_only: those of them that a training step drops if they are large, as it drops predictions without a name.
        loss_layer: compares the last result with the labels.
        loss_node: that layer as a node; None if there is none, or if labels are missing or do not fit.
        loss_results: the tensors of that node, which stay the same while their shapes do.
        optimizer: updates the parameters.
        average: the decay of the moving averages of the parameters; None if there are none.
        parameters: inputs that are trained.
        stopped: tensors that pass no gradient back.
        user_gradients: gradients from outside, by the result they are for.
        keeps_predictions: whether what losses compare stays readable after a training step, however large it is.
    """

    kind: str
    trains: bool
    adopted: tuple[tuple[Node, ...], ...] = ()
    own: tuple[Node, ...] = ()
    feeds: Feeds = field(default_factory=Feeds)
    outputs: Names = field(default_factory=dict)
    named_only: frozenset[Tensor] = frozenset()
    loss_layer: Layer | None = None
    loss_node: Node | None = None
    loss_results: tuple[Tensor, ...] = ()
    optimizer: Optimizer | None = None
    average: float | None = None
    parameters: tuple[Tensor, ...] = ()
    stopped: frozenset[Tensor] = frozenset()
    user_gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)
    keeps_predictions: bool = False

    @cached_property
    def wired(self) -> tuple[Node, ...]:
        """The nodes without the loss."""
        return (*(node for nodes in self.adopted for node in nodes), *self.own)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in order."""
        return self.wired if self.loss_node is None else (*self.wired, self.loss_node)

    @property
    def kept_outputs(self) -> list[Tensor]:
        """The outputs that every whole call keeps, however large they are."""
        return [tensor for tensor in self.outputs.values() if tensor not in self.named_only]

    @property
    def optional_outputs(self) -> list[Tensor]:
        """The outputs that a training step keeps only if they are small, or if somebody asks for predictions."""
        return [tensor for tensor in self.outputs.values() if tensor in self.named_only]

    @property
    def predictions(self) -> Names:
        """The results that a graph is asked for: its outputs or, without any, what its losses compare or its last ones.

        The latter are named `output`, `output2`, …
        """
        made = {tensor for node in self.nodes for tensor in node.results}
        declared = {name: tensor for name, tensor in self.outputs.items() if tensor in made}
        if declared or not self.nodes:
            return declared
        ends = dict.fromkeys(t for node in self.nodes if node.is_loss for t in node.sources if t in made)
        found = list(ends) or list(self.nodes[-1].results)
        return {"output" if index == 1 else f"output{index}": tensor for index, tensor in enumerate(found, 1)}

    @property
    def predicting(self) -> tuple[Node, ...]:
        """The nodes that compute what losses compare and the outputs; without losses, all of them."""
        losses = [node for node in self.nodes if node.is_loss]
        wanted = {*self.outputs.values()} if losses else set()
        wanted.update(t for node in losses if node.layer.takes_labels or not self.outputs for t in node.sources)
        if not wanted:
            return self.nodes
        after = set[Tensor]()  # losses, and results computed from them
        for node in self.nodes:
            if node.is_loss or not after.isdisjoint(node.arguments):
                after.update(node.results)
        found: list[Node] = []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.results) and after.isdisjoint(node.results):
                found.append(node)
                wanted.update(node.arguments)
        return tuple(reversed(found))

    @property
    def layers(self) -> list[Layer]:
        """Every layer once, in the order of its first node; the loss layer is the last."""
        found = dict.fromkeys(node.layer for node in self.wired)
        if self.loss_layer is not None:
            found.pop(self.loss_layer, None)
            found[self.loss_layer] = None
        return list(found)

    @cached_property
    def parameter_names(self) -> dict[Tensor, tuple[str, ...]]:
        """All names of each parameter: `layer.field` as printed first, then with the kind of the layer in its place."""
        printed: dict[Tensor, dict[str, None]] = {}
        by_kind: dict[Tensor, dict[str, None]] = {}
        for layer, name in draw.unique_names(node.layer for node in self.nodes).items():
            for field_name, tensor in layer.parameters.items():
                printed.setdefault(tensor, {})[f"{name}.{field_name}"] = None
                by_kind.setdefault(tensor, {})[f"{draw.kind(layer)}.{field_name}"] = None
        called = {tensor: name for _, name, tensor in self.feeds}
        for tensor in self.parameters:
            printed.setdefault(tensor, {})[f"input.{called.get(tensor, tensor.label)}"] = None
        return {t: tuple(dict.fromkeys((*printed[t], *by_kind.get(t, ())))) for t in printed}

    def slots(self, tensor: Tensor) -> tuple[str, ...]:
        """The optimizer's buffers of a parameter."""
        return () if self.optimizer is None else self.optimizer.slots_of(tensor, self.parameter_names.get(tensor, ()))

    def with_loss(self) -> Declaration:
        """The same with the loss after the last result; raises an error if it has nothing to compare with."""
        layer, wired = self.loss_layer, self.wired
        if layer is None or not wired:
            return replace(self, loss_node=None)
        used = {tensor for node in wired for tensor in node.labels}
        labels = (
            []
            if not layer.takes_labels
            else [t for t in (*self.feeds.labels.values(), *self.feeds.weights.values()) if t not in used]
        )
        known = self.loss_node
        if known is not None and known.sources == wired[-1].results[:1] and known.labels[: len(labels)] == (*labels,):
            return self
        if layer.is_loss and layer.takes_labels and not any(t not in used for t in self.feeds.labels.values()):
            fix = "add_inputs(..., loss_labels={...})"
            raise StateError(layer.where, "the loss has no labels to compare with", fix=fix)
        node = make_node(layer, wired[-1].results[:1], labels, False, layer.line)
        same = [t.descriptor for t in self.loss_results] == [t.descriptor for t in node.results]
        results = self.loss_results if same else node.results
        if layer.owner is None:  # type: ignore[attr-defined]
            layer.layer_id = len(self.layers)  # type: ignore[misc]
        return replace(self, loss_node=replace(node, results=results, is_loss=True), loss_results=results)

    def shown(self) -> Declaration:
        """The same with the loss if it fits; `compile` decides whether it must."""
        try:
            return self.with_loss()
        except StepgraphError:
            return replace(self, loss_node=None)

    def is_batched(self, tensor: Tensor) -> bool:
        """Whether a tensor's first dimension is the batch size; before a compilation, every tensor's is."""
        return not self.feeds.tensors or self.feeds.is_batched(tensor)

    def require_outputs(self, outputs: Names, gradients: Iterable[Tensor]) -> None:
        """Rejects outputs that no layer produces and that are not gradients."""
        known = {*(tensor for node in self.nodes for tensor in node.results), *gradients}
        for name, tensor in outputs.items():
            if tensor not in known:
                problem = f"no layer produces the output '{name}' ({tensor!r})"
                raise UnknownNameError("add_outputs", problem, fix="pass what node() returned")
