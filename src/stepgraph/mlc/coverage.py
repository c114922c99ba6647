"""Counts the available public symbols of ML Compute. `symbols.txt` lists one class and its members per line."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from stepgraph.mlc.names import NAMES


@cache
def symbols() -> tuple[str, ...]:
    """Every public symbol, `Class.selector` for members."""
    lines = (line.split() for line in (files("stepgraph.mlc") / "symbols.txt").read_text().splitlines())
    return tuple(f"{owner}.{name}" if name else owner for owner, *names in lines for name in ("", *names))


def missing() -> list[str]:
    """The symbols that are not available."""
    return [symbol for symbol in symbols() if not _is_there(symbol)]


def _is_there(symbol: str) -> bool:
    owner, _, selector = symbol.partition(".")
    found = NAMES.get(owner)
    return found is not None if not selector else callable(getattr(found, selector.replace(":", "_"), None))
