"""Statistics that the forward pass updates, such as running means, changed together by one operator.

Each is recorded as a few operators on a few numbers, and on a GPU every one of them is a launch. Where they work on
single elements of the statistic and of one other array, they are a rule (`kernels/statistics.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.statistics import FOUND, OLD, TRACK, Rule, known
from stepgraph.compiler.program import Part, fake, is_view, note, notes, storage, writes

aten = torch.ops.aten
LAYER = "statistics"  # the layer of updates of several statistics
ELEMENTWISE = {
    aten.add.Tensor,
    aten.clamp_min.default,
    aten.lerp.Scalar,
    aten.mul.Tensor,
    aten.pow.Tensor_Scalar,
    aten.sub.Tensor,
}


def merge_statistics(part: Part) -> Part:
    """The part with one operator that updates all statistics whose updates are rules; the same numbers."""
    if all(_Change.of(node) is None for node in part.nodes):
        return part
    part = part.changeable()
    graph = part.module.graph
    groups: dict[Any, list[_Change]] = {}
    for node in graph.nodes:
        change = _Change.of(node)
        if change is not None:
            groups.setdefault((change.accepted, notes(node).phase), []).append(change)
    for changes in groups.values():
        if _can_wait(changes):
            _merge(changes)
    graph.lint()
    return part


class _NoRule(Exception):
    """The new value is not computed element by element from the old one and one other array."""


class _Change:
    """The update of one statistic: the array, what it is computed from, and how."""

    def __init__(self, copy: fx.Node) -> None:
        old, new = copy.args
        assert isinstance(old, fx.Node)
        self.copy, self.old = copy, old
        self.accepted: fx.Node | None = None  # what decides whether anything changes
        self.found: fx.Node | None = None
        self.own = [copy]  # operators that nothing else reads, a reader before what it reads
        self._operators: list[tuple[Any, tuple[Any, ...]]] = []
        if _is_choice(new, self.old):
            self.own.append(new)  # type: ignore[arg-type]
            self.accepted, new, _ = new.args  # type: ignore[union-attr, assignment]
        self._read(new)
        self.rule = Rule(tuple(self._operators))

    @classmethod
    def of(cls, node: fx.Node) -> _Change | None:
        """The update that ends with this operator, or None."""
        if node.target is not aten.copy_.default or node.users or not _is_plain(node.args[0], "placeholder"):
            return None
        try:
            found = cls(node)
        except _NoRule:
            return None
        return None if found.found is None or not found.rule.operators else found

    def _read(self, node: Any) -> Any:
        """What stands for an argument in the rule."""
        if not isinstance(node, fx.Node):
            return node
        if _origin(node) is self.old:
            return OLD
        if not _is_plain(node, "call_function") or fake(node).numel() != fake(self.old).numel():
            raise _NoRule
        if not all(user in self.own for user in node.users) or not (is_view(node) or node.target in ELEMENTWISE):
            return self._read_found(node)
        self.own.append(node)
        if is_view(node):
            return self._read(node.args[0])
        if node.kwargs:
            raise _NoRule
        given = tuple(self._read(one) for one in node.args)
        self._operators.append((node.target, given))
        return "result", len(self._operators) - 1

    def _read_found(self, node: fx.Node) -> str:
        if self.found not in (None, node):
            raise _NoRule
        self.found = node
        return FOUND


def _is_choice(new: Any, old: Any) -> bool:
    """Whether a value is the new one or the old one, depending on one number."""
    if not isinstance(new, fx.Node) or new.target is not aten.where.self or len(new.users) != 1:
        return False
    return new.args[2] is old and fake(new.args[0]).numel() == 1  # type: ignore[arg-type]


def _is_plain(node: Any, kind: str) -> bool:
    array = fake(node) if isinstance(node, fx.Node) and node.op == kind else None
    return isinstance(array, torch.Tensor) and array.dtype is torch.float32 and array.is_contiguous()


def _origin(node: fx.Node) -> fx.Node:
    """The array of which this is a copy or a view with all its elements."""
    while node.target is aten.clone.default or (is_view(node) and _is_whole(node)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_whole(view: fx.Node) -> bool:
    source: Any = view.args[0]
    array = fake(source)
    return isinstance(array, torch.Tensor) and fake(view).numel() == array.numel() and fake(view).is_contiguous()


def _can_wait(changes: list[_Change]) -> bool:
    """Whether nothing reads the statistics, or writes what their updates read, until the last of these updates."""
    own = {node for one in changes for node in one.own}
    changed = {storage(one.old) for one in changes}
    read = changed | {storage(one.found) for one in changes if one.found is not None}
    node = changes[0].copy
    while node is not changes[-1].copy:
        if node not in own:
            written = {storage(one) for one in writes(node)}
            if not changed.isdisjoint(map(storage, node.all_input_nodes)) or not read.isdisjoint(written):
                return False
        node = node.next
    return len(changed) == len(changes)


def _merge(changes: list[_Change]) -> None:
    """Replaces updates with one, where the last of them is."""
    last, graph = changes[-1].copy, changes[-1].copy.graph
    arguments = (
        [one.old for one in changes],
        [one.found for one in changes],
        [known(one.rule) for one in changes],
        changes[0].accepted,
    )
    with graph.inserting_after(last):
        merged = graph.call_function(TRACK, arguments)
    note(merged, layer=LAYER, phase=notes(last).phase)
    own = [node for one in changes for node in one.own]
    copies = {node for one in own for source in one.all_input_nodes for node in _copies(source)}
    for node in own:
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node in copies and not node.users:
            graph.erase_node(node)


def _copies(node: fx.Node) -> Iterator[fx.Node]:
    """This and what it is a copy or a view of, down to the origin."""
    while node.target is aten.clone.default or is_view(node):
        yield node
        node = node.args[0]  # type: ignore[assignment]
