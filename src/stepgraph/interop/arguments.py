"""What recorded calls read and make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from stepgraph.interop.capture import Event, Held
from stepgraph.layers.glue import Slice, Value
from stepgraph.tensors.extents import BatchExtent


def makes(event: Event) -> list[int]:
    """The numbers of what a call returns or changes."""
    return [*event.results, *(new for _, new in event.changed)]


def numbers_in(tree: Any) -> Iterator[int]:
    """The numbers of the values in arguments, in order."""
    if isinstance(tree, Value):
        yield tree.number
    else:
        for one in _parts(tree):
            yield from numbers_in(one)


def held_in(tree: Any) -> Iterator[int]:
    """The numbers of the arrays with memory in arguments."""
    if isinstance(tree, Held):
        yield tree.number
    else:
        for one in _parts(tree):
            yield from held_in(one)


def extents_in(tree: Any) -> Iterator[BatchExtent]:
    """The extents that follow the batch in arguments, in order."""
    if isinstance(tree, BatchExtent):
        yield tree
    for one in _parts(tree):
        yield from extents_in(one)


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, list | tuple):
        return tree
    if isinstance(tree, dict):
        return tree.values()
    return (tree.start, tree.stop, tree.step) if isinstance(tree, Slice) else ()
