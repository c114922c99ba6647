"""What a part of a program writes into, read off its recorded operators: no second list that could miss something."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from stepgraph.compiler.passes import writes
from stepgraph.compiler.phases import Part, storage
from stepgraph.compiler.step import Key

_known: WeakKeyDictionary[Part, tuple[Key, ...]] = WeakKeyDictionary()


def written(part: Part) -> tuple[Key, ...]:
    """The arrays given to a part that a run of it changes: parameters, statistics, optimizer state, random stream.

    Whoever runs a part to look at it gives copies of these; whoever must take a run back keeps copies of them.
    """
    if part not in _known:
        _known[part] = _found(part)
    return _known[part]


def _found(part: Part) -> tuple[Key, ...]:
    placeholders = [node for node in part.module.graph.nodes if node.op == "placeholder"]
    changed = {storage(array) for node in part.nodes for array in writes(node)}
    return tuple(key for key, node in zip(part.inputs, placeholders, strict=True) if storage(node) in changed)
