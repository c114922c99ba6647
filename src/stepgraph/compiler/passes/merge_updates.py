"""Updates of parameters, merged into few launches where gradients that wait cost no memory.

A step updates a large parameter as soon as its gradient is complete, and frees the gradient. Launches for single
parameters are too short to keep a GPU busy, so updates wait for each other: until there is enough for one launch, and
only where the step does not need more memory for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.kernels.update import MANY, UPDATE, Recorded, recorded
from stepgraph.compiler.program import Part, fake, inherit, notes, storages, writes

ENOUGH = 1 << 24  # elements: longer launches are hardly faster per element, and more gradients would wait for them
LAYER = "optimizer"  # the layer of updates of several parameters


def merge_updates(part: Part) -> Part:
    """The part with fewer and larger updates: the same numbers, and no more memory at its peak."""
    if sum(len(own.parameters) for own in _updates(part).values()) <= MANY:
        return part  # PyTorch's compiler fuses few updates with what precedes them
    part = part.changeable()
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node, own in _updates(part).items():
        alike[_kind(own)].append(node)
    room = _Room(part)
    for updates in alike.values():
        for group in _groups(updates, room):
            group.merge()
    part.module.graph.lint()
    return part


def _updates(part: Part) -> dict[fx.Node, Recorded]:
    """The updates that have kernels."""
    return {node: own for node in part.nodes if (own := recorded(node)) is not None and own.rules}


def _arguments(update: fx.Node) -> Recorded:
    own = recorded(update)
    assert own is not None
    return own


def _kind(own: Recorded) -> Any:
    """What updates must have in common so that one operator can do them."""
    return len(own.slots), bool(own.copies), own.numbers, own.norm, own.finite, own.optimizer, own.names


class _Room:
    """The memory that is free at each operator, compared with the peak of a part."""

    def __init__(self, part: Part) -> None:
        self._order = {node: time for time, node in enumerate(part.module.graph.nodes)}
        operators = [node for node in self._order if node.op == "call_function"]
        rows = zip(operators, memory.timeline(part), strict=True)
        live = {node: sum(kinds.values()) for node, (_, _, kinds) in rows}
        peak = max(live.values())
        self._free = [peak - live.get(node, 0) for node in self._order]
        self._deaths = memory.lifetimes(part)[1]
        self._given = {one for node in part.placeholders for one in storages(node)}

    def needed(self, update: fx.Node) -> int:
        """Bytes that cannot be freed while an update waits."""
        sizes = {one: size for node in _arguments(update).gradients for one, size in memory.sizes(node).items()}
        now = self._order[update]
        freed = (one for one in sizes if one not in self._given and self._deaths.get(one, now) <= now)
        return sum(sizes[one] for one in freed) + notes(update).workspace

    def take(self, size: int, after: fx.Node, until: fx.Node) -> bool:
        """Reserves bytes from after one operator until another has run, if they are free."""
        times = range(self._order[after] + 1, self._order[until] + 1)
        fits = all(size <= self._free[time] for time in times)
        for time in times if fits else ():
            self._free[time] -= size
        return fits


class _Group:
    """Updates that wait for the last of them, and operators that depend on them, such as averages of parameters."""

    def __init__(self, first: fx.Node) -> None:
        self._updates, self._dependents = [first], dict[fx.Node, None]()
        self._changed, self._used = set[int](), set[int]()  # memory of operators that wait
        self._wait(first)

    @property
    def last(self) -> fx.Node:
        """The update that the others wait for."""
        return self._updates[-1]

    @property
    def elements(self) -> int:
        """How many numbers they change."""
        return sum(fake(one).numel() for node in self._updates for one in _arguments(node).parameters)

    def reaches(self, update: fx.Node) -> bool:
        """Lets the group wait for the next update, unless that depends on it; then the group is complete."""
        before, node = dict(self._dependents), self.last.next
        while node is not update:
            if self._depends(node):
                self._dependents[node] = None
                self._wait(node)
            node = node.next
        if self._depends(update):
            self._dependents = before  # the others stay where they are
            return False
        self._updates.append(update)
        self._wait(update)
        return True

    def _depends(self, node: fx.Node) -> bool:
        if any(source in self._dependents for source in node.all_input_nodes):
            return True
        return not self._changed.isdisjoint(_read(node)) or not self._used.isdisjoint(_overwritten(node))

    def _wait(self, node: fx.Node) -> None:
        self._changed |= _overwritten(node)
        self._used |= _read(node)

    def merge(self) -> None:
        """Replaces the updates with one, where the last of them is; what depends on them follows it."""
        if len(self._updates) == 1:
            return
        last, graph = self.last, self.last.graph
        with graph.inserting_after(last):
            merged = graph.call_function(UPDATE, _joined([_arguments(node) for node in self._updates]))
        inherit(merged, last, layer=LAYER, workspace=sum(notes(node).workspace for node in self._updates))
        for node in reversed(self._dependents):
            merged.append(node)
        for node in self._updates:
            graph.erase_node(node)


def _groups(updates: Sequence[fx.Node], room: _Room) -> Iterator[_Group]:
    """Groups of updates that wait for each other; the caller may merge each before it takes the next."""
    group, waiting = _Group(updates[0]), room.needed(updates[0])
    for update in updates[1:]:
        waits = group.elements < ENOUGH and room.take(waiting, group.last, update)
        if not waits or not group.reaches(update):
            yield group
            group, waiting = _Group(update), 0
        waiting += room.needed(update)
    yield group


def _read(node: fx.Node) -> set[int]:
    return {one for source in node.all_input_nodes for one in storages(source)}


def _overwritten(node: fx.Node) -> set[int]:
    """Memory that an operator changes, also where a pass lets it overwrite its source."""
    return {one for array in writes(node) for one in storages(array)}


def _joined(given: Sequence[Recorded]) -> tuple[Any, ...]:
    """The arguments of several updates as those of one."""
    by_slot = zip(*(own.slots for own in given), strict=True)
    joined = given[0]._replace(
        parameters=list(chain(*(own.parameters for own in given))),
        gradients=list(chain(*(own.gradients for own in given))),
        states=list(chain(*chain(*by_slot))),
        copies=list(chain(*(own.copies for own in given))),
        rules=list(chain(*(own.rules for own in given))),
    )
    return tuple(joined)
