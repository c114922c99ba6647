"""Graphs and tables as HTML for notebooks: self-contained, in the colors of the surrounding page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from stepgraph.draw.tables import COLUMNS, rows
from stepgraph.errors import readable, readable_lines

if TYPE_CHECKING:
    from stepgraph.layers.node import Node

_STYLE = "\n".join(
    [
        ".stepgraph-view{display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start;color:inherit}",
        ".stepgraph-view>.drawing{max-height:40em;overflow:auto;flex:0 1 auto;min-width:12em}",
        ".stepgraph-view>.facts{flex:1 1 24em;min-width:0;overflow-x:auto}",
        ".stepgraph-view h4{margin:0 0 .5em;font-size:1em}",
        ".stepgraph-view pre{color:inherit;background:none;font-size:.85em;line-height:1.35;white-space:pre-wrap}",
        ".stepgraph-table{border-collapse:collapse;font-size:.85em;font-variant-numeric:tabular-nums}",
        ".stepgraph-table th,.stepgraph-table td{padding:.2em .8em .2em 0;text-align:left;border:0;background:none}",
        ".stepgraph-table .number{text-align:right}",
        ".stepgraph-table thead th{border-bottom:1px solid currentColor}",
        ".stepgraph-table tr.last td{border-top:1px solid currentColor}",
        ".stepgraph-table tr.best td{font-weight:600}",
    ]
)


def graph_html(title: str, drawing: str, nodes: Sequence[Node], *texts: str) -> str:
    """A graph for a notebook: its drawing next to its table and other texts.

    Args:
        title: its heading.
        drawing: SVG, as returned by `svg`.
        nodes: what the table lists.
        texts: shown below, line by line.
    """
    listed = html_table(COLUMNS, rows(nodes), words=COLUMNS[:-1], last_is_sum=True)
    below = "".join(f"<pre>{escape(readable_lines(text))}</pre>" for text in texts)
    facts = f'<div class="facts"><h4>{escape(readable(title))}</h4>{listed}{below}</div>'
    return styled(f'<div class="drawing">{drawing}</div>{facts}')


def styled(content: str) -> str:
    """HTML with its own style."""
    return f'<div class="stepgraph-view"><style>{_STYLE}</style>{content}</div>'


def html_table(
    columns: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    words: Sequence[str] = (),
    last_is_sum: bool = False,
    best: int | None = None,
) -> str:
    """A table; columns hold numbers except those named in `words`, and row `best` is highlighted."""
    kinds = ["" if column in words else ' class="number"' for column in columns]
    head = "".join(f"<th{kind}>{escape(readable(column))}</th>" for column, kind in zip(columns, kinds, strict=True))
    body = []
    for index, line in enumerate(lines):
        marks = {"last": last_is_sum and index == len(lines) - 1, "best": index == best}
        mark = "".join(f' class="{name}"' for name, holds in marks.items() if holds)
        cells = "".join(f"<td{kind}>{escape(readable(cell))}</td>" for cell, kind in zip(line, kinds, strict=True))
        body.append(f"<tr{mark}>{cells}</tr>")
    return f'<table class="stepgraph-table"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
