"""What a training graph computes: its loss, what it trains, where gradients stop and where they come from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.recompute import largest_batch
from stepgraph.compiler.step import Step, gradient
from stepgraph.device import Device
from stepgraph.errors import DataTypeError, MemoryLimitError, StateError, StepgraphError
from stepgraph.graph import Graph, make_node
from stepgraph.graphs.inspected import InspectedGraph
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.programs import PASSES
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import GraphCompilationOptions


class TrainingRecipe(InspectedGraph):
    """The describing half of a `TrainingGraph`; the other half runs what is described here.

    Args:
        graphs: graphs whose nodes are adopted, in order.
        loss_layer: compares the last result with the declared labels.
        optimizer: updates the parameters.
    """

    trains = True

    def __init__(
        self, graphs: Sequence[Graph] = (), loss_layer: Layer | None = None, optimizer: Optimizer | None = None
    ) -> None:
        super().__init__(graphs)
        if loss_layer is not None and not isinstance(loss_layer, Layer):
            raise DataTypeError(
                "TrainingGraph", f"loss_layer is {type(loss_layer).__name__}, not a layer", fix="use a LossLayer"
            )
        self._loss_layer = loss_layer
        self._loss_node = None
        self._optimizer = None if optimizer is None else checked(optimizer)
        self._stop: frozenset[Tensor] = frozenset()
        self._parameters = ()
        self._user_gradients: dict[Tensor, Tensor] = {}

    @property
    def layers(self) -> list[Layer]:
        """Every layer once, in the order of its first node; the loss layer given at creation is the last."""
        found, loss = super().layers, self._loss_layer
        return found if loss is None or not found else [*(layer for layer in found if layer is not loss), loss]

    @property
    def _stopped(self) -> frozenset[Tensor]:
        return self._stop

    def stop_gradient(self, tensors: Sequence[Tensor]) -> None:
        """Lets no gradient flow back through these tensors."""
        if not isinstance(tensors, Iterable):
            kind = type(tensors).__name__
            raise DataTypeError("stop_gradient", f"{kind} is not a list of tensors", fix="pass a list of tensors")
        for tensor in tensors:
            require_tensor("stop_gradient", tensor)
        with self._all_or_nothing("stop_gradient"):
            self._stop |= frozenset(tensors)
            self._again("gradients stop at other tensors")

    def _again(self, reason: str, keeps_passes: bool = False) -> None:
        """Compiles a compiled graph again; `keeps_passes` goes on after the passes that have run."""
        raise NotImplementedError

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
            self._loss_node = self._attached(self._loss_layer, prediction, labels)
        assert self._loss_node is not None
        return (*self.nodes, self._loss_node)

    def _attached(self, layer: Layer, prediction: Tensor, labels: Sequence[Tensor]) -> Node:
        """The loss behind the last result. Its tensors stay the ones callers hold while their shapes stay the same."""
        node = make_node(layer, [prediction], labels, False, layer.line)
        known = () if self._loss_node is None else self._loss_node.results
        if [t.descriptor for t in known] != [t.descriptor for t in node.results]:
            known = node.results
        if layer.owner is None:  # type: ignore[attr-defined]
            layer.layer_id = len(self.layers)  # type: ignore[misc]
        return replace(node, results=known, is_loss=True)

    def _shown(self) -> tuple[Node, ...]:
        try:
            return self._all_nodes()
        except StepgraphError:  # labels are missing or do not fit, which is for compile to say
            return self.nodes

    def _tell_device(self, device: Device) -> None:
        super()._tell_device(device)
        for handle in self._user_gradients.values():
            handle.device = device

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
        """Results that take a gradient from outside: asked for, from a linked graph, or last without a loss."""
        results = [t for node in self._compiled for t in node.results if t.data_type.is_floating]
        last = {*self._terminal()} - self._read_elsewhere()
        asked = {*self._user_gradients, *last, *self._handed_back()}
        return tuple(t for t in results if t in asked)

    def _handed_back(self) -> frozenset[Tensor]:
        """Tensors for which linked graphs compute gradients."""
        return frozenset[Tensor]().union(*(graph._hands_back() for graph in self._others()))

    def _others(self) -> list[Any]:
        """The graphs that this one is linked with."""
        return [graph for graph in self._linked if graph is not self]

    def _hands_back(self) -> set[Tensor]:
        """What linked graphs want a gradient of and get one: not where no loss depends on it."""
        if self._programs.is_recording:  # graphs that read one another count on it
            return {*self._wanted()}
        found = self._programs.program(self._feeds.batch).outputs
        return {tensor for tensor in self._wanted() if gradient(tensor) in found}

    def _terminal(self) -> tuple[Tensor, ...]:
        """The last results, where there is no loss to stand for them."""
        has_loss = any(node.is_loss for node in self._compiled)
        return () if has_loss or not self._compiled else self._compiled[-1].results

    def _read_elsewhere(self) -> set[Tensor]:
        return {t for graph in self._others() for t in graph._feeds.tensors}

    def _wanted(self) -> frozenset[Tensor]:
        """Inputs that are results of linked graphs and can have a gradient, and parameters that those update."""
        made = {t for graph in self._others() for node in graph._compiled for t in node.results}
        handed = (t for t in self._feeds.tensors if t in made and t.data_type.is_floating)
        return frozenset(handed) | frozenset(self._owned_elsewhere())

    def _exchanges(self) -> bool:
        """Whether gradients go from this graph to a linked one, or come from there."""
        if len(self._linked) == 1:
            return False
        made = {t for node in self._compiled for t in node.results}
        return bool(self._wanted() or made & self._read_elsewhere())

    def _settings(self) -> dict[str, Any]:
        """How the graph was compiled, to compile it the same way again."""
        return {"compute_type": self._compute_type, "tf32": self._tf32, "memory_limit": self._memory_limit}

    def memory_plan_for(self, batch_size: int) -> MemoryPlan:
        """What a step would need with so many rows; nothing is run or kept.

        Example:
            >>> training.memory_plan_for(256).total  # doctest: +SKIP
            48234496
        """
        self._require_compiled("memory_plan_for")
        planned = self._new_programs(self._programs.channels_last)
        return planned.plan_for("step", self._batch_size(batch_size))

    def _require_fit(self, plan: MemoryPlan, part: str, batch: int) -> None:
        """Refuses a plan that needs more than the limit, and tells which batch would fit."""
        limit, needed = self._memory_limit, plan.total
        if limit is None or needed <= limit:
            return
        rows = "" if batch == self._feeds.batch else f" (batch_size={batch})"
        where = f"{type(self).__name__}.{self._call or 'execute'}{rows}"
        for_good = f"{needed - plan.intermediates:,} bytes of parameters, statistics and optimizer state"
        if part != "step":
            fewer = "use fewer rows, or raise the limit"
            whole = "run whole steps with execute, which computes results again, or raise the limit"
            raise MemoryLimitError(
                where,
                f"'{part}' needs {needed:,} bytes, the limit is {limit:,}",
                for_good=for_good,
                fix=whole if part in PASSES else fewer,
            )
        if self._call == "add_outputs":
            raise MemoryLimitError(
                where,
                f"with these outputs the step needs {needed:,} bytes, the limit is {limit:,}",
                for_good=for_good,
                fix="declare fewer outputs, or raise the limit",
            )
        largest = largest_batch(self._needed, batch, needed, limit)
        raise MemoryLimitError(
            where,
            f"the step needs {needed:,} bytes, also when it computes again what it can; the limit is {limit:,}",
            for_good=for_good,
            fix=f"use a batch of at most {largest}" if largest else "no batch fits: raise the limit",
        )

    def _needed(self, batch: int) -> int | None:
        """Bytes of the step for another batch size; None where the graph cannot run with it."""
        try:
            return self.memory_plan_for(batch).total
        except StepgraphError:
            return None

    def _step(self, batch: int, training: bool) -> Step:
        plain = super()._step(batch, training)
        if not training:
            return plain
        return replace(
            plain,
            training=True,
            trainable=self._trainable(),
            wanted=self._wanted(),
            optimizer=self._optimizer,
            seeded=self._seeded(),
            starts=frozenset(self._terminal()) - {*self._user_gradients, *self._read_elsewhere()},
            shared=self._handed_back() & {*self._trainable()},
            stopped=self._stop,
            all_gradients=GraphCompilationOptions.COMPUTE_ALL_GRADIENTS in self._options,
        )


def require_tensor(where: str, given: Any) -> None:
    """Refuses what is no tensor."""
    if not isinstance(given, Tensor):
        raise DataTypeError(where, f"{type(given).__name__} is not a Tensor", fix="pass a Tensor of this graph")


def checked(optimizer: Optimizer) -> Optimizer:
    """The optimizer, if it is one."""
    if not isinstance(optimizer, Optimizer) or not optimizer.rule:
        raise DataTypeError(
            "TrainingGraph", f"the optimizer is {type(optimizer).__name__}", fix="use SGDOptimizer or AdamOptimizer"
        )
    return optimizer
