"""Collectives in the parts of a step that several ranks run together.

In the update, numbers of all ranks take the place of a rank's own ones, and parameters are gathered: the slices of a
bucket are sent as soon as they are updated, and what others send is written in front of what reads whole parameters.
All ranks start the same collectives in the same order, whatever they own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from stepgraph.compiler import collectives
from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import Part, call, notes, storage, writes
from stepgraph.compiler.slices import Ownership, buckets
from stepgraph.compiler.step import KeyKind, Step
from stepgraph.tensors.tensor import Tensor


def gather_updates(part: Part, step: Step) -> Part:
    """The update with collectives."""
    ranks = step.ownership
    assert ranks is not None
    part = _copied(part)
    for node in [one for one in part.nodes if one.target is collectives.of_all_ranks]:
        node.target = collectives.from_all_ranks
        node.args = (*node.args, ranks.group, f"numbers of the {notes(node).layer}")
    for marker in [one for one in part.nodes if one.target is collectives.updated_]:
        _gather(part, marker, step, ranks)
        part.module.graph.erase_node(marker)
    part.module.graph.lint()
    return part


def _copied(part: Part) -> Part:
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.module.graph, {}))
    return replace(part, module=Module(part.module, graph))


def _gather(part: Part, marker: fx.Node, step: Step, ranks: Ownership) -> None:
    """Gathers the parameters of which a marker says that they have been updated."""
    given = zip(part.inputs, part.placeholders, strict=True)
    tensors = {node: key.owner for key, node in given if key.kind == KeyKind.VALUE}
    nodes = {tensors[node]: node for node in marker.all_input_nodes}
    graph, started = marker.graph, []
    following = _after_numbers(part)
    for bucket in buckets([*nodes]):
        following = _after_writes([nodes[one] for one in bucket], following, marker)
        what = f"the parameters {_named(bucket, step)}"
        own = [ranks.own(one) for one in bucket]
        starts, stops = [one.start for one in own], [one.stop for one in own]
        settings = (max(ranks.sizes(bucket)), ranks.size, ranks.group, what)
        arguments = ([nodes[one] for one in bucket], starts, stops, *settings)
        with graph.inserting_before(following):
            started.append((bucket, call(marker, collectives.start_gather, arguments), what))
    with graph.inserting_before(marker):
        for bucket, start, what in started:
            bounds = [edge for one in bucket for piece in ranks.slices[one] for edge in piece]
            rest = (bounds, ranks.rank, ranks.size, ranks.group, what)
            call(marker, collectives.finish_gather_, ([nodes[one] for one in bucket], start, *rest))


def _after_numbers(part: Part) -> fx.Node:
    """The operator behind the numbers that ranks exchange first."""
    first = part.nodes[0]
    numbers = [node for node in part.nodes if node.target is collectives.from_all_ranks]
    return numbers[-1].next if numbers else first


def _after_writes(parameters: Sequence[fx.Node], first: fx.Node, last: fx.Node) -> fx.Node:
    """The operator, from `first` up to `last`, behind the last one that writes to parameters."""
    memory, node, found = {storage(one) for one in parameters}, first, first
    while node is not last:
        if any(storage(one) in memory for one in writes(node)):
            found = node.next
        node = node.next
    return found


def _named(bucket: Sequence[Tensor], step: Step) -> str:
    """What is in a bucket, for errors."""
    first, last = (step.names.get(one, one.label) for one in (bucket[0], bucket[-1]))
    return f"'{first}'" if len(bucket) == 1 else f"'{first}' to '{last}'"
