"""Constants of a step: results that depend on none of its inputs, such as masks and tables of positions.

Every layer that needs one records it anew; equal ones need to be computed only once.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from stepgraph.compiler.program import is_view, mutates, replace_uses, storages, writes
from stepgraph.system import torch_private


def find(graph: fx.Graph) -> list[fx.Node]:
    """The constants of a graph, in order."""
    changed = {one for node in graph.nodes for array in writes(node) for one in storages(array)}
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_pure(node) and all(one in found for one in node.all_input_nodes) and changed.isdisjoint(storages(node)):
            found[node] = None
    return list(found)


def compute_once(graph: fx.Graph) -> None:
    """Lets all readers of equal constants read the first of them.

    Arrays that are only filled stay as they are: keeping one for all would cost memory and save nothing.
    """
    known: dict[str, fx.Node] = {}
    for node in _computed(find(graph)):
        first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if first is not node:
            replace_uses(node, first)
            graph.erase_node(node)
    graph.lint()


def _computed(constants: list[fx.Node]) -> list[fx.Node]:
    """Those that are computed from others, and everything that they are computed from."""
    found = set[fx.Node]()
    for node in reversed(constants):
        is_result = bool(node.all_input_nodes) and not is_view(node)
        if is_result or any(user in found for user in node.users):
            found.add(node)
    return [node for node in constants if node in found]


def _is_pure(node: fx.Node) -> bool:
    """Whether an operator returns the same whenever it reads the same."""
    target = node.target
    if not isinstance(target, torch_private.OpOverload):
        return target is getitem
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace in ("aten", "prims") and not is_random and not mutates(node)
