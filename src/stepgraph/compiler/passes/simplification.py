"""Simplifications of a traced graph that keep every number: removes duplicates and no-ops.

A rule is a function from an operator to the earlier result that can replace it, or None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from stepgraph.compiler.program import fake, is_view, mutates, share_memory, storage, writes
from stepgraph.system import torch_private

aten = torch.ops.aten


def simplify(module: fx.GraphModule) -> None:
    """Applies `RULES` to every operator, in order. Each is visited once, so the time is linear."""
    graph = module.graph
    stands_in: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if any(one in stands_in for one in node.all_input_nodes):
            node.args = fx.map_arg(node.args, lambda one: stands_in.get(one, one))
            node.kwargs = fx.map_arg(node.kwargs, lambda one: stands_in.get(one, one))
        if node.op != "call_function":
            continue
        _view_out_of_place(node)
        found = next(filter(None, (find(node) for find in RULES)), None)
        if found is not None:
            stands_in[node] = found
        elif isinstance(fake(node), torch.Tensor) and len(changed := writes(node)) == 1:
            # Reading an array after an in-place change reads the array itself, in any phase.
            stands_in[node] = changed[0]
    for node, other in reversed(stands_in.items()):
        if not mutates(node):
            graph.erase_node(node)
            if storage(node) != storage(other):  # the lifetime of memory includes what is read through views
                share_memory(other)


def _view_out_of_place(node: fx.Node) -> None:
    """Lets `squeeze_` and its like return a view. An array that stays between calls must keep its shape."""
    target = node.target
    if isinstance(target, torch_private.OpOverload) and torch.Tag.inplace_view in target.tags:
        space, name, overload = str(target).split(".")
        node.target = getattr(getattr(getattr(torch.ops, space), name.rstrip("_"), None), overload, target)
        if not is_view(node):  # `resize_` has no view for that
            node.target = target


def _alias(node: fx.Node) -> fx.Node | None:
    """Detaching matters only to autograd, which is done by now."""
    return _source(node) if node.target in (aten.detach.default, aten.alias.default) else None


def _same_view(node: fx.Node) -> fx.Node | None:
    """A view with the shape of its source."""
    if node.target not in (aten.view.default, torch_private.unsafe_view.default, aten.expand.default):
        return None
    source = _source(node)
    same = source is not None and _layout(source) == _layout(node)
    return source if same else None


def _transposed_back(node: fx.Node) -> fx.Node | None:
    """The transpose of a transpose."""
    inner = _source(node) if node.target is aten.t.default else None
    return _source(inner) if inner is not None and inner.target is aten.t.default else None


def _sum_of_one(node: fx.Node) -> fx.Node | None:
    """A sum in which every number is the only summand, such as the gradient of a bias for one row."""
    source = _source(node) if node.target is aten.sum.dim_IntList else None
    return source if source is not None and _layout(source) == _layout(node) else None


RULES: tuple[Callable[[fx.Node], fx.Node | None], ...] = (_alias, _same_view, _transposed_back, _sum_of_one)


def _source(node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _layout(node: fx.Node) -> tuple[object, ...]:
    array = fake(node)
    return tuple(array.shape), array.stride(), array.dtype
