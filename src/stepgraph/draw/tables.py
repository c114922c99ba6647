"""Graphs as readable tables, and other text output."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from stepgraph.draw.names import extents, kind, unique_names
from stepgraph.errors import readable, readable_lines

if TYPE_CHECKING:
    from stepgraph.layers.layer import Layer
    from stepgraph.layers.node import Node


COLUMNS = ("layer", "kind", "sources", "result", "parameters")


class Listing(Table):
    """A table that shows text literally: labels and names are neither markup nor terminal commands."""

    def add_column(self, header: RenderableType = "", *further: Any, **settings: Any) -> None:
        """Adds a column, as `Table` does."""
        super().add_column(_shown(header), *further, **settings)

    def add_row(self, *cells: RenderableType | None, **settings: Any) -> None:
        """Adds a row, as `Table` does."""
        super().add_row(*(None if cell is None else _shown(cell) for cell in cells), **settings)


def _shown(cell: RenderableType) -> RenderableType:
    return Text(readable(cell)) if isinstance(cell, str) else cell


def table(nodes: Sequence[Node], title: str) -> Table:
    """One row per node: layer, kind, sources, results, parameters."""
    drawn = Listing(*COLUMNS[:-1], title=title, title_justify="left", show_edge=False, pad_edge=False)
    drawn.add_column(COLUMNS[-1], justify="right")
    *each, total = rows(nodes)
    for row in each:
        drawn.add_row(*row)
    drawn.add_section()
    drawn.add_row(*total)
    return drawn


def rows(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    """The rows of `table`, the total last."""
    names = unique_names(node.layer for node in nodes)
    counted: set[Layer] = set()
    found = []
    for node in nodes:
        sources = ", ".join(extents(tensor) for tensor in node.sources)
        results = ", ".join(extents(tensor) for tensor in node.results)
        parameters = _parameters(node, node.layer in counted)
        found.append((names[node.layer], kind(node.layer), sources, results, parameters))
        counted.add(node.layer)
    distinct = {tensor for node in nodes for tensor in node.layer.parameters.values()}
    total = sum(tensor.descriptor.element_count for tensor in distinct)
    return [*found, (f"{len(nodes)} nodes", "", "", "", f"{total:,}")]


def _parameters(node: Node, is_counted: bool) -> str:
    if not node.layer.parameter_count:
        return ""
    if is_counted:
        return "shared"
    some = f" ({node.frozen_count:,} frozen)" if node.frozen_count else ""
    return f"{node.layer.parameter_count:,}{' frozen' if node.is_frozen else some}"


def text(*parts: RenderableType, width: int = 112) -> str:
    """What rich would print, as plain text without terminal commands."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    for part in parts:
        console.print(lines(part) if isinstance(part, str) else part)
    return "\n".join(readable(line.rstrip()) for line in file.getvalue().rstrip().split("\n"))


def lines(shown: str) -> Text:
    """Text of several lines, for rich, shown literally."""
    return Text(readable_lines(shown))


def size(count: float) -> str:
    """Bytes in readable form.

    Example:
        >>> size(1536)
        '1.50 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
