"""Graphs as pictures: SVG, generated without any other program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from stepgraph.draw.names import extents, flows, kind, unique_names, variant
from stepgraph.draw.placement import Edge, Placement, layered, spread
from stepgraph.errors import readable
from stepgraph.tensors.tensor import Tensor

if TYPE_CHECKING:
    from stepgraph.layers.layer import Layer
    from stepgraph.layers.node import Node

_HEIGHT, _ROW, _MARGIN = 40, 78, 12
_LONGEST = 26  # characters of a name that are shown

# Hues by the module a layer comes from; a page may set the variables (--stepgraph-weights, …) to its own.
_HUES = {
    "weights": "#4477c4",
    "activation": "#2f9e5f",
    "normalization": "#8e5bbf",
    "memory": "#c77a1e",
    "pooling": "#1f97a3",
    "loss": "#cf4a4a",
    "shape": "#7d8590",
    "input": "#7d8590",
    "own": "#b3538c",
}
_FAMILIES = {
    "weights": ("convolution", "linear", "feed_forward", "products"),
    "activation": ("activation", "softmax", "dropout"),
    "normalization": ("normalization", "layer_normalization"),
    "memory": ("attention", "recurrent", "gru", "embedding"),
    "pooling": ("pooling", "global_pooling", "reduction", "upsample"),
    "loss": ("loss", "yolo"),
    "shape": ("shape", "indexing", "padding", "arithmetic", "comparison"),
}
_FAMILY = {f"stepgraph.layers.{module}": family for family, modules in _FAMILIES.items() for module in modules}

# Classes could affect elements outside the picture, so every rule starts with its own. Colors are repeated as
# attributes for programs that do not support variables.
_STYLE = "\n".join(
    [
        ".stepgraph-drawing{color:var(--stepgraph-text,inherit);max-width:100%;height:auto;"
        'font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}',
        ".stepgraph-drawing text{fill:currentColor;text-anchor:middle}",
        ".stepgraph-drawing .name{font-weight:600}",
        ".stepgraph-drawing .facts{font-size:10.5px;opacity:.75}",
        ".stepgraph-drawing .edge{fill:none;stroke:currentColor;stroke-opacity:.5;stroke-width:1.2}",
        ".stepgraph-drawing .stopped{stroke-dasharray:4 4}",
        ".stepgraph-drawing .node rect,.stepgraph-drawing .input rect{fill-opacity:.16;stroke-width:1.2}",
        *(
            f".stepgraph-drawing .{family} rect{{fill:var(--stepgraph-{family},{hue});"
            f"stroke:var(--stepgraph-{family},{hue})}}"
            for family, hue in _HUES.items()
        ),
    ]
)


@dataclass(frozen=True)
class _Box:
    name: str
    facts: str
    family: str
    title: str

    @property
    def is_input(self) -> bool:
        return self.family == "input"

    @property
    def width(self) -> float:
        """Room for both lines; characters of common fonts are narrower than this."""
        return max(72.0, 7.2 * len(_shortened(self.name)), 6.0 * len(_shortened(self.facts, 40))) + 20


def svg(nodes: Sequence[Node], stopped: Collection[Tensor] = (), names: Mapping[Tensor, str] | None = None) -> str:
    """A self-contained picture of the graph, top to bottom: no script, no font, no network.

    A node is `<g class="node" data-layer="NAME">` with the name that `unique_names` gives its layer, made readable;
    an edge is `<path class="edge">`, dashed and also of class `stopped` if no gradient flows back along it. Tensors
    from outside have round ends. Colors distinguish kinds of layers, and text has the color of the surrounding page.

    Args:
        nodes: what to draw.
        stopped: tensors that pass no gradient back.
        names: the names of tensors from outside; by default, their labels.
    """
    outside = list(dict.fromkeys(t for node in nodes for t in _sources(node)))
    made_by = {tensor: index for index, node in enumerate(nodes) for tensor in node.results}
    outside = [tensor for tensor in outside if tensor not in made_by]
    index_of = {**made_by, **{tensor: len(nodes) + i for i, tensor in enumerate(outside)}}
    boxes = [*_node_boxes(nodes), *(_input_box(tensor, names or {}) for tensor in outside)]
    edges = dict.fromkeys(
        Edge(index_of[tensor], index, not flows(tensor, node, stopped))
        for index, node in enumerate(nodes)
        for tensor in _sources(node)
    )
    placement = layered([box.width for box in boxes], list(edges), [box.is_input for box in boxes])
    return "\n".join(_drawn(boxes, list(edges), placement))


def _sources(node: Node) -> list[Tensor]:
    """What a node reads, without its layer's own parameters."""
    own = set(node.layer.parameters.values())
    return [tensor for tensor in node.arguments if tensor not in own]


def _node_boxes(nodes: Sequence[Node]) -> Iterator[_Box]:
    names = {layer: readable(name) for layer, name in unique_names(node.layer for node in nodes).items()}
    for node in nodes:
        layer, shape = node.layer, ", ".join(map(extents, node.results))
        described = f"{kind(layer)} {variant(layer)}".rstrip()
        facts = [
            f"{names[layer]}: {type(layer).__name__} {variant(layer)}".rstrip(),
            *(f"source {extents(tensor)}" for tensor in node.sources),
            f"result {shape}",
            *([f"{layer.parameter_count:,} parameters"] if layer.parameter_count else []),
            *(["frozen"] if node.disable_update or node.is_frozen else []),
            *([f"{node.frozen_count:,} of them frozen"] if node.frozen_count and not node.is_frozen else []),
            *([readable(node.line)] if node.line else []),
        ]
        yield _Box(names[layer], f"{described} · {shape}", family(layer), "\n".join(facts))


def _input_box(tensor: Tensor, names: Mapping[Tensor, str]) -> _Box:
    name = readable(names.get(tensor) or tensor.label or f"tensor {tensor.tensor_id}")
    data_type = tensor.data_type.name.lower()
    return _Box(name, extents(tensor), "input", f"{name}: {data_type} {extents(tensor)}")


def family(layer: Layer) -> str:
    """The color class of a layer: the kind of work it does; `own` for layers from outside the library."""
    return _FAMILY.get(type(layer).__module__, "own")


def _drawn(boxes: list[_Box], edges: list[Edge], placement: Placement) -> Iterator[str]:
    right = max((x + box.width / 2 for x, box in zip(placement.x, boxes, strict=False)), default=0)
    width = max(right, max(placement.x, default=0)) + 2 * _MARGIN
    height = _ROW * len(placement.rows) - (_ROW - _HEIGHT) * bool(placement.rows) + 2 * _MARGIN
    count = sum(not box.is_input for box in boxes)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stepgraph-drawing" role="img" aria-label="Graph of {count} '
        f'nodes" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" '
        f'font-family="sans-serif" font-size="12">'
    )
    yield f"<style>{_STYLE}</style>"
    yield f'<g transform="translate({_MARGIN} {_MARGIN})">'
    yield from _paths(boxes, edges, placement)
    for box, x, rank in zip(boxes, placement.x, placement.rank, strict=False):
        yield _box(box, x - box.width / 2, rank * _ROW)
    yield "</g>\n</svg>\n"


def _box(box: _Box, left: float, top: float) -> str:
    hue, middle = _HUES[box.family], left + box.width / 2
    tag = f'class="input" data-input="{_xml(box.name)}"'
    if not box.is_input:
        tag = f'class="node {box.family}" data-layer="{_xml(box.name)}"'
    return (
        f'<g {tag}><title>{_xml(box.title)}</title><rect x="{left:.1f}" y="{top}" width="{box.width:.1f}" '
        f'height="{_HEIGHT}" rx="{_HEIGHT // 2 if box.is_input else 5}" fill="{hue}" fill-opacity=".16" '
        f'stroke="{hue}"/><text class="name" text-anchor="middle" x="{middle:.1f}" y="{top + 17}">'
        f'{_xml(_shortened(box.name))}</text><text class="facts" text-anchor="middle" x="{middle:.1f}" '
        f'y="{top + 31}">{_xml(_shortened(box.facts, 40))}</text></g>'
    )


def _paths(boxes: list[_Box], edges: list[Edge], placement: Placement) -> Iterator[str]:
    """Edges from bottom to top of boxes. A path shared by several edges is drawn once, with the longest of them."""
    arriving: dict[int, list[Edge]] = {}
    for edge in edges:
        arriving.setdefault(edge.target, []).append(edge)
    ports: dict[Edge, float] = {}
    for target, some in arriving.items():
        some.sort(key=lambda edge: placement.x[_last(edge, placement)])
        room = boxes[target].width / 2 - 12
        low, high = placement.x[target] - room, placement.x[target] + room
        wants = [min(max(placement.x[_last(edge, placement)], low), high) for edge in some]
        weights = [1e-3 if placement.bends[edge] else 1.0 for edge in some]
        gap = min(16.0, 2 * room / len(some))
        for edge, port in zip(some, spread(wants, weights, [gap] * (len(some) - 1)), strict=True):
            ports[edge] = min(max(port, low), high)
    drawn: set[int] = set()
    for edge in sorted(edges, key=lambda edge: -len(placement.bends[edge])):
        bends = placement.bends[edge]
        fresh = [bend for bend in bends if bend not in drawn]
        drawn.update(fresh)
        old = bends[: len(bends) - len(fresh)]
        start = old[-1] if old else edge.origin
        points = [(placement.x[start], placement.rank[start] * _ROW + _HEIGHT)]
        for bend in fresh:
            top = placement.rank[bend] * _ROW
            points += [(placement.x[bend], top), (placement.x[bend], top + _HEIGHT)]
        points.append((ports[edge], placement.rank[edge.target] * _ROW))
        named = f'data-from="{_xml(boxes[edge.origin].name)}" data-to="{_xml(boxes[edge.target].name)}"'
        dashed = ' stroke-dasharray="4 4"' if edge.stopped else ""
        yield (
            f'<path class="edge{" stopped" if edge.stopped else ""}" {named} fill="none" stroke="currentColor" '
            f'stroke-opacity=".5"{dashed} d="{_curve(points)}"/>'
        )


def _last(edge: Edge, placement: Placement) -> int:
    """The last point before the target of an edge."""
    return placement.bends[edge][-1] if placement.bends[edge] else edge.origin


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Vertical at every point, with an arrow at the end."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y}"]
    for right, down in rest:
        middle = (y + down) / 2
        straight = abs(right - x) < 0.5
        parts.append(f"V{down}" if straight else f"C{x:.1f} {middle:.0f} {right:.1f} {middle:.0f} {right:.1f} {down}")
        x, y = (x if straight else right), down
    return "".join([*parts, f"M{x - 3.5:.1f} {y - 6}L{x:.1f} {y - 0.5}L{x + 3.5:.1f} {y - 6}"])


def _shortened(text: str, longest: int = _LONGEST) -> str:
    """One line; if it is too long, its end is kept because that is where names differ."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 9]}…{text[-8:]}"


def _xml(text: str) -> str:
    """Text for SVG: quoted, without characters that XML does not allow."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text))
