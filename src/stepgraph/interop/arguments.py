"""What recorded calls read and make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepgraph.interop.capture import Event, Held
from stepgraph.layers.glue import Value, found_in
from stepgraph.tensors.extents import BatchExtent


def makes(event: Event) -> list[int]:
    """The numbers of what a call returns or changes."""
    return [*event.results, *(new for _, new in event.changed)]


def numbers_in(tree: Any) -> Iterator[int]:
    """The numbers of the values in arguments, in order."""
    return (one.number for one in found_in(tree, Value))


def held_in(tree: Any) -> Iterator[int]:
    """The numbers of the arrays with memory in arguments."""
    return (one.number for one in found_in(tree, Held))


def extents_in(tree: Any) -> Iterator[BatchExtent]:
    """The extents that follow the batch in arguments, in order."""
    return found_in(tree, BatchExtent)
