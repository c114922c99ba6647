"""Graphs as DOT text, for Graphviz."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from stepgraph.draw.names import extents, flows, kind, unique_names
from stepgraph.errors import readable
from stepgraph.tensors.tensor import Tensor

if TYPE_CHECKING:
    from stepgraph.layers.node import Node


def dot(nodes: Sequence[Node], stopped: Collection[Tensor] = ()) -> str:
    """DOT text with every node; an edge is dashed if no gradient flows back along it."""
    names = unique_names(node.layer for node in nodes)
    made_by = {tensor: index for index, node in enumerate(nodes) for tensor in node.results}
    lines = ["digraph stepgraph {", "  node [style=filled, shape=box];"]
    for tensor in dict.fromkeys(t for node in nodes for t in node.arguments if t not in made_by):
        lines.append(f'  t{tensor.tensor_id} [label="{_quoted(tensor.label)}\\n{extents(tensor)}", shape=ellipse];')
    for index, node in enumerate(nodes):
        lines.append(
            f'  n{index} [label="{_quoted(names[node.layer])}\\n{kind(node.layer)}\\n{extents(node.results[0])}"];'
        )
    for index, node in enumerate(nodes):
        for tensor in node.arguments:
            origin = f"n{made_by[tensor]}" if tensor in made_by else f"t{tensor.tensor_id}"
            style = "solid" if flows(tensor, node, stopped) else "dashed"
            lines.append(f"  {origin} -> n{index} [style={style}];")
    return "\n".join([*lines, "}", ""])


def _quoted(label: str) -> str:
    return readable(label).replace("\\", "\\\\").replace('"', '\\"')
