"""How a graph looks: a table for people, DOT text for Graphviz. Works on anything with nodes; knows no graph class."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from stepgraph.tensor import Tensor

if TYPE_CHECKING:
    from stepgraph.graph import Node
    from stepgraph.layer import Layer


def unique_names(layers: Iterable[Layer]) -> dict[Layer, str]:
    """A name for each layer: its label, numbered where several layers share it."""
    ordered = list(dict.fromkeys(layers))
    labels = [layer.label for layer in ordered]
    taken: dict[str, int] = {}
    names = {}
    for layer in ordered:
        taken[layer.label] = taken.get(layer.label, 0) + 1
        names[layer] = layer.label if labels.count(layer.label) == 1 else f"{layer.label}{taken[layer.label]}"
    return names


def parameter_names(nodes: Sequence[Node]) -> dict[Any, str]:
    """Names of layers, and of their parameters as `layer.field`."""
    layers = unique_names(node.layer for node in nodes)
    tensors = {t: f"{name}.{field}" for layer, name in layers.items() for field, t in layer.parameters.items()}
    return {**layers, **tensors}


def table(nodes: Sequence[Node], title: str) -> Table:
    """One row a node: layer, kind, sources, results, parameters."""
    drawn = Table(
        "layer", "kind", "sources", "result", title=title, title_justify="left", show_edge=False, pad_edge=False
    )
    drawn.add_column("parameters", justify="right")
    names = unique_names(node.layer for node in nodes)
    counted: set[Layer] = set()
    for node in nodes:
        kind = type(node.layer).__name__.removesuffix("Layer")
        sources = ", ".join(_extents(tensor) for tensor in node.sources)
        results = ", ".join(_extents(tensor) for tensor in node.results)
        drawn.add_row(names[node.layer], kind, sources, results, _parameters(node, node.layer in counted))
        counted.add(node.layer)
    distinct = {tensor for node in nodes for tensor in node.layer.parameters.values()}
    total = sum(tensor.descriptor.element_count for tensor in distinct)
    drawn.add_section()
    drawn.add_row(f"{len(nodes)} nodes", "", "", "", f"{total:,}")
    return drawn


def _parameters(node: Node, is_counted: bool) -> str:
    if not node.layer.parameter_count:
        return ""
    frozen = " frozen" if node.disable_update else ""
    return "shared" if is_counted else f"{node.layer.parameter_count:,}{frozen}"


def dot(nodes: Sequence[Node], stopped: Collection[Tensor] = ()) -> str:
    """DOT text with every node; an edge is dashed where no gradient flows back along it."""
    names = unique_names(node.layer for node in nodes)
    made_by = {tensor: index for index, node in enumerate(nodes) for tensor in node.results}
    lines = ["digraph stepgraph {", "  node [style=filled, shape=box];"]
    for tensor in dict.fromkeys(t for node in nodes for t in node.arguments if t not in made_by):
        lines.append(f'  t{tensor.tensor_id} [label="{_quoted(tensor.label)}\\n{_extents(tensor)}", shape=ellipse];')
    for index, node in enumerate(nodes):
        kind, shape = type(node.layer).__name__.removesuffix("Layer"), _extents(node.results[0])
        lines.append(f'  n{index} [label="{_quoted(names[node.layer])}\\n{kind}\\n{shape}"];')
    for index, node in enumerate(nodes):
        for tensor in node.arguments:
            origin = f"n{made_by[tensor]}" if tensor in made_by else f"t{tensor.tensor_id}"
            flows = tensor not in stopped and tensor.data_type.is_floating and tensor not in node.labels
            lines.append(f"  {origin} -> n{index} [style={'solid' if flows else 'dashed'}];")
    return "\n".join([*lines, "}", ""])


def text(*parts: RenderableType, width: int = 112) -> str:
    """What rich would print, as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())  # type: ignore[attr-defined]


def size(count: float) -> str:
    """Bytes, readable.

    Example:
        >>> size(1536)
        '1.50 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _extents(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))


def _quoted(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"')
