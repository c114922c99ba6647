"""A compiled training graph as plain values: layers, where gradients stop, the memory plan of a step."""

from __future__ import annotations

from typing import Any

from stepgraph import draw
from stepgraph.compiler import memory
from stepgraph.compiler.step import Step
from stepgraph.graphs.training import TrainingGraph
from stepgraph.layers.node import Node
from stepgraph.tensors.tensor import Tensor

HOLDERS = 40


def graph(training: TrainingGraph) -> dict[str, Any]:
    """Every node with what it reads, produces and learns; gradients that stop, and why; the drawing."""
    compiled = training.require_session("report").compilation
    nodes, feeds = compiled.nodes, compiled.feeds
    batch = compiled.usual_batch
    step = compiled.step(batch, True)
    names = draw.parameter_names(nodes)
    makers = {tensor: names[node.layer] for node in nodes for tensor in node.results}
    called = {t: name for _, name, t in feeds}
    every = {t for node in nodes for t in (*node.arguments, *node.results)}
    return {
        "nodes": [_node(node, step, names, {**called, **makers}) for node in nodes],
        "batch": batch,
        "gradients": _stops(nodes, step, names),
        "drawing": draw.svg(nodes, every - step.active, called),
    }


def plan(training: TrainingGraph) -> dict[str, Any]:
    """The memory plan: its totals, live bytes by kind at each operator, and what is alive at the peak."""
    compiled = training.require_session("report").compilation
    programs, batch = compiled.programs, compiled.usual_batch
    part = programs.executable(compiled.whole, batch).part
    live = memory.timeline(part)
    totals = [sum(kinds.values()) for _, _, kinds in live]
    peak = max(range(len(totals)), key=totals.__getitem__, default=None)
    found = programs.plans[compiled.whole, batch]
    kinds = ("activations", "gradients", "workspace")
    return {
        "plan": {
            "parameters": found.parameters,
            "optimizer state": found.optimizer_state,
            "statistics": found.statistics,
            "activations": found.activations,
            "gradients": found.gradients,
            "workspace": found.workspace,
            "total": found.total,
        },
        "timeline": [[layer, phase, *(live.get(kind, 0) for kind in kinds)] for layer, phase, live in live],
        "peak": peak,
        "alive": [] if peak is None else [list(row) for row in memory.holders(part, peak)[:HOLDERS]],
    }


def _node(node: Node, step: Step, names: dict[Any, str], origins: dict[Tensor, str]) -> dict[str, Any]:
    trained, seen = set(step.trainable), set(step.differentiated(node))
    return {
        "layer": names[node.layer],
        "kind": draw.kind(node.layer),
        "line": node.line,
        "loss": node.is_loss,
        "frozen": node.is_frozen,
        "sources": [{**_tensor(t, step), "from": origins.get(t, t.label)} for t in node.arguments],
        "results": [_tensor(t, step) for t in node.results],
        "parameters": [
            {**_tensor(t, step), "name": names[t], "trained": t in trained and t in seen}
            for t in node.layer.parameters.values()
        ],
        "statistics": [_tensor(t, step) for t in node.layer.statistics.values()],
    }


def _tensor(tensor: Tensor, step: Step) -> dict[str, Any]:
    descriptor = tensor.descriptor.at(step.batch[1])
    return {
        "shape": list(descriptor.shape),
        "type": str(tensor.data_type.torch).removeprefix("torch."),
        "bytes": descriptor.tensor_allocation_size_in_bytes,
    }


def _stops(nodes: tuple[Node, ...], step: Step, names: dict[Any, str]) -> list[list[str]]:
    """Layer, what gets no gradient, and the first reason that applies."""
    found = []
    for node in nodes:
        layer = names[node.layer]
        for tensor in node.layer.parameters.values():
            if node.disable_update:
                found.append([layer, names[tensor], "the layer is frozen: disable_update"])
            elif tensor in node.frozen:
                found.append([layer, names[tensor], "frozen in this graph: it was imported so"])
            elif tensor not in step.trainable_set:
                found.append([layer, names[tensor], "not updated by this graph: is_updatable is off"])
        if any(t in step.stopped for t in node.results):
            found.append([layer, "its result", "stopped explicitly: stop_gradient"])
        elif not any(t.data_type.is_floating for t in node.results):
            found.append([layer, "its result", f"{node.results[0].data_type.name.lower()} has no derivative"])
        elif not any(t in step.active for t in node.results):
            found.append([layer, "its result", "it depends on nothing that is trained"])
    return found
