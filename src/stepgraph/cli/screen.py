"""How answers are shown: tables on a terminal, the same as plain long lines in a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from stepgraph import draw
from stepgraph.history import plain

_UNLIMITED = 10_000


def show(*parts: RenderableType) -> None:
    """Prints parts one below the other. Nothing is cut: a narrow terminal folds, a pipe gets lines of any length."""
    for part in parts:
        for column in part.columns if isinstance(part, Table) else ():
            column.overflow = "fold"
    if sys.stdout.isatty():
        Console(markup=False, highlight=False).print(*parts, sep="\n")
        return
    for part in parts:
        print(draw.text(part, width=_UNLIMITED))


def facts(rows: Mapping[str, object]) -> Table:
    """Names and values, aligned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(f"  {name}", str(value))
    return table


def columns(*names: str, title: str = "", numbers: int = 0) -> Table:
    """A table whose last `numbers` columns hold numbers."""
    table = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index >= len(names) - numbers else "left")
    return table


def show_json(value: Any) -> None:
    """Prints JSON; NaN and infinities are text."""
    print(json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False))
