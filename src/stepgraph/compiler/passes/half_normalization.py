"""Normalization of half-precision arrays without copies of them in float32.

Layers that normalize ask for float32, so their sources are recorded as converted to it, and their results as converted
back. Kernels that read and write half precision and compute in float32 inside make the conversions unnecessary.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels import layer_norm
from stepgraph.compiler.kernels.half import HALF
from stepgraph.compiler.program import fake, inherit
from stepgraph.system import torch_private

aten, ours = torch.ops.aten, torch.ops.stepgraph
DEVICES = {"cuda"}  # where there are such kernels


def normalize_half(graph: fx.Graph) -> None:
    """Lets normalization read and write half precision, where all readers of a result convert it to that type."""
    for node in list(graph.nodes):
        if node.target is aten.native_layer_norm.default:
            x, shape, gamma, beta, _ = node.args
            if _fits(node, [x]) and layer_norm.applies(*map(_fake, (_source(x), shape, gamma, beta))):
                _replace(node, ours.layer_norm.default, (_source(x), *node.args[1:]))
        elif node.target is aten.native_layer_norm_backward.default:
            dy, x, shape, _, _, gamma, beta, _ = node.args
            if _fits(node, [x, dy]) and layer_norm.applies(*map(_fake, (_source(x), shape, gamma, beta))):
                _replace(node, ours.layer_norm_gradient.default, (_source(dy), _source(x), *node.args[2:]))
        elif node.target is aten.native_batch_norm.default and _fits(node, node.args[:1]):
            _replace(node, node.target, (_source(node.args[0]), *node.args[1:]))
        elif node.target is aten.native_batch_norm_backward.default and _fits(node, node.args[:2]):
            _replace(node, node.target, (*map(_source, node.args[:2]), *node.args[2:]))


def _fake(one: Any) -> Any:
    return fake(one) if isinstance(one, fx.Node) else one


def _source(node: Any) -> fx.Node | None:
    """The half-precision array that was converted to float32, or None."""
    if not isinstance(node, fx.Node) or node.target is not torch_private.to_copy.default:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if fake(source).dtype in HALF and fake(node).dtype is torch.float32 else None


def _first(node: fx.Node) -> fx.Node | None:
    """The first of an operator's results, if anything reads it."""
    return next((one for one in node.users if one.target is getitem and one.args[1] == 0), None)


def _fits(node: fx.Node, sources: Any) -> bool:
    """Whether all these sources were converted from one type, and the first result is converted back to it."""
    kinds = {None if _source(one) is None else fake(_source(one)).dtype for one in sources}  # type: ignore[arg-type]
    first = _first(node)
    if None in kinds or len(kinds) != 1 or first is None or len(first.users) != 1:
        return False
    (back,), (kind,) = first.users, kinds
    return back.target is torch_private.to_copy.default and fake(back).dtype is kind


def _replace(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Puts an operator in the place of another and of the conversions around it."""
    graph, converted, first = node.graph, node.all_input_nodes, _first(node)
    assert first is not None
    (back,) = first.users
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    inherit(new, node, (fake(back), *fake(node)[1:]))
    inherit(first, first, fake(back))
    node.replace_all_uses_with(new)
    back.replace_all_uses_with(first)
    graph.erase_node(back)
    graph.erase_node(node)
    for one in dict.fromkeys(converted):
        if not one.users and _source(one) is not None:
            graph.erase_node(one)
