"""Whole graphs in a file: saved with everything they hold, loaded by a program that did not build them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stepgraph.checkpoint import files
from stepgraph.checkpoint.codec import Decoder, Numbered, by_name, of_kind
from stepgraph.checkpoint.graph_json import read_optimizer, read_progress, read_tensor
from stepgraph.checkpoint.restoring import check_buffers, understood
from stepgraph.compiler.settings import SWITCHES, Settings, chosen, limited, mixed, switched
from stepgraph.compiler.step import gradient, source_gradient
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, CheckpointError, DataTypeError, DeviceError, MemoryLimitError
from stepgraph.graph import NOT_KEPT, Graph, make_node
from stepgraph.graphs.compiled import CompiledGraph
from stepgraph.graphs.inference import InferenceGraph
from stepgraph.graphs.training import TrainingGraph
from stepgraph.layers.layer import join
from stepgraph.optimizers import Optimizer
from stepgraph.tensors.tensor import Tensor, TensorParameter
from stepgraph.types import DataType, GraphCompilationOptions

_OF_TRAINING = ("memory_limit", "parallel")
_COMPILATION = ("options", "compute_type", "tf32", *_OF_TRAINING, *SWITCHES)


def save(
    path: str | os.PathLike[str],
    graph: CompiledGraph,
    *,
    keep: int | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a training or inference graph to a directory; the same as `graph.save(path)`."""
    if not isinstance(graph, CompiledGraph):
        kind = type(graph).__name__
        raise DataTypeError("save", f"{kind} is not a graph that can be saved", fix="call save(path, training)")
    return graph.save(path, keep=keep, notes=notes)


def load(
    path: str | os.PathLike[str],
    device: Device | str | torch.device | None = None,
    *,
    inference: bool = False,
    custom: Sequence[Any] = (),
    **compilation: Any,
) -> Any:
    """Rebuilds the graph in a checkpoint, with everything it holds, without the program that built it.

    Args:
        path: a checkpoint, or a folder with a series of them, of which the latest is used.
        device: compile for this device with the saved settings; with None, you compile it yourself.
        inference: build an inference graph, without the loss, whatever was saved.
        custom: your own classes that the graph needs (layers, optimizers, their descriptors and enumerations), and
            the PyTorch modules of its `TorchLayer`s: an imported model as a whole, or its modules in order, or
            functions that create them.
        compilation: settings of `compile` (`options` and its keywords, `compute_type`, `tf32`, `memory_limit`,
            `parallel`), which replace all of the saved ones. Without any, the graph is compiled with the saved
            settings, which do not include `parallel`; an inference graph has neither that nor `memory_limit`.

    Example:
        >>> training = load("run/model", Device.any())  # doctest: +SKIP
        >>> training.execute({"image": pictures}, {"label": classes})  # doctest: +SKIP
    """
    _check_request(device, custom, compilation)
    place = None if device is None else chosen("load", device, None)
    content = files.read(files.as_path("load", path))
    with understood(content.path):
        described = content.description["graphs"]
        if device is None and len(described) > 1:
            raise CheckpointError(
                f"{content.path}",
                f"it holds {len(described)} linked graphs, which are linked once they are compiled",
                fix="load(path, device)",
            )
        graphs = _Builder(content, inference, custom).build()
        found = Numbered(graphs)[content.description["saved"]]
        pairs = zip(described, graphs, strict=True)
        settings = [_compilation(one["compiled"], compilation, graph.trains) for one, graph in pairs]
    unused = next((name for name in _OF_TRAINING if name in compilation), None)
    if unused is not None and not all(graph.trains for graph in graphs):
        raise ArgumentError("load", f"an inference graph takes no {unused}", fix="leave it out")
    if place is not None:
        _compile(content, place, graphs, settings)
    return found


def _check_request(device: Any, custom: Sequence[Any], compilation: Mapping[str, Any]) -> None:
    """Rejects invalid arguments, so that any later error is the file's fault."""
    if device is None and compilation:
        raise ArgumentError("load", f"{', '.join(compilation)} needs a device to compile for", fix="pass one")
    for name in compilation:
        if name not in _COMPILATION:
            known = ", ".join(_COMPILATION)
            raise ArgumentError("load", f"{name!r} is not a setting that load accepts", known=known, fix="use those")
    settings = {name: compilation.get(name) for name in ("compute_type", "tf32", *_OF_TRAINING)}
    options = compilation.get("options", GraphCompilationOptions.NONE)
    Settings.checked(options, **settings, **_switches(compilation))
    by_name(custom)


def _switches(compilation: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that stand for option flags."""
    return {name: value for name, value in compilation.items() if name in SWITCHES}


def _compilation(saved: Mapping[str, Any] | None, asked: Mapping[str, Any], trains: bool) -> dict[str, Any]:
    """The settings to compile with: the saved ones or the requested ones; linked graphs stay linked."""
    options = GraphCompilationOptions(0 if saved is None else of_kind(int, saved["options"]))
    if asked:
        given = switched(asked.get("options", GraphCompilationOptions.NONE), _switches(asked))
        others = {name: value for name, value in asked.items() if name not in SWITCHES}
        return {**others, "options": given | (options & GraphCompilationOptions.LINK_GRAPHS)}
    if saved is None:
        return {"options": options}
    precision = None if saved["compute_type"] is None else DataType[saved["compute_type"]]
    mixed(precision)
    # Checkpoints of earlier versions have neither of these; the limit applies to a training step.
    tf32, limit = saved.get("tf32"), limited(saved.get("memory_limit"))
    found = {"options": options, "compute_type": precision, "tf32": None if tf32 is None else of_kind(bool, tf32)}
    return {**found, "memory_limit": limit} if trains else found


def _compile(
    content: files.Content, device: Device, graphs: Sequence[TrainingGraph | InferenceGraph], settings: Sequence[Any]
) -> None:
    """Compiles rebuilt graphs and links them."""
    with _compiled(content.path):
        for graph, asked in zip(graphs, settings, strict=True):
            constants = {f"{tensor.tensor_id}": tensor for tensor in graph.kept().constants}
            graph.compile(device, input_tensors=constants, **asked)
        if len(graphs) > 1:
            graphs[0].link(graphs[1:])  # type: ignore[arg-type]


@contextmanager
def _compiled(path: Path) -> Iterator[None]:
    """Passes on errors about missing hardware; any other error means that the description is invalid."""
    lacking = None
    with understood(path):
        try:
            yield
        except (DeviceError, MemoryLimitError, torch.OutOfMemoryError) as error:
            lacking = error
    if lacking is not None:
        raise lacking


class _Builder:
    """Builds the objects of one file: tensors first, then layers as nodes need them, then graphs."""

    def __init__(self, content: files.Content, inference: bool, custom: Sequence[Any]) -> None:
        description, arrays = content.description, content.arrays
        self.content, self.inference = content, inference
        self.tensors = Numbered(read_tensor(one, arrays) for one in description["tensors"])
        self.decoder = Decoder(f"{content.path}", description["layers"], self.tensors, arrays, custom)
        self.graphs: dict[str, Graph] = {}
        self.optimizers: Numbered[Optimizer] = Numbered()
        if not inference:
            self.optimizers.extend(read_optimizer(one, self.decoder) for one in description["optimizers"])

    def build(self) -> list[TrainingGraph | InferenceGraph]:
        """All graphs of the file."""
        return [self._graph(one) for one in self.content.description["graphs"]]

    def _graph(self, described: Mapping[str, Any]) -> TrainingGraph | InferenceGraph:
        adopted = [self._adopted(nodes) for nodes in described["adopted"]]
        is_training = described["class"] == TrainingGraph.__name__ and not self.inference
        graph = self._training(described, adopted) if is_training else InferenceGraph(adopted)
        self._nodes(graph, described["nodes"])
        read = {tensor for node in graph.nodes for tensor in node.arguments} if self.inference else set(self.tensors)
        constants = [t for t in (self.tensors[number] for number in described["constants"]) if t in read]
        names = [self._names(described[kind], read) for kind in ("inputs", "loss_labels", "loss_label_weights")]
        graph.add_inputs(*names)
        if isinstance(graph, TrainingGraph):
            self._rest(graph, described)
        made = {tensor for node in graph.nodes for tensor in node.results}
        outputs = {name: self._output(graph, one) for name, one in described["outputs"].items()}
        found = {name: t for name, t in outputs.items() if t is not None and (t in made or is_training)}
        graph.add_outputs(found)
        graph.add_outputs({name: found[name] for name in described.get("named_only", ()) if name in found}, kept=False)
        graph.hold_constants(constants)
        graph.set_origin(self._names(described.get("origin", {}), set(self.tensors)))
        return graph

    def _training(self, described: Mapping[str, Any], adopted: Sequence[Graph]) -> TrainingGraph:
        loss, optimizer = described["loss_layer"], described["optimizer"]
        return TrainingGraph(
            adopted,
            None if loss is None else self.decoder.layer(loss),
            None if optimizer is None else self.optimizers[optimizer],
            average=described.get("average"),
        )

    def _adopted(self, nodes: Sequence[Mapping[str, Any]]) -> Graph:
        """A graph of these nodes; linked graphs that adopted the same one share it."""
        key = str([node["results"] for node in nodes])
        if key not in self.graphs:
            self.graphs[key] = self._nodes(Graph(), nodes)
        return self.graphs[key]

    def _nodes(self, graph: Graph, nodes: Sequence[Mapping[str, Any]]) -> Any:
        """Adds nodes; their shapes are inferred again and must match the saved ones."""
        for one in nodes:
            layer = self.decoder.layer(one["layer"])
            if self.inference and layer.is_loss:
                continue
            sources, labels, results = (
                [self.tensors[number] for number in one[kind]] for kind in ("sources", "labels", "results")
            )
            frozen, line = of_kind(bool, one["disable_update"]), of_kind(str, one["line"])
            node = make_node(layer, sources, labels, frozen, line)
            if "frozen" in one:
                node = replace(node, frozen=frozenset(self.tensors[number] for number in of_kind(list, one["frozen"])))
            if [t.descriptor for t in node.results] != [t.descriptor for t in results]:
                raise CheckpointError(
                    f"{self.content.path}",
                    f"{layer.label} returns {node.results}, but returned {results} when it was saved",
                    fix="use the version of the class that was saved",
                )
            for saved in results:
                saved.hold(None, NOT_KEPT)
            join(layer, graph, layer.layer_id)
            graph.append(replace(node, results=tuple(results)))
        return graph

    def _names(self, names: Mapping[str, int], read: set[Tensor]) -> dict[str, Tensor]:
        return {name: self.tensors[number] for name, number in names.items() if self.tensors[number] in read}

    def _rest(self, graph: TrainingGraph, described: Mapping[str, Any]) -> None:
        """What only a training graph has."""
        graph.set_training_tensor_parameters([TensorParameter(self.tensors[i]) for i in described["parameters"]])
        graph.stop_gradient([self.tensors[number] for number in described["stopped"]])
        for number in described["user_gradients"]:
            graph.allocate_user_gradient(self.tensors[number])
        progress = read_progress(described["progress"], dict(enumerate(self.tensors)), self.content.arrays)
        optimizer = graph.optimizer
        if optimizer is not None:
            progress.time_version = optimizer.time_version
        check_buffers(f"{self.content.path}", progress, graph.declaration)
        graph.resume(progress)

    def _output(self, graph: TrainingGraph | InferenceGraph, described: Mapping[str, Any]) -> Tensor | None:
        if "tensor" in described:
            return self.tensors[described["tensor"]]
        if not isinstance(graph, TrainingGraph):
            return None
        if "gradient" in described:
            tensor = self.tensors[described["gradient"]]
            return graph.gradients.handle(gradient(tensor), tensor)
        nodes = Numbered(graph.declaration.with_loss().nodes)
        if "loss_result" in described:
            return Numbered(nodes[len(nodes) - 1].results)[described["loss_result"]]
        node, position = described["source_gradient"]
        return graph.gradients.handle(source_gradient(nodes[node], position), Numbered(nodes[node].sources)[position])
