"""Cross entropies together with their gradients: one operator reads the predictions from memory only once.

A whole step needs both. The gradient of a row's loss, for a mean the weight of the row, usually does not depend on the
losses. Then they can wait for the gradient pass, where one operator of `label_losses.py` computes both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.operators import note_workspace
from stepgraph.compiler.program import Part, Phase, call, mutates, note, notes, replace_uses, storage, writes

ours = torch.ops.stepgraph


def join_losses(part: Part) -> Part:
    """The part with cross entropies computed together with their gradients, unless something prevents it."""
    if not part.module.graph.find_nodes(op="call_function", target=ours.label_losses_gradient.default):
        return part
    part = part.changeable()
    graph = part.module.graph
    for node in graph.find_nodes(op="call_function", target=ours.label_losses_gradient.default):
        _join(node)
    graph.lint()
    return part


def _join(gradient: fx.Node) -> None:
    """Computes a gradient and the losses it belongs to at once, where the gradient is."""
    y, t, g, kept, *settings = gradient.args
    losses = _losses_of(gradient)
    if losses is None:
        return
    values = [node for node in losses.users if node is not kept]
    readers = _readers(values)
    if not readers.isdisjoint((y, t, g)) or not _can_wait(readers, losses, gradient):
        return
    with gradient.graph.inserting_before(gradient):
        both = call(gradient, ours.label_losses_with_gradient.default, (y, t, g, *settings))
        found, new = (call(gradient, getitem, (both, index)) for index in range(2))
    note_workspace(both)
    _delay(readers, gradient)
    replace_uses(gradient, found)
    for one in values:
        replace_uses(one, new)
    for old in (gradient, kept, *values, losses):
        assert isinstance(old, fx.Node)
        gradient.graph.erase_node(old)


def _losses_of(gradient: fx.Node) -> fx.Node | None:
    """The losses that this is the gradient of, if it is their only one."""
    y, t, _, kept, *settings = gradient.args
    losses: Any = kept.args[0] if isinstance(kept, fx.Node) and kept.target is getitem else None
    if losses is None or losses.target is not ours.label_losses.default or losses.args != (y, t, *settings):
        return None
    return losses if set(kept.users) == {gradient} else None  # type: ignore[union-attr]


def _readers(values: Iterable[fx.Node]) -> set[fx.Node]:
    """The operators that depend on some numbers."""
    found: set[fx.Node] = set()
    stack = [user for value in values for user in value.users]
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function":
            found.add(node)
            stack += node.users
    return found


def _can_wait(readers: Collection[fx.Node], losses: fx.Node, gradient: fx.Node) -> bool:
    """Whether readers of the losses can run after the gradient: they change nothing, and what they read stays."""
    between = [node for node in gradient.graph.nodes if losses < node < gradient]
    changed = {storage(array) for node in between for array in writes(node)}
    waiting = [node for node in between if node in readers]
    return not any(mutates(node) or any(storage(one) in changed for one in node.all_input_nodes) for node in waiting)


def _delay(readers: Collection[fx.Node], gradient: fx.Node) -> None:
    """Moves readers of the losses behind the gradient, and into its phase."""
    last = gradient
    for node in [node for node in gradient.graph.nodes if node in readers]:
        if notes(node).phase is Phase.FORWARD:
            note(node, phase=Phase.GRADIENT)
        if node < gradient:
            last.append(node)
            last = node
