"""What calls have in common, created once: views of arrays that stay, numbers that never change, prepared updates.

A transposed weight or one of the optimizer's numbers refers to the same memory in every call; the gradient of a loss
with respect to itself is always one. Creating such an array takes as long as computing with few numbers, and so does
finding the arrays and settings of an update.
"""

from __future__ import annotations

import operator as python
from collections.abc import Collection
from itertools import pairwise

import torch
from torch import fx

from stepgraph.compiler.operators import operator
from stepgraph.compiler.program import Part, fake, mutates, operators, storage, storages, writes
from stepgraph.compiler.step import Key, KeyKind, Step

FEW = 64  # bytes of an array that may stay for one that is filled in every call
STAYING = {KeyKind.STATE, KeyKind.NUMBERS}


def staying(part: Part, step: Step) -> frozenset[Key]:
    """The inputs of a part that are the same arrays in every call, as long as they are bound."""
    held = frozenset(step.held)
    return frozenset(
        key for key in part.inputs if key.kind in STAYING or (key.kind == KeyKind.VALUE and key.owner in held)
    )


def move_out(graph: fx.Graph, inputs: Collection[int]) -> fx.Graph:
    """Moves views of some inputs, by their indices, into a graph of their own, and takes them as further inputs.

    Operators that can be prepared for these inputs are divided: the other graph prepares them.

    Returns:
        The graph that creates these views from all inputs.
    """
    given = graph.find_nodes(op="placeholder")
    changed = _changed(graph)
    known: set[fx.Node] = {given[index] for index in inputs}
    moved: list[fx.Node] = []
    for node in operators(graph):
        if (_is_view(node) and node.all_input_nodes[0] in known) or _is_steady(node, changed):
            known.add(node)
            moved.append(node)
        elif (made := _prepared(node, known)) is not None:
            known.add(made)
            moved.append(made)
    before = fx.Graph()
    copies = {node: before.placeholder(node.name) for node in given}
    for node in moved:
        copies[node] = before.node_copy(node, copies.__getitem__)
    read = [node for node in moved if any(user not in known for user in node.users)]
    before.output([copies[node] for node in read])
    for one, other in pairwise(given):  # an input may have been recorded after some operators
        one.append(other)
    for node in reversed(read):
        with graph.inserting_after(given[-1]):
            node.replace_all_uses_with(graph.placeholder(node.name), lambda user: user not in known)
    for node in reversed(moved):
        graph.erase_node(node)
    return before


def _prepared(node: fx.Node, known: set[fx.Node]) -> fx.Node | None:
    """Divides an operator that can be prepared: returns what prepares it; the rest stays in its place."""
    row = operator(node).prepared
    if row is None or not row.applies(node):
        return None
    brought = [node.args[position] for position in row.brought]
    fixed = tuple(one for position, one in enumerate(node.args) if position not in row.brought)
    with node.graph.inserting_before(node):
        made = node.graph.call_function(row.function, fixed)
    if not known >= {*made.all_input_nodes}:
        node.graph.erase_node(made)
        return None
    node.target, node.args = python.call, (made, *brought)
    return made


def _is_view(node: fx.Node) -> bool:
    """Whether an operator only refers to the memory of its one argument."""
    sources = node.all_input_nodes
    return (
        node.op == "call_function"
        and len(sources) == 1
        and not mutates(node)
        and storage(node) is not None
        and storage(node) == storage(sources[0])
    )


def _changed(graph: fx.Graph) -> set[int]:
    """The memory that operators change, and that is returned."""
    (end,) = graph.find_nodes(op="output")
    changed = (array for node in graph.nodes for array in writes(node))
    return {one for array in (*changed, *end.all_input_nodes) for one in storages(array)}


def _is_steady(node: fx.Node, changed: Collection[int]) -> bool:
    """Whether an operator fills a few numbers, always the same, which nothing changes; a CUDA graph has its own."""
    if node.target is not torch.ops.aten.full.default:
        return False
    array = fake(node)
    return array.device.type == "cpu" and array.nbytes <= FEW and storage(node) not in changed
