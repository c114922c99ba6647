"""Graphs: layers wired by tensors. Building is symbolic; training and inference graphs compile what was built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import RenderableType

from stepgraph import draw
from stepgraph.device import Device
from stepgraph.errors import (
    ArgumentError,
    DataError,
    DataTypeError,
    StateError,
    UnknownNameError,
    shown_as,
    user_line,
)
from stepgraph.layers import state
from stepgraph.layers.constant import ConstantLayer
from stepgraph.layers.functions import LayerFunctions
from stepgraph.layers.indexing import GatherLayer, ScatterLayer, SelectionLayer
from stepgraph.layers.layer import Layer, join
from stepgraph.layers.node import Node
from stepgraph.layers.products import MatMulDescriptor, MatMulLayer
from stepgraph.layers.shape import ConcatenationLayer, ReshapeLayer, SplitLayer, TransposeLayer
from stepgraph.system import surroundings
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors import buffers
from stepgraph.tensors.extents import BATCH, BatchExtent
from stepgraph.tensors.tensor import Operand, Tensor, TensorDescriptor, constant_tensor, require_device, row_count
from stepgraph.types import DataType, ReductionType

BIND = "bind_and_write_data"
NOT_KEPT = "no call has kept it; a whole call keeps what add_outputs declares"


class Graph(LayerFunctions):
    """A list of nodes in the order they were added.

    `graph.node(layer, x)` wires any layer. Functions such as `graph.dense(x, 128)` and `graph.relu(x)` create the layer
    as well, and operators on results (`x + y`, `2 * x`, `x @ y`, `-x`, `x.reshape(…)`) wire arithmetic. Numbers
    and arrays become constants.

    Example:
        >>> graph = Graph()
        >>> x = graph.node(ActivationLayer.relu(), Tensor((2, 3)))
        >>> (2 * graph.dense(x, 5) + 1).shape
        (2, 5)
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._first: dict[Layer, Node] = {}  # the first node of each layer
        self._made: set[Tensor] = set()  # the results of its nodes
        self._origin: dict[str, Tensor] = {}
        self.device: Device | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, in order."""
        return tuple(self._nodes)

    @property
    def layers(self) -> list[Layer]:
        """Every layer once, in the order of its first node."""
        return list(dict.fromkeys(node.layer for node in self.nodes))

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self._first)

    @property
    def origin(self) -> Mapping[str, Tensor]:
        """The names that the tensors of an imported model had there; empty for a graph wired by hand."""
        return dict(self._origin)

    def set_origin(self, names: Mapping[str, Tensor]) -> None:
        """Sets the names under which the tensors of an imported model leave; tied ones have several."""
        self._origin = dict(names)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and statistics by the names that `state_dict` uses."""
        return state.named(draw.unique_names(self.layers), self.origin)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The current parameters and statistics by name, as a PyTorch module's `state_dict`.

        Names are `layer.field`, as tables show the layer; those of an imported model are the model's own. A tensor that
        several layers share appears under each name. Arrays are shared with the graph, not copied.

        Example:
            >>> graph = Graph()
            >>> y = graph.dense(Tensor((4, 3)), 2, label="head")
            >>> {name: tuple(array.shape) for name, array in graph.state_dict().items()}
            {'head.weights': (2, 3), 'head.biases': (2,)}
        """
        return state.values(self.named_tensors())

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> state.IncompatibleKeys:
        """Writes parameters and statistics by name; compiled graphs use them from their next call on.

        Nothing changes unless everything fits. Shapes and types must match. One name of a shared tensor is enough.

        Args:
            state_dict: arrays by name.
            strict: whether names that only one side has are an error; otherwise they are returned.
        """
        found = state.load(f"{type(self).__name__}.load_state_dict", self.named_tensors(), state_dict, strict)
        self.write_state(found)
        return state.IncompatibleKeys(list(found.missing), list(found.unexpected))

    def write_state(self, found: state.Match) -> None:
        """Writes values that were checked."""
        with surroundings.tracing(), Uninterrupted():
            found.write()

    @property
    def summarized_dot_description(self) -> str:
        """DOT text of the graph: every node, with dashed edges where gradients stop."""
        return draw.dot(self.shown_nodes(), self.stopped)

    @property
    def stopped(self) -> frozenset[Tensor]:
        """Tensors that pass no gradient back."""
        return frozenset()

    def shown_nodes(self) -> tuple[Node, ...]:
        """The nodes to display."""
        return self.nodes

    def node(
        self,
        layer: Layer,
        *sources: Tensor | Sequence[Tensor],
        disable_update: bool = False,
        loss_labels: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Adds a node and returns its first result; `result_tensors(layer)` has them all.

        Args:
            layer: what to compute; several nodes can use the same layer and share its parameters, in this graph and in
                others.
            sources: its sources, in the layer's order.
            disable_update: freeze this layer's parameters; gradients still flow through it.
            loss_labels: for a loss layer, the labels to compare with, or `[labels, label weights]`.
        """
        line = user_line()
        given = _tensors(
            layer, [one for source in sources for one in (source if isinstance(source, list | tuple) else [source])]
        )
        labels = _tensors(
            layer, [] if loss_labels is None else [loss_labels] if isinstance(loss_labels, Tensor) else loss_labels
        )
        with layer.completed([tensor.descriptor for tensor in given]):
            self._check_frozen(layer, disable_update)
            with shown_as(layer.label, lambda: self._next_name(layer)):
                made = make_node(layer, given, labels, disable_update, line)
            join(layer, self, self.layer_count + 1)
            self.append(made)
        return made.results[0]

    def known_node(
        self,
        layer: Layer,
        sources: Sequence[Tensor],
        results: Sequence[TensorDescriptor],
        *,
        disable_update: bool,
        frozen: frozenset[Tensor],
    ) -> tuple[Tensor, ...]:
        """Adds a node whose results are known, so that the layer need not run for their shapes. Returns its results."""
        made = replace(new_node(layer, sources, (), results, disable_update, user_line()), frozen=frozen)
        join(layer, self, self.layer_count + 1)
        self.append(made)
        return made.results

    def wire(self, layer: Layer, *sources: Operand, loss_labels: Tensor | None = None) -> Any:
        """Adds a node as `node` does, with numbers and arrays as constants; several results are returned as a tuple."""
        like = next((source for source in sources if isinstance(source, Tensor)), None)
        if like is None and sources:
            problem = f"its source is {type(sources[0]).__name__}, not a Tensor"
            raise DataTypeError(layer.where, problem, fix="pass a Tensor")
        kind, count = None if like is None else like.data_type, len(self._nodes)
        try:
            tensors = [source if isinstance(source, Tensor) else self.constant(source, kind) for source in sources]
            self.node(layer, *tensors, loss_labels=loss_labels)
        except BaseException:
            self._cut(count)
            raise
        results = self._nodes[-1].results
        return results[0] if len(results) == 1 else results

    def _cut(self, count: int) -> None:
        """Removes the nodes of new layers after the first `count`: constants of a node that could not be wired."""
        for node in self._nodes[count:]:
            self._first.pop(node.layer, None)
            self._made.difference_update(node.results)
        del self._nodes[count:]

    def constant(self, values: Any, data_type: DataType | torch.dtype | str | None = None) -> Tensor:
        """Numbers or an array as a result that never changes.

        Args:
            values: a number, nested numbers or an array; a number has shape `[1]`.
            data_type: element type; by default that of the array, and float32 for floating-point numbers.
        """
        kind = None if data_type is None else DataType.of(data_type)
        return self.node(ConstantLayer(constant_tensor(values, kind)))

    def sequence(self, x: Tensor, *layers: Layer) -> Any:
        """Wires layers one after the other; each takes the first result of the one before.

        Returns:
            The result of the last layer, or all of its results as a tuple.

        Example:
            >>> graph = Graph()
            >>> layers = FullyConnectedLayer.create(8), ActivationLayer.relu(), FullyConnectedLayer.create(2)
            >>> graph.sequence(Tensor((4, 3)), *layers).shape
            (4, 2)
        """
        result: Any = x
        for layer in layers:
            result = self.wire(layer, result[0] if isinstance(result, tuple) else result)
        return result

    def matmul(
        self,
        x: Operand,
        y: Operand,
        *,
        alpha: float = 1.0,
        transposes_x: bool = False,
        transposes_y: bool = False,
        label: str = "",
    ) -> Tensor:
        """`MatMulLayer`: the matrix product `alpha x y`, with either of them transposed if asked."""
        descriptor = MatMulDescriptor(alpha, transposes_x, transposes_y)
        found: Tensor = self.wire(MatMulLayer(descriptor, label=label), x, y)
        return found

    def split(
        self,
        source: Tensor,
        split_count: int | None = None,
        split_section_lengths: Sequence[int] | None = None,
        *,
        dimension: int,
    ) -> list[Tensor]:
        """Splits `source` along `dimension` into `split_count` equal parts, or into parts of the given lengths."""
        lengths = None if split_section_lengths is None else tuple(split_section_lengths)
        layer = SplitLayer(split_count, lengths, dimension=dimension)
        self.node(layer, source)
        return self.result_tensors(layer)

    def concatenate(self, sources: Sequence[Tensor], dimension: int = 1) -> Tensor:
        """Concatenates `sources` along `dimension`."""
        layer = ConcatenationLayer(dimension)
        if not isinstance(sources, list | tuple):
            raise DataTypeError(
                layer.where, f"the sources are a {type(sources).__name__}", fix="pass a list of tensors"
            )
        return self.node(layer, *sources)

    def reshape(self, shape: Sequence[int], source: Tensor) -> Tensor:
        """Gives `source` another shape; one dimension may be -1, and `BATCH` first keeps the rows of `source`."""
        extents = _sequence("reshape", shape)
        if extents[:1] == (BATCH,) and isinstance(source, Tensor) and not source.descriptor.is_open:
            extents = (source.shape[0], *extents[1:])
        return self.node(ReshapeLayer(extents), source)

    def transpose(self, dimensions: Sequence[int], source: Tensor) -> Tensor:
        """Reorders the axes: axis `k` of the result is axis `dimensions[k]` of `source`."""
        return self.node(TransposeLayer(_sequence("transpose", dimensions)), source)

    def select(self, sources: Sequence[Tensor], condition: Tensor) -> Tensor:
        """`sources[0]` where `condition` holds, else `sources[1]`."""
        return self.node(SelectionLayer(), condition, *sources)

    def gather(self, dimension: int, source: Tensor, indices: Tensor) -> Tensor:
        """Gathers from `source` along `dimension`."""
        return self.node(GatherLayer(dimension), source, indices)

    def scatter(
        self,
        dimension: int,
        source: Tensor,
        indices: Tensor,
        copy_from: Tensor,
        reduction_type: ReductionType = ReductionType.NONE,
    ) -> Tensor:
        """A copy of `copy_from` with `source` written (`NONE`) or added (`SUM`) at `indices` along `dimension`."""
        return self.node(ScatterLayer(dimension, reduction_type), source, indices, copy_from)

    def source_tensors(self, layer: Layer) -> list[Tensor]:
        """The sources of the layer's nodes, in order; empty for a layer of another graph."""
        return [tensor for node in self.shown_nodes() if node.layer is layer for tensor in node.sources]

    def result_tensors(self, layer: Layer) -> list[Tensor]:
        """The results of the layer's nodes, in order; empty for a layer of another graph."""
        return [tensor for node in self.shown_nodes() if node.layer is layer for tensor in node.results]

    def bind_and_write_data(
        self,
        data: Mapping[str, Any],
        for_inputs: Mapping[str, Tensor],
        device: Device,
        *,
        batch_size: int | None = None,
        synchronous: bool = True,
    ) -> None:
        """Makes the caller's memory the data of inputs, labels or user gradients, and writes it to the device.

        For running phase by phase. Reads `batch_size` rows, by default as many as each tensor declares; of a
        tensor whose first dimension is not the batch, all rows, as `execute` does. Keep the memory alive
        and unchanged until the phase that reads it has run.
        """
        self._bind(data, for_inputs, device, batch_size)

    def _bind(
        self, data: Any, for_inputs: Any, device: Any, batch_size: int | None, exact: bool = False, where: str = BIND
    ) -> None:
        """Binds data; with `exact`, not to tensors with fewer rows."""
        for given in (data, for_inputs):
            if not isinstance(given, Mapping):
                kind = type(given).__name__
                raise DataTypeError(where, f"{kind} is not a dictionary", fix='pass {"name": array}, {"name": tensor}')
        require_device(device, where)
        if batch_size is not None and (
            isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0
        ):
            raise ArgumentError(where, f"batch_size is {batch_size!r}", fix="pass an integer number of rows, or None")
        for name in data:
            if name not in for_inputs:
                known = sorted(for_inputs)
                raise UnknownNameError(where, f"'{name}' is not among the inputs {known}", fix="name it in for_inputs")
            if not isinstance(for_inputs[name], Tensor):
                kind = type(for_inputs[name]).__name__
                raise DataTypeError(where, f"'{name}' is {kind}, not a Tensor", fix="pass a Tensor")
        arrays = {}
        for name, values in data.items():
            tensor = for_inputs[name]
            shape = self._shape_of(tensor, values, batch_size)
            title = f"Tensor '{tensor.label}' ('{name}')"
            arrays[tensor] = buffers.read(values, shape, tensor.data_type, title, exact)
        for tensor, array in arrays.items():  # nothing is bound unless everything fits
            tensor.bind(array, device)

    def __rich__(self) -> RenderableType:
        return draw.table(self.nodes, f"{type(self).__name__}")

    def __str__(self) -> str:
        return draw.text(self.__rich__())

    def _repr_svg_(self) -> str:
        return draw.svg(self.nodes, self.stopped)

    def _repr_html_(self) -> str:
        return draw.graph_html(type(self).__name__, self._repr_svg_(), self.nodes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {len(self.nodes)} nodes>"

    def _is_batched(self, tensor: Tensor) -> bool:
        """Whether a tensor's first dimension is the batch size; always true for a graph that is not compiled."""
        return True

    def _shape_of(self, tensor: Tensor, values: Any, batch_size: int | None) -> tuple[int, ...]:
        """The shape of the data to bind to a tensor."""
        first = tensor.shape[0]
        if isinstance(first, BatchExtent):
            rows = batch_size or first.rows(row_count(values, tensor))
            if rows is None:
                problem = f"the data has {row_count(values, tensor)} rows, but the tensor has {first}"
                raise DataError(tensor.where, problem, fix="pass data with a fitting number of rows")
            return tensor.descriptor.at(rows).shape
        return (batch_size, *tensor.shape[1:]) if batch_size and self._is_batched(tensor) else tensor.shape

    def append(self, node: Node) -> None:
        """Adds an existing node."""
        self._nodes.append(node)
        self._first.setdefault(node.layer, node)
        self._made.update(node.results)
        for result in node.results:
            result.join(self)

    def makes(self, tensor: Tensor) -> bool:
        """Whether a tensor is the result of one of the graph's own nodes."""
        return tensor in self._made

    def _next_name(self, layer: Layer) -> str:
        """The name that tables would show for a layer that is about to be added."""
        return draw.unique_names((*self._first, layer))[layer]

    def _check_frozen(self, layer: Layer, disable_update: bool) -> None:
        """Checks that all nodes of one layer are frozen or none, by comparing with the first."""
        node = self._first.get(layer)
        if node is not None and layer.parameters and node.disable_update != disable_update:
            raise StateError(
                layer.where,
                f"disable_update={disable_update} here, but {node.disable_update} for its node at {node.line}",
                fix="use the same disable_update for both nodes of the layer",
            )


def make_node(
    layer: Layer, sources: Sequence[Tensor], labels: Sequence[Tensor], disable_update: bool, line: str
) -> Node:
    """A node with new result tensors of inferred shapes."""
    weights = getattr(layer, "weights", None) if layer.is_loss else None
    compared = (*labels, *([weights] if isinstance(weights, Tensor) and weights not in labels else []))
    found = layer.infer(*(tensor.descriptor for tensor in (*sources, *compared)))
    return new_node(layer, sources, compared, found, disable_update, line)


def new_node(
    layer: Layer,
    sources: Sequence[Tensor],
    labels: Sequence[Tensor],
    found: Iterable[TensorDescriptor],
    disable_update: bool,
    line: str,
) -> Node:
    """A node with new result tensors of these shapes."""
    results = tuple(Tensor(descriptor) for descriptor in found)
    for result in results:
        result.hold(None, NOT_KEPT)
    frozen = layer.frozen_tensors
    return Node(layer, tuple(sources), results, tuple(labels), disable_update, line, layer.is_loss, frozen)


def _sequence(where: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise DataTypeError(where, f"{given!r} is not a sequence of numbers", fix="pass a tuple, then the source")
    return tuple(given)


def _tensors(layer: Layer, given: Any) -> list[Tensor]:
    if not isinstance(layer, Layer):
        raise DataTypeError("node", f"{type(layer).__name__} is not a layer", fix="pass a Layer, then its sources")
    given = list(given) if isinstance(given, list | tuple) else [given]
    for one in given:
        if not isinstance(one, Tensor):
            raise DataTypeError(
                layer.where, f"a source is {type(one).__name__}, not a Tensor", fix="pass Tensor objects"
            )
    return list(given)
