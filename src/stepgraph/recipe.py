"""What a training graph computes: its loss, what it trains, where gradients stop and where they come from outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepgraph import draw
from stepgraph.compiled import CompiledGraph
from stepgraph.compiler.step import Step
from stepgraph.errors import DataTypeError, StateError
from stepgraph.graph import Graph, Node, make_node
from stepgraph.layer import Layer
from stepgraph.optimizers import Optimizer
from stepgraph.tensor import Tensor
from stepgraph.types import GraphCompilationOptions


class TrainingRecipe(CompiledGraph):
    """The describing half of a `TrainingGraph`; the other half runs what is described here.

    Args:
        graphs: graphs whose nodes are adopted, in order.
        loss_layer: compares the last result with the declared labels.
        optimizer: updates the parameters.
    """

    def __init__(
        self, graphs: Sequence[Graph] = (), loss_layer: Layer | None = None, optimizer: Optimizer | None = None
    ) -> None:
        super().__init__(graphs)
        if loss_layer is not None and not isinstance(loss_layer, Layer):
            raise DataTypeError(
                "TrainingGraph", f"loss_layer is {type(loss_layer).__name__}, not a layer", fix="use a LossLayer"
            )
        self._loss_layer = loss_layer
        self._loss_node: Node | None = None
        self._optimizer = None if optimizer is None else checked(optimizer)
        self._stop: frozenset[Tensor] = frozenset()
        self._parameters: tuple[Tensor, ...] = ()
        self._compute_type: torch.dtype | None = None
        self._user_gradients: dict[Tensor, Tensor] = {}

    @property
    def _stopped(self) -> frozenset[Tensor]:
        return self._stop

    def _all_nodes(self) -> tuple[Node, ...]:
        if self._loss_layer is None or not self.nodes:
            return self.nodes
        prediction = self.nodes[-1].results[0]
        used = {t for node in self.nodes for t in node.labels}
        labels = [t for t in (*self._feeds.labels.values(), *self._feeds.weights.values()) if t not in used]
        current = self._loss_node
        if current is None or current.sources != (prediction,) or current.labels[: len(labels)] != tuple(labels):
            if self._loss_layer.is_loss and not any(t not in used for t in self._feeds.labels.values()):
                raise StateError(
                    self._loss_layer.where,
                    "the loss has no labels to compare with",
                    fix="add_inputs(..., loss_labels={...})",
                )
            node = make_node(self._loss_layer, [prediction], labels, False, self._loss_layer.line)
            self._loss_node = Node(node.layer, node.sources, node.results, node.labels, False, node.line, is_loss=True)
        assert self._loss_node is not None
        return (*self.nodes, self._loss_node)

    def _tell_device(self) -> None:
        super()._tell_device()
        for handle in self._user_gradients.values():
            handle.device = self.device

    def _trainable(self) -> tuple[Tensor, ...]:
        """Tensors this graph updates."""
        candidates = [t for node in self._compiled if not node.disable_update for t in node.layer.parameters.values()]
        elsewhere = self._owned_elsewhere()
        updated = dict.fromkeys((*candidates, *self._parameters))
        return tuple(t for t in updated if t.is_updatable and t.data_type.is_floating and t not in elsewhere)

    def _owned_elsewhere(self) -> set[Tensor]:
        """Parameters that an earlier graph of a linked group updates."""
        earlier = self._linked[: self._linked.index(self)]
        return {t for graph in earlier for node in graph._compiled for t in node.layer.parameters.values()}

    def _seeded(self) -> tuple[Tensor, ...]:
        """Results that take a gradient from outside: asked for, read by a linked graph, or last without a loss."""
        results = [t for node in self._compiled for t in node.results if t.data_type.is_floating]
        asked = {*self._user_gradients, *self._read_elsewhere(), *self._terminal()}
        return tuple(t for t in results if t in asked)

    def _terminal(self) -> tuple[Tensor, ...]:
        """The last results, where there is no loss to stand for them."""
        has_loss = any(node.is_loss for node in self._compiled)
        return () if has_loss or not self._compiled else self._compiled[-1].results

    def _read_elsewhere(self) -> set[Tensor]:
        return {t for graph in self._linked if graph is not self for t in graph._feeds.tensors}

    def _wanted(self) -> frozenset[Tensor]:
        """Inputs that are results of linked graphs, and parameters that those update."""
        made = {t for graph in self._linked if graph is not self for node in graph._compiled for t in node.results}
        return frozenset(t for t in self._feeds.tensors if t in made) | frozenset(self._owned_elsewhere())

    def _exchanges(self) -> bool:
        """Whether gradients go from this graph to a linked one, or come from there."""
        made = {t for node in self._compiled for t in node.results}
        return bool(self._wanted() or made & self._read_elsewhere())

    def _step(self, batch: int, training: bool) -> Step:
        names = draw.parameter_names(self._compiled)
        device = self._require_compiled("compile").torch
        common = (self._compiled, self._feeds.tensors, device, (self._feeds.batch, batch))
        chooses = GraphCompilationOptions.DETERMINISTIC not in self._options
        if not training:
            return Step(*common, names=names, compute_type=self._compute_type, chooses_kernels=chooses)
        return Step(
            *common,
            training=True,
            trainable=self._trainable(),
            wanted=self._wanted(),
            optimizer=self._optimizer,
            seeded=self._seeded(),
            starts=frozenset(self._terminal()) - {*self._user_gradients, *self._read_elsewhere()},
            stopped=self._stop,
            all_gradients=GraphCompilationOptions.COMPUTE_ALL_GRADIENTS in self._options,
            compute_type=self._compute_type,
            chooses_kernels=chooses,
            names=names,
        )


def checked(optimizer: Optimizer) -> Optimizer:
    """The optimizer, if it is one."""
    if not isinstance(optimizer, Optimizer) or not optimizer.rule:
        raise DataTypeError(
            "TrainingGraph", f"the optimizer is {type(optimizer).__name__}", fix="use SGDOptimizer or AdamOptimizer"
        )
    return optimizer
