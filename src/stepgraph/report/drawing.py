"""Admits only the shapes and text of a drawing into a page: a run folder may come from someone else."""

from __future__ import annotations

from xml.etree import ElementTree

from stepgraph.errors import readable, readable_lines

SPACE = "http://www.w3.org/2000/svg"
_SHAPES = {"svg", "g", "rect", "circle", "ellipse", "line", "polyline", "polygon", "path", "text", "tspan", "title"}
_SHAPES |= {"desc", "defs", "marker"}
_SETTINGS = {"class", "id", "d", "x", "y", "x1", "y1", "x2", "y2", "dx", "dy", "cx", "cy", "r", "rx", "ry", "points"}
_SETTINGS |= {"width", "height", "viewBox", "transform", "preserveAspectRatio", "refX", "refY", "orient", "role"}
_SETTINGS |= {"markerWidth", "markerHeight", "markerUnits", "marker-end", "fill", "stroke", "stroke-width", "opacity"}
_SETTINGS |= {"stroke-dasharray", "stroke-linecap", "stroke-linejoin", "text-anchor", "dominant-baseline", "font-size"}
_SETTINGS |= {"font-weight", "font-family", "fill-opacity", "stroke-opacity", "aria-label"}
_SETTINGS |= {"data-layer", "data-input", "data-from", "data-to"}


def harmless(drawing: str) -> str:
    """The drawing without anything that could run, load, link or restyle the page; empty if it is not SVG."""
    try:
        root = ElementTree.fromstring(drawing)
    except (ElementTree.ParseError, UnicodeEncodeError):
        return ""
    if root.tag != f"{{{SPACE}}}svg":
        return ""
    _clean(root)
    ElementTree.register_namespace("", SPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    for name, value in list(element.attrib.items()):
        leads_away = "url(" in value and not value.startswith("url(#")
        if name not in _SETTINGS or leads_away:
            del element.attrib[name]
        else:
            element.attrib[name] = readable(value)
    element.text = None if element.text is None else readable_lines(element.text)
    for child in list(element):
        tag = child.tag if isinstance(child.tag, str) else ""
        if tag.removeprefix(f"{{{SPACE}}}") in _SHAPES and tag.startswith(f"{{{SPACE}}}"):
            _clean(child)
        else:
            element.remove(child)  # with the text after it: shapes have none
