"""Graphs as JSON: tensors, layers, nodes in order, names for data, losses, optimizers, trained tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from stepgraph.checkpoint.codec import Decoder, Encoder, class_name, described_extent, of_kind, read_extent, unique
from stepgraph.checkpoint.kept import Kept
from stepgraph.compiler.settings import Settings
from stepgraph.compiler.step import KeyKind
from stepgraph.draw import unique_names
from stepgraph.errors import CheckpointError
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer, OptimizerDescriptor, ParameterGroup
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.state import Progress
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType


def layers_of(graphs: Iterable[Declaration]) -> list[Layer]:
    """Every layer of the graphs once, a training graph's loss layer after its nodes."""
    found: dict[Layer, None] = {}
    for graph in graphs:
        found |= dict.fromkeys(node.layer for node in graph.wired)
        found |= {} if graph.loss_layer is None else {graph.loss_layer: None}
    return list(found)


def named_tensors(graphs: Sequence[Declaration]) -> dict[str, Tensor]:
    """The tensors that are restored by name: `layer.field` for tensors of layers, `input.name` for trained inputs."""
    names: dict[Tensor, str] = {}
    for layer, name in unique_names(layers_of(graphs)).items():
        for field, tensor in layer.given_tensors.items():
            names.setdefault(tensor, f"{name}.{field}")
    for graph in graphs:
        called = {tensor: name for _, name, tensor in graph.feeds}
        for tensor in graph.parameters:
            names.setdefault(tensor, f"input.{called.get(tensor, tensor.label)}")
    found: dict[str, Tensor] = {}
    for tensor, name in names.items():
        found[unique(name, found)] = tensor
    return found


class Describer:
    """Describes graphs, with the arrays they hold."""

    def __init__(self, graphs: Sequence[Kept]) -> None:
        self.graphs, self.encoder = graphs, Encoder()
        self.declared = [graph.declaration for graph in graphs]
        self.optimizers: dict[Optimizer, int] = {}

    def describe(self) -> dict[str, Any]:
        """Everything about the graphs that a file stores."""
        graphs = [self._graph(graph) for graph in self.graphs]
        tensors = self._tensors()
        for graph, described in zip(self.graphs, graphs, strict=True):
            described["progress"] = self._progress(graph)
        return {
            "tensors": tensors,
            "layers": self.encoder.described,
            "optimizers": [self._optimizer(optimizer) for optimizer in self.optimizers],
            "graphs": graphs,
        }

    def _graph(self, graph: Kept) -> dict[str, Any]:
        encoder, declared = self.encoder, graph.declaration
        loss, optimizer, feeds = declared.loss_layer, declared.optimizer, declared.feeds
        found: dict[str, Any] = {
            "class": "TrainingGraph" if declared.trains else "InferenceGraph",
            "adopted": [[self._node(node) for node in nodes] for nodes in declared.adopted],
            "nodes": [self._node(node) for node in declared.own],
            "loss_layer": None if loss is None else encoder.layer(loss),
            "optimizer": None if optimizer is None else self.optimizers.setdefault(optimizer, len(self.optimizers)),
            "average": declared.average,
            "inputs": self._names(feeds.inputs),
            "loss_labels": self._names(feeds.labels),
            "loss_label_weights": self._names(feeds.weights),
            "outputs": {name: self._output(graph, tensor) for name, tensor in declared.outputs.items()},
            "constants": [encoder.tensor(tensor) for tensor in graph.constants],
        }
        if graph.origin:
            found["origin"] = self._names(graph.origin)
        if declared.named_only:
            found["named_only"] = [name for name, one in declared.outputs.items() if one in declared.named_only]
        stopped = sorted(declared.stopped, key=lambda tensor: tensor.tensor_id)
        for name, tensors in (
            ("stopped", stopped),
            ("parameters", declared.parameters),
            ("user_gradients", declared.user_gradients),
        ):
            found[name] = [encoder.tensor(tensor) for tensor in tensors]
        return {**found, "compiled": _compilation(graph.settings)}

    def _node(self, node: Node) -> dict[str, Any]:
        tensor = self.encoder.tensor
        frozen = sorted(node.frozen, key=lambda one: one.tensor_id)
        return {
            "layer": self.encoder.layer(node.layer),
            "sources": [tensor(one) for one in node.sources],
            "labels": [tensor(one) for one in node.labels],
            "results": [tensor(one) for one in node.results],
            "disable_update": node.disable_update,
            **({} if node.frozen == node.layer.frozen_tensors else {"frozen": [tensor(one) for one in frozen]}),
            "line": node.line,
        }

    def _names(self, names: Mapping[str, Tensor]) -> dict[str, int]:
        return {name: self.encoder.tensor(tensor) for name, tensor in names.items()}

    def _output(self, graph: Kept, tensor: Tensor) -> dict[str, Any]:
        """An output: a result, a gradient of a tensor, or one node's contribution to it."""
        nodes, wired = graph.declaration.nodes, graph.declaration.wired
        key = next((key for key, handle in graph.handles.items() if handle is tensor), None)
        if key is not None and key.kind == KeyKind.GRADIENT:
            return {"gradient": self.encoder.tensor(key.owner)}
        if key is not None:
            return {"source_gradient": [nodes.index(key.owner), key.position]}
        made = next((i for i, node in enumerate(nodes) if tensor in node.results), None)
        if made is not None and made == len(wired):
            return {"loss_result": nodes[made].results.index(tensor)}
        return {"tensor": self.encoder.tensor(tensor)}

    def _tensors(self) -> list[dict[str, Any]]:
        names = {tensor: name for name, tensor in named_tensors(self.declared).items()}
        held = {tensor: array for graph in self.graphs for tensor, array in graph.constants.items()}
        trained = {tensor for graph in self.declared for tensor in graph.parameters}
        fed = {tensor for graph in self.declared for _, _, tensor in graph.feeds} - trained
        made = {tensor for graph in self.declared for node in graph.wired for tensor in node.results}
        found = []
        for tensor in self.encoder.tensors:
            described = {"label": tensor.label, **_descriptor(tensor.descriptor)}
            described |= {} if tensor.is_updatable else {"is_updatable": False}
            described |= {"name": names[tensor]} if tensor in names else {}
            # Data bound to an input belongs to a call; data an input was created with belongs to the graph.
            is_bound = tensor in fed and tensor.is_bound
            if tensor in held or (tensor.has_data and tensor not in made and not is_bound):
                array = held[tensor] if tensor in held else tensor.array()
                described["data"] = self.encoder.array(names.get(tensor, f"input.{tensor.label}"), array)
            found.append(described)
        return found

    def _optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        settings = {
            name: self._selectors(value, optimizer) if name in optimizer.selecting else self.encoder.value(value)
            for name, value in optimizer.settings.items()
        }
        found = {"class": class_name(type(optimizer)), "rule": optimizer.rule, "settings": settings}
        groups = [self._group(group, optimizer) for group in optimizer.groups]
        return {**found, "groups": groups} if groups else found

    def _group(self, group: ParameterGroup, optimizer: Optimizer) -> dict[str, Any]:
        settings = {name: self.encoder.value(value) for name, value in group.settings.items()}
        return {"parameters": self._selectors(group.parameters, optimizer), "settings": settings}

    def _selectors(self, selectors: Iterable[Any], optimizer: Optimizer) -> list[Any]:
        """Patterns as they are; what functions select is written down tensor by tensor."""
        names: dict[Tensor, tuple[str, ...]] = {}
        for graph in (one for one in self.declared if one.optimizer is optimizer):
            names |= graph.parameter_names
        found: list[Any] = []
        for one in selectors:
            chosen = [one] if not callable(one) else [t for t in names if ParameterGroup(one).selects(t, names[t])]
            found += [self.encoder.value(selector) for selector in chosen]
        return found

    def _progress(self, graph: Kept) -> dict[str, Any]:
        number, array, progress = self.encoder.tensors, self.encoder.array, graph.progress
        declared = graph.declaration
        names = {tensor: name for name, tensor in named_tensors(self.declared).items()}
        buffers = {
            str(number[tensor]): [
                array(f"{names[tensor]}@{slot}", one) for slot, one in zip(declared.slots(tensor), arrays, strict=True)
            ]
            for tensor, arrays in progress.buffers.items()
            if tensor in names and len(arrays) == len(declared.slots(tensor))
        }
        gradients = {
            str(number[tensor]): array(f"{names[tensor]}@gradient", one)
            for tensor, one in progress.gradients.items()
            if tensor in names
        }
        averages = {
            str(number[tensor]): array(f"{names[tensor]}@average", one)
            for tensor, one in progress.averages.items()
            if tensor in names
        }
        return {
            "stream": progress.stream,
            "loss_scale": progress.scale,
            "time_step": progress.time_step,
            "buffers": buffers,
            "gradients": gradients,
            "averages": averages,
        }


def _compilation(settings: Settings | None) -> dict[str, Any] | None:
    if settings is None:
        return None
    mixed = settings.compute_type
    return {
        "options": int(settings.options),
        "compute_type": None if mixed is None else str(DataType.of(mixed)),
        "tf32": settings.tf32,
        "memory_limit": settings.memory_limit,
    }


def _descriptor(descriptor: TensorDescriptor) -> dict[str, Any]:
    shape = [described_extent(extent) for extent in descriptor.shape]
    found: dict[str, Any] = {"shape": shape, "data_type": descriptor.data_type.debug_description}
    if descriptor.sequence_lengths is not None:
        found["sequence_lengths"] = list(descriptor.sequence_lengths)
        found["sorted_sequences"] = descriptor.sorted_sequences
    return found


def read_tensor(described: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> Tensor:
    """The described tensor, with its data."""
    data = read_array(described, arrays) if "data" in described else None
    tensor = Tensor(read_descriptor(described), data=data, label=of_kind(str, described["label"]))
    tensor.is_updatable = of_kind(bool, described.get("is_updatable", True))
    return tensor


def read_array(described: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The array of a described tensor."""
    array, wanted = arrays[described["data"]], read_descriptor(described)
    if tuple(array.shape) != wanted.shape or array.dtype != wanted.data_type.torch:
        raise ValueError(f"the array {described['data']} is {list(array.shape)} {array.dtype}, not {wanted}")
    return array


def read_descriptor(described: Mapping[str, Any]) -> TensorDescriptor:
    """Shape and type of a described tensor."""
    settings = {f.name: described[f.name] for f in fields(TensorDescriptor) if f.name in described}
    return TensorDescriptor(**{**settings, "shape": tuple(map(read_extent, settings["shape"]))})


def read_optimizer(described: Mapping[str, Any], decoder: Decoder) -> Optimizer:
    """The described optimizer: shared settings through the descriptor, its own by keyword."""
    kind: Any = decoder.kind(described["class"], Optimizer)
    settings = {name: decoder.value(value) for name, value in described["settings"].items()}
    shared = {one.name: settings[one.name] for one in fields(OptimizerDescriptor)}
    own = {name: value for name, value in settings.items() if name in kind.accepted() and name not in shared}
    for name in kind.selecting:
        own[name] = [one for one in own[name] if one is not None]
    if described.get("groups"):
        own["groups"] = [read_group(one, decoder) for one in described["groups"]]
    optimizer = kind(OptimizerDescriptor.exact(**shared), **own)
    optimizer.time_step = settings["time_step"]
    optimizer.numbers()  # raises if one of them is not a number
    if optimizer.rule != described["rule"]:
        raise CheckpointError(
            decoder.where,
            f"the optimizer {described['class']} is now '{optimizer.rule}', but was '{described['rule']}'",
            fix="use the version of the class that was saved",
        )
    return optimizer


def read_group(described: Mapping[str, Any], decoder: Decoder) -> ParameterGroup:
    """The described group, with the selectors that exist."""
    selectors = [decoder.value(one) for one in of_kind(list, described["parameters"])]
    settings = {of_kind(str, name): decoder.value(value) for name, value in described["settings"].items()}
    return ParameterGroup([one for one in selectors if one is not None], **settings)


def read_progress(described: Mapping[str, Any], tensors: Mapping[int, Tensor], arrays: Mapping[str, Any]) -> Progress:
    """The described progress, for the tensors that exist."""
    stream, scale, time_step = described["stream"], described["loss_scale"], described["time_step"]
    buffers = {int(number): keys for number, keys in described["buffers"].items()}
    gradients = {int(number): key for number, key in described["gradients"].items()}
    # Checkpoints of earlier versions have no averages.
    averages = {int(number): key for number, key in described.get("averages", {}).items()}
    return Progress(
        stream=None if stream is None else [_count(one) for one in _pair(stream)],
        scale=None if scale is None else [of_kind(float, one) for one in _pair(scale)],
        time_step=None if time_step is None else _count(time_step),
        buffers={tensors[n]: tuple(arrays[key] for key in keys) for n, keys in buffers.items() if n in tensors},
        gradients={tensors[n]: arrays[key] for n, key in gradients.items() if n in tensors},
        averages={tensors[n]: arrays[key] for n, key in averages.items() if n in tensors},
    )


def read_notes(description: Mapping[str, Any]) -> dict[str, Any]:
    """The notes of the saving program."""
    return of_kind(dict, description["notes"])


def _pair(given: Any) -> list[Any]:
    if len(of_kind(list, given)) != 2:
        raise ValueError(f"{given!r:.100} instead of 2 numbers")
    return given


def _count(given: Any) -> int:
    """An integer that every array represents exactly."""
    if not 0 <= of_kind(int, given) < 2**63:
        raise ValueError(f"{given} is outside 0 to 2⁶³")
    return given
