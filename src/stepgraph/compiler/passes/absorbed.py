"""Which operators PyTorch's compiler makes part of generated kernels, where their results need not be in memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from operator import getitem

import torch
from torch import fx

from stepgraph.compiler.program import Phase, fake, fakes, is_view, notes, returns_views
from stepgraph.system import torch_private

aten, prims = torch.ops.aten, torch.ops.prims
SMALL = 1 << 20  # bytes that caches hold: reading them costs nothing
_CREATED = (aten.full.default, aten.scalar_tensor.default, prims.iota.default)
_REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "var", "var_mean", "std", "any", "all", "logsumexp")


def is_absorbed(node: fx.Node) -> bool:
    """Whether the operator becomes part of a generated kernel."""
    if node.target is getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return is_absorbed(source)
    return isinstance(node.target, torch_private.OpOverload) and _is_generated(node.target)


@cache
def _is_generated(operator: torch_private.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    plain = torch.Tag.pointwise in operator.tags or operator in _CREATED
    return plain or returns_views(operator) or _reduces(operator)


def is_reduction(node: fx.Node) -> bool:
    """Whether an operator combines many elements into one."""
    maker = node.args[0] if node.target is getitem else node
    target = maker.target if isinstance(maker, fx.Node) else None
    return isinstance(target, torch_private.OpOverload) and _reduces(target)


@cache
def _reduces(operator: torch_private.OpOverload) -> bool:
    return operator.name().split("::")[1].split(".")[0] in _REDUCTIONS


def sums_rows(node: fx.Node) -> bool:
    """Whether an operator adds up whole rows of memory; sums along rows may share a kernel with what reads them."""
    if not is_reduction(node) or not is_small(node):
        return False
    maker = node.all_input_nodes[0] if node.target is getitem else node
    source = maker.all_input_nodes[0]
    strides, axes = fake(source).stride(), maker.args[1] if len(maker.args) > 1 else None
    if not isinstance(axes, list | tuple) or not axes:
        return False
    reduced = {axis % len(strides) for axis in axes if isinstance(axis, int)}
    return all(strides[axis] != 1 or fake(source).shape[axis] == 1 for axis in reduced)


def may_repeat(node: fx.Node) -> bool:
    """Whether an operator costs nothing inside the kernel that reads its result."""
    if node.op != "call_function" or not is_absorbed(node) or is_reduction(node):
        return False
    return is_view(node) or not is_small(node)


def is_small(node: fx.Node) -> bool:
    """Whether results fit into caches."""
    return all(array.nbytes < SMALL for array in fakes(node))


def is_gradient(node: fx.Node) -> bool:
    """Whether an operator runs after the forward pass."""
    return node.op == "call_function" and notes(node).phase != Phase.FORWARD


def are_apart(graph: fx.Graph) -> bool:
    """Whether the forward pass reads nothing of the gradient pass; in a separate pass, views may be shared."""
    forward = [node for node in graph.nodes if node.op == "call_function" and not is_gradient(node)]
    return not any(is_gradient(source) for node in forward for source in node.all_input_nodes)


def made(node: fx.Node) -> fx.Node:
    """The result that a view is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def users_of(node: fx.Node) -> set[fx.Node]:
    """What reads an array, also through views."""
    found, pending = set[fx.Node](), [node]
    while pending:
        for user in pending.pop().users:
            if is_view(user):
                pending.append(user)
            else:
                found.add(user)
    return found


def computed_inside(graph: fx.Graph) -> set[fx.Node]:
    """The operators of the gradient pass that generated kernels compute, with the views that only these read."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_gradient(node) and is_absorbed(node) and (not is_view(node) or found.issuperset(node.users)):
            found.add(node)
    return found


def levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many operators that no kernel can absorb, such as products, come before each result of the forward pass."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output" or is_gradient(node):
            continue
        before = max((found[source] for source in node.all_input_nodes), default=0)
        found[node] = before + (node.op == "call_function" and not is_absorbed(node))
    return found


def is_distant(source: fx.Node, node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether an operator reads something large from before the last product, such as a residual sum.

    Recomputing such results one from another would read ever more arrays, back to the start of the network.
    """
    return 0 < order[source] < order[node] and not is_small(source) and source.op != "placeholder"


def reads(order: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For each result of the forward pass, how many arrays a kernel reads to compute it again, large or small."""
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in order:
        if not _is_inlined(node) or any(is_distant(source, node, order) for source in node.all_input_nodes):
            sources[node] = frozenset([node])
        else:
            sources[node] = frozenset[fx.Node]().union(
                *({one} if is_combined(one) else sources[one] for one in node.all_input_nodes)
            )
    return {node: len(found) for node, found in sources.items()}


def is_combined(node: fx.Node) -> bool:
    """Whether a small result combines several arrays, element by element, such as a factor per channel.

    If large results are recomputed from it, it is stored: kernels would read all those arrays instead.
    """
    if not _is_inlined(node) or is_view(node) or not is_small(node):
        return False
    found, pending = set[fx.Node](), [node]
    while pending:
        for source in map(made, pending.pop().all_input_nodes):
            if _is_inlined(source) and is_small(source):
                pending.append(source)
            else:
                found.add(source)
    return len(found) > 1


def _is_inlined(node: fx.Node) -> bool:
    """Whether an element-wise result is computed inside the kernels that read it."""
    return node.op == "call_function" and is_absorbed(node) and not is_reduction(node)
