"""Gradients that a fused step writes to memory once, because kernels would compute them from several arrays each time.

The gradient of a batch normalization is read twice: by sums over the batch, and by what is computed with these sums.
Behind a residual sum and a ReLU it is computed from three arrays, two gradients and the ReLU's result. PyTorch's
compiler would read all three in both kernels, and again where the gradient goes on along the shortcut. Written by the
first of them, the others read one.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import fx

from stepgraph.compiler.passes.absorbed import (
    is_absorbed,
    is_gradient,
    is_reduction,
    is_small,
    made,
    may_repeat,
    sums_rows,
    users_of,
)
from stepgraph.compiler.passes.stored import store
from stepgraph.compiler.program import fake, is_view

ARRAYS = 3  # from as many; storing what is computed from two would save nothing if only two kernels read it


def store_gradients(graph: fx.Graph) -> None:
    """Stores gradients that are computed from several arrays and read by sums and by what is computed with these."""
    chosen = set[fx.Node]()
    for node in graph.nodes:
        if not _is_inlined(node) or len(node.users) == 1:
            continue
        if len(_sources(node, chosen)) >= ARRAYS and _is_read_with_its_sums(node):
            chosen.add(_narrowest(node, chosen))
    store(graph, chosen)


def _is_inlined(node: fx.Node) -> bool:
    """Whether kernels of the gradient pass compute a large result for themselves."""
    return is_gradient(node) and not is_view(node) and not is_small(node) and not _is_in_memory(node)


def _is_in_memory(node: fx.Node) -> bool:
    """Whether a result must be in memory: operators outside of generated kernels compute or read it."""
    return not may_repeat(node) or any(not is_absorbed(user) for user in users_of(node))


def _sources(node: fx.Node, chosen: Set[fx.Node]) -> set[fx.Node]:
    """The large arrays that a kernel reads to compute a result, given that some are in memory."""
    found, seen, pending = set[fx.Node](), set[fx.Node](), [node]
    while pending:
        for source in map(made, pending.pop().all_input_nodes):
            if source in seen or is_small(source):
                continue
            seen.add(source)
            if source in chosen or _is_in_memory(source):
                found.add(source)
            else:
                pending.append(source)
    return found


def _narrowest(node: fx.Node, chosen: Set[fx.Node]) -> fx.Node:
    """The result before conversions to wider types."""
    while len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if not _is_inlined(source) or source in chosen or fake(source).nbytes >= fake(node).nbytes:
            break
        node = source
    return node


def _is_read_with_its_sums(node: fx.Node) -> bool:
    """Whether something large is computed from a result and from its sums, which another kernel computes first."""
    sums = {one for one in _computed_from(node.users) if sums_rows(one)}
    return not _large(_computed_from(node.users)).isdisjoint(_large(_computed_from(_users(sums), through_small=True)))


def _computed_from(first: Iterable[fx.Node], through_small: bool = False) -> set[fx.Node]:
    """What is computed before the next product, element by element; the last ones are sums or read by products."""
    found, pending = set[fx.Node](), list(first)
    while pending:
        one = pending.pop()
        if one in found or one.op != "call_function":
            continue
        if may_repeat(one) or is_view(one) or (through_small and is_small(one) and _is_elementwise(one)):
            found.add(one)
            pending += one.users
        elif is_reduction(one):
            found.add(one)
    return found


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _users(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for user in node.users}


def _large(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {node for node in nodes if not is_view(node) and not is_small(node)}
