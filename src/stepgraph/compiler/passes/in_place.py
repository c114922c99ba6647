"""Operators that can overwrite their source: it is not needed again, and nothing else uses its memory."""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.operators import TABLE, operator
from stepgraph.compiler.program import Part, fake, fakes, note, notes, storage


def in_place(part: Part) -> Part:
    """The part with less memory and the same numbers."""
    part = part.changeable()
    last: dict[int | None, int] = {}
    order = {node: time for time, node in enumerate(part.module.graph.nodes)}
    for node, time in order.items():
        last |= dict.fromkeys((one for source in node.all_input_nodes for one in memory.storages(source)), time)
    given = {one for node in order if node.op == "placeholder" for one in memory.storages(node)}
    for node, time in order.items():
        source = node.args[0] if operator(node).in_place is not None else None
        dies = isinstance(source, fx.Node) and storage(source) not in given and last[storage(source)] == time
        if dies and isinstance(source, fx.Node) and _fits(node, source):
            node.target = operator(node).in_place
            note(node, in_place=True)
    return part


def out_of_place(graph: fx.Graph) -> None:
    """Restores the out-of-place operators, which graph rewrites expect; a compiler plans its own memory."""
    plain = {row.in_place: target for target, row in TABLE.items() if row.in_place is not None}
    for node in graph.nodes:
        if notes(node).in_place:
            node.target = plain[node.target]
            note(node, in_place=False)


def _fits(node: fx.Node, source: fx.Node) -> bool:
    """Whether the first result has the size and layout of the source's memory."""
    result, array = fakes(node)[0], fake(source)
    others = [one for one in node.all_input_nodes if one is not source]
    if not isinstance(array, torch.Tensor) or any(storage(one) == storage(source) for one in others):
        return False
    same = (result.shape, result.stride(), result.dtype) == (array.shape, array.stride(), array.dtype)
    return same and result.untyped_storage().nbytes() == array.untyped_storage().nbytes()
