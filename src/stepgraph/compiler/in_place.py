"""Operators that may write where their source was: it is not needed again, and nothing else sees its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.modules import Module
from stepgraph.compiler.phases import Part, storage

aten = torch.ops.aten


def _threshold_backward(g: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    return aten.threshold_backward.grad_input(g, x, threshold, grad_input=g)


# Adding one is an entry here: the operator, and the one that writes into its first argument.
IN_PLACE: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.threshold_backward.default: _threshold_backward,
}


def in_place(part: Part) -> Part:
    """The part with less memory for the same numbers."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.module.graph, {}))
    last: dict[int | None, int] = {}
    order = {node: time for time, node in enumerate(graph.nodes)}
    for node, time in order.items():
        last |= dict.fromkeys((one for source in node.all_input_nodes for one in memory.storages(source)), time)
    given = {one for node in order if node.op == "placeholder" for one in memory.storages(node)}
    for node, time in order.items():
        source = node.args[0] if node.target in IN_PLACE else None
        dies = isinstance(source, fx.Node) and storage(source) not in given and last[storage(source)] == time
        if dies and isinstance(source, fx.Node) and _fits(node, source):
            node.target = IN_PLACE[node.target]
            node.meta["in_place"] = True
    return replace(part, module=Module(part.module, graph))


def out_of_place(graph: fx.Graph) -> None:
    """The operators as they were before: who rewrites a graph knows those, and a compiler plans its own memory."""
    plain = {changing: operator for operator, changing in IN_PLACE.items()}
    for node in graph.nodes:
        if node.meta.get("in_place"):
            node.target = plain[node.target]


def _fits(node: fx.Node, source: fx.Node) -> bool:
    """Whether the result is as large as the source's memory, and laid out like it."""
    result, array = node.meta["val"], source.meta["val"]
    others = [one for one in node.all_input_nodes if one is not source]
    if not isinstance(array, torch.Tensor) or any(storage(one) == storage(source) for one in others):
        return False
    same = (result.shape, result.stride(), result.dtype) == (array.shape, array.stride(), array.dtype)
    return same and result.untyped_storage().nbytes() == array.untyped_storage().nbytes()
