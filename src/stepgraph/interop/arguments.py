"""What recorded calls read and make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from stepgraph.interop.capture import Event, Held
from stepgraph.layers.glue import Slice, Value
from stepgraph.tensors.extents import BatchExtent

_Leaf = TypeVar("_Leaf")


def makes(event: Event) -> list[int]:
    """The numbers of what a call returns or changes."""
    return [*event.results, *(new for _, new in event.changed)]


def numbers_in(tree: Any) -> Iterator[int]:
    """The numbers of the values in arguments, in order."""
    return (one.number for one in _leaves(tree, Value))


def held_in(tree: Any) -> Iterator[int]:
    """The numbers of the arrays with memory in arguments."""
    return (one.number for one in _leaves(tree, Held))


def extents_in(tree: Any) -> Iterator[BatchExtent]:
    """The extents that follow the batch in arguments, in order."""
    return _leaves(tree, BatchExtent)


def _leaves(tree: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    if isinstance(tree, kind):
        yield tree
    else:
        for one in _parts(tree):
            yield from _leaves(one, kind)


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, list | tuple):
        return tree
    if isinstance(tree, dict):
        return tree.values()
    return (tree.start, tree.stop, tree.step) if isinstance(tree, Slice) else ()
