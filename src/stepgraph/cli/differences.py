"""Runs one batch through a saved graph on several devices and measures the differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from stepgraph import draw
from stepgraph.checkpoint.graph_json import layers_of, named_tensors
from stepgraph.cli.batch import Batch, feeds
from stepgraph.compiler.step import KeyKind
from stepgraph.device import Device
from stepgraph.errors import ArgumentError
from stepgraph.graphs.compiled import CompiledGraph
from stepgraph.graphs.inference import InferenceGraph
from stepgraph.graphs.training import TrainingGraph
from stepgraph.interop.difference import Difference, largest_of
from stepgraph.interop.module import Prediction
from stepgraph.interop.onnx_check import layer_values
from stepgraph.interop.onnx_names import result_names
from stepgraph.layers.node import Node
from stepgraph.tensors.extents import shape_at
from stepgraph.tensors.tensor import Tensor


class What(NamedTuple):
    """One array to compare: a layer's result, or the gradient of a layer's parameter."""

    kind: str
    name: str
    layer: str


Numbers = dict[What, torch.Tensor]
_Kind = TypeVar("_Kind", bound=CompiledGraph)


def differences(reference: Numbers, other: Numbers) -> dict[What, Difference]:
    """The differences between all arrays of two runs.

    The scale of a result is its own largest number. The scale of a gradient is the largest gradient of its layer: that
    of a bias before a normalization is zero except for rounding, and would be compared with its own noise.
    """
    by_layer: dict[str, float] = {}
    for what, array in reference.items():
        if what.kind == "gradient":
            by_layer[what.layer] = max(largest_of(array), by_layer.get(what.layer, 0.0))
    return {
        what: Difference.between(array, other[what], by_layer[what.layer] if what.kind == "gradient" else None)
        for what, array in reference.items()
    }


def run(graphs: Sequence[CompiledGraph], batch: Batch, rows: int, seed: int) -> Numbers:
    """Results of all layers in the order of the forward pass, then gradients of all parameters, last layers first."""
    training = [graph for graph in graphs if isinstance(graph, TrainingGraph)]
    if training:
        return _trained(training, batch, rows, seed)
    found: Numbers = {}
    for graph in _in_order(graphs):
        assert isinstance(graph, InferenceGraph)
        _infer(graph, batch, rows)
        found |= _results(graphs, graph)
    return found


def prediction(graphs: Sequence[CompiledGraph]) -> Prediction:
    """What a loaded inference graph computes, which an ONNX file should compute as well."""
    if len(graphs) > 1:
        problem = f"the checkpoint holds {len(graphs)} linked graphs, and an ONNX file one"
        raise ArgumentError("compare", problem, fix="compare without the ONNX file")
    (graph,) = graphs
    assert isinstance(graph, InferenceGraph)
    return graph.prediction("compare")


def run_onnx(asked: Prediction, batch: Batch, path: Path) -> Numbers:
    """Results of the layers that have operators in an ONNX file."""
    data = {name: torch.as_tensor(batch[name]) for name in asked.inputs}
    found, names = layer_values(asked, path, data), _result_names(asked.nodes)
    if not found:
        problem = "it has no values named after the layers of this graph"
        raise ArgumentError(f"{path}", problem, fix="write it with inference.save_onnx, from this graph")
    return {names[tensor]: found[tensor] for tensor in names if tensor in found}


def _trained(graphs: Sequence[TrainingGraph], batch: Batch, rows: int, seed: int) -> Numbers:
    """Results and gradients of compiled training graphs."""
    found: Numbers = {}
    ordered, device = _in_order(graphs), graphs[0].device
    assert device is not None
    for _, name, tensor in feeds(graphs):
        taken = rows if graphs[0].declaration.feeds.is_batched(tensor) else None
        graphs[0].bind_and_write_data({name: batch[name]}, {name: tensor}, device, batch_size=taken)
    for graph in ordered:
        _start_gradients(graph, device, rows, seed)
        graph.execute_forward(rows).wait()
        found |= _results(graphs, graph)
    for graph in reversed(ordered):
        _walk_back(graph, rows)
    return found | _gradients(graphs)


def _infer(graph: InferenceGraph, batch: Batch, rows: int) -> None:
    """Runs an inference graph so that every result stays readable."""
    made = [tensor for node in graph.shown_nodes() for tensor in node.results]
    graph.add_outputs({f"result {index}": tensor for index, tensor in enumerate(made)})
    given: dict[str, Batch] = {"input": {}, "loss label": {}, "loss label weight": {}}
    for kind, name, _ in feeds([graph]):
        given[kind] |= {name: batch[name]} if name in batch else {}
    graph.execute(*given.values(), batch_size=rows).wait()


def _start_gradients(graph: TrainingGraph, device: Device, rows: int, seed: int) -> None:
    """Without a loss, uses random gradients from outside. A single final number serves as a loss."""
    generator, compiled = np.random.default_rng(seed + 1), graph.compilation
    assert compiled is not None
    for tensor in compiled.terminal:
        if (
            tensor.data_type.is_floating
            and tensor.descriptor.element_count > 1
            and tensor not in compiled.read_elsewhere
        ):
            shape = shape_at(tensor.shape, graph.declaration.feeds.batch, rows)
            numbers = torch.from_numpy(generator.standard_normal(shape)).to(tensor.data_type.torch)
            graph.allocate_user_gradient(tensor).bind(numbers, device)


def _walk_back(graph: TrainingGraph, rows: int) -> None:
    """Runs the gradient pass; in float16, with a loss scale at which nothing overflows, as training would find."""
    graph.execute_gradient(rows).wait()
    while not all(array.isfinite().all() for array in graph.gradients.found.values()):
        if graph.loss_scale is None or graph.loss_scale <= 1:
            return
        graph.loss_scale /= 2
        graph.execute_gradient(rows).wait()


def _in_order(graphs: Sequence[_Kind]) -> list[_Kind]:
    """Linked graphs, each after those whose results it reads."""
    made = {graph: {t for node in graph.shown_nodes() for t in node.results} for graph in graphs}
    ordered: list[_Kind] = []
    waiting = list(graphs)
    while waiting:
        ready = [
            g
            for g in waiting
            if not any(made[other] & set(g.declaration.feeds.tensors) for other in waiting if other is not g)
        ]
        ordered += ready or waiting
        waiting = [graph for graph in waiting if graph not in ordered]
    return ordered


def _results(graphs: Sequence[CompiledGraph], graph: CompiledGraph) -> Numbers:
    """Every result of one graph, by the name of its layer."""
    mine = {tensor for node in graph.shown_nodes() for tensor in node.results}
    names = _result_names([node for one in graphs for node in one.shown_nodes()])
    return {what: tensor.torch().detach().cpu() for tensor, what in names.items() if tensor in mine}


def _result_names(nodes: Sequence[Node]) -> dict[Tensor, What]:
    """The layer of each result, with a number if it has several."""
    layers = draw.unique_names(node.layer for node in nodes)
    named = result_names(nodes)
    return {t: What("result", named[t], layers[node.layer]) for node in nodes for t in node.results}


def _gradients(graphs: Sequence[TrainingGraph]) -> Numbers:
    """The gradients of parameters; linked graphs that share one each have a part of it."""
    found: dict[Tensor, torch.Tensor] = {}
    for graph in graphs:
        for key, array in graph.gradients.found.items():
            if key.kind == KeyKind.GRADIENT:
                found[key.owner] = found[key.owner] + array if key.owner in found else array
    declared = [graph.declaration for graph in graphs]
    layers = draw.unique_names(layers_of(declared))
    owners = {tensor: name for layer, name in layers.items() for tensor in layer.parameters.values()}
    named = [(name, tensor) for name, tensor in named_tensors(declared).items() if tensor in found]
    return {
        What("gradient", name, owners.get(tensor, name)): found[tensor].detach().cpu()
        for name, tensor in reversed(named)
    }
