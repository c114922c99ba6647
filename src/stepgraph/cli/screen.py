"""Output: tables on a terminal, the same as long plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from stepgraph import draw
from stepgraph.errors import OBEYED, readable
from stepgraph.system.storage import plain

_UNLIMITED = 10_000


def show(*parts: Any) -> None:
    """Prints parts one below another, untruncated: a narrow terminal wraps, a pipe gets lines of any length."""
    if sys.stdout.isatty():
        Console(markup=False, emoji=False, highlight=False).print(*map(_folding, parts), sep="\n")
        return
    for part in parts:
        print(draw.text(part, width=_UNLIMITED))


def width() -> int:
    """Characters per line; a pipe has no limit."""
    return Console().width if sys.stdout.isatty() else _UNLIMITED


def _folding(part: Any) -> RenderableType:
    """A part whose tables wrap long text, which rich would truncate."""
    part = part.__rich__() if hasattr(part, "__rich__") else draw.lines(part) if isinstance(part, str) else part
    if isinstance(part, Group):
        return Group(*map(_folding, part.renderables))
    for column in part.columns if isinstance(part, Table) else ():
        column.overflow = "fold"
    return part


def facts(rows: Mapping[str, object]) -> Table:
    """Names and values, aligned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(draw.lines(readable(f"  {name}")), draw.lines(str(value)))
    return table


def columns(*names: str, title: str = "", numbers: int = 0) -> Table:
    """A table whose last `numbers` columns hold numbers."""
    table = draw.Listing(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index >= len(names) - numbers else "left")
    return table


def show_json(value: Any) -> None:
    """Prints JSON; NaN and infinities become text, and terminal control characters are escaped."""
    lines = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False).split("\n")
    print("\n".join(OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in lines))
