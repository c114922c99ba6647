"""Collectives in the parts of a step that several ranks run together.

In the last shard of a rank, the gradients of a bucket are sent as soon as they are complete and added to those of its
earlier shards; then the rank tells the others that it can go on, with its losses and statistics. What others send is
waited for at the end, in front of the update. In the update, numbers of all ranks take the place of a rank's own ones,
and parameters are gathered: slices are sent as soon as they are updated, and what others send is written in front of
what reads whole parameters.

All ranks start the same collectives in the same order, whatever they own and whatever their batches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler.program import (
    EXCHANGE,
    Part,
    Phase,
    call,
    fake,
    inherit,
    note,
    notes,
    set_fake,
    storage,
    writes,
)
from stepgraph.compiler.ranks import collectives, news
from stepgraph.compiler.ranks.shards import Node, climbed, own, partial_nodes
from stepgraph.compiler.ranks.slices import Buckets, Ownership, buckets
from stepgraph.compiler.step import AGREED, HEARD, NEWS, REFUSED, Key, KeyKind, Step, gradient, partial_sum, total
from stepgraph.tensors.tensor import Tensor

# Gradients


def gradient_buckets(part: Part, step: Step) -> Buckets:
    """The parameters whose gradients a shard computes, as they are exchanged: what is complete first, in front."""
    found = [key.owner for key in part.outputs if key.kind == KeyKind.GRADIENT and key.owner in step.trainable_set]
    return _by_completion(found, step)


def _by_completion(tensors: Iterable[Tensor], step: Step) -> Buckets:
    """Buckets of parameters; the reverse walk completes the gradients of the last layers first."""
    number = {tensor: index for index, tensor in enumerate(step.trainable)}
    return buckets(sorted(tensors, key=lambda tensor: (-step.first_use[tensor], number[tensor])))


def exchange_gradients(part: Part, step: Step) -> Part:
    """The last shard of a rank: it returns totals of buckets instead of gradients, and takes partial sums."""
    ranks = step.ownership
    assert ranks is not None
    groups = gradient_buckets(part, step)
    part = part.changeable()
    graph, made = part.module.graph, dict(zip(part.outputs, part.returned, strict=True))
    nodes = list(graph.nodes)
    order = {node: time for time, node in enumerate(nodes)}
    told = news.layout(part, step)
    given = dict(zip(part.inputs, part.placeholders, strict=True))
    exchange, behind = _Exchange(part, step, ranks, told), order[part.nodes[0]]
    inputs, started = list(part.inputs), []
    for index, bucket in enumerate(groups):
        gradients = [made.pop(gradient(tensor)) for tensor in bucket]
        behind = max([behind, *(order[node] + 1 for node in gradients)])
        sums = exchange.partial_sums(index, gradients)
        inputs += sums
        started.append(exchange.start(index, bucket, gradients, [*sums.values()], nodes[behind]))
    (end,) = graph.find_nodes(op="output")
    written = (*told.statistics, REFUSED) if told.notes else told.statistics
    telling = exchange.tell(made | {key: given[key] for key in written}, end)
    inputs.append(NEWS)
    found = {total(index): exchange.finish(bucket, started[index], end) for index, bucket in enumerate(groups)}
    found[HEARD] = exchange.hear(telling, end)
    if step.decides:
        with graph.inserting_before(end):
            found[AGREED] = _call(found[HEARD], collectives.agreed, (found[HEARD],))
    end.args = ([*made.values(), *found.values()],)
    graph.lint()
    return replace(part, inputs=tuple(inputs), outputs=(*made, *found))


class _Started(NamedTuple):
    """A bucket under way.

    Args:
        node: the operator that has started to send it.
        kept: arrays with what the rank has not sent, its part of its own sums.
        edges: its starts and stops, array by array.
    """

    node: fx.Node
    kept: tuple[fx.Node, ...] = ()
    edges: tuple[int, ...] = ()


@dataclass
class _Exchange:
    """Adds the operators that exchange buckets to the last shard of a rank."""

    part: Part
    step: Step
    ranks: Ownership
    told: news.Layout

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """The partial sums of each rank."""
        return [partial_nodes(self.step.shards, rank, self.ranks.size) for rank in range(self.ranks.size)]

    @cached_property
    def earlier(self) -> list[Node]:
        """The partial sums of this rank in front of its last shard."""
        return partial_nodes(self.step.shards, self.ranks.rank, self.ranks.size, before=1)

    @cached_property
    def _climbed(self) -> tuple[list[Node], Node]:
        """The partial sums to which the last shard is added, and the one that it becomes."""
        last = own(self.step.shards, self.ranks.rank, self.ranks.size)[-1]
        return climbed(self.step.shards, self.earlier, (0, last))

    def partial_sums(self, index: int, gradients: Sequence[fx.Node]) -> dict[Key, fx.Node]:
        """The partial sums of a bucket as further inputs."""
        graph, like = self.part.module.graph, gradients[0]
        count = sum(fake(node).numel() for node in gradients)
        found = {}
        for place in range(len(self.earlier)):
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]), fake(like).fake_mode:
                node = graph.placeholder(f"partial_{index}_{place}")
                inherit(node, like, fake(like).new_empty(count))
            found[partial_sum(index, place)] = node
        return found

    def start(
        self,
        index: int,
        bucket: Sequence[Tensor],
        gradients: Sequence[fx.Node],
        sums: list[fx.Node],
        following: fx.Node,
    ) -> _Started:
        """Adds the gradients of this shard to those of earlier ones, and starts to send the sums."""
        ranks, sizes, like = self.ranks, self.ranks.sizes(bucket), gradients[0]
        what = title(index, bucket, self.step)
        with like.graph.inserting_before(following):
            if self._keeps_own and not sums:
                return self._start_with_others(bucket, gradients, what)
            flat = _sized(like, collectives.pack, ([*gradients], self._edges(bucket, range(ranks.size))), sum(sizes))
            if not ranks.is_ordered:
                for one in sums:
                    flat = _call(like, torch.ops.aten.add.Tensor, (flat, one))
                return _Started(_sized(like, collectives.start_scatter, (flat, sizes, ranks.group, what), max(sizes)))
            parts = self._added(like, flat, sums)
            sent = parts[0]
            if len(parts) > 1:
                sent = _sized(like, collectives.by_rank, (parts, sizes), len(parts) * sum(sizes))
            taken = [len(nodes) * sizes[ranks.rank] for nodes in self.nodes]
            given = [len(parts) * size for size in sizes]
            node = self._trade(like, sent, taken, given, bucket, what)
            if not self._keeps_own:
                return _Started(node)
            first = sum(given[: ranks.rank])
            return _Started(node, (sent,), (first, first + given[ranks.rank]))

    @property
    def _keeps_own(self) -> bool:
        """Whether a rank does not send its own part of its sums."""
        return self.ranks.is_ordered and collectives.swaps(self.step.device, self.ranks.size)

    def _start_with_others(self, bucket: Sequence[Tensor], gradients: Sequence[fx.Node], what: str) -> _Started:
        """Starts to send gradients that are no sums, without a copy of what stays with this rank."""
        rank, like, sizes = self.ranks.rank, gradients[0], self.ranks.sizes(bucket)
        others = [other for other in range(self.ranks.size) if other != rank]
        edges = self._edges(bucket, others)
        sent = _sized(like, collectives.pack, ([*gradients], edges), sum(sizes[other] for other in others))
        taken = [len(self.nodes[other]) * sizes[rank] * (other != rank) for other in range(self.ranks.size)]
        given = [size * (other != rank) for other, size in enumerate(sizes)]
        node = self._trade(like, sent, taken, given, bucket, what)
        return _Started(node, tuple(gradients), tuple(self._edges(bucket, [rank])))

    def _edges(self, bucket: Sequence[Tensor], ranks: Iterable[int]) -> list[int]:
        """The starts and stops of slices, rank by rank."""
        return [edge for rank in ranks for tensor in bucket for edge in self.ranks.slices[tensor][rank]]

    def _trade(
        self, like: fx.Node, sent: fx.Node, taken: list[int], given: list[int], bucket: Sequence[Tensor], what: str
    ) -> fx.Node:
        """Starts to send each rank its elements of an array, and to receive others."""
        ranks, width = self.ranks, bucket[0].data_type.torch.itemsize
        in_bytes = ([count * width for count in counts] for counts in (taken, given))
        own = taken[ranks.rank] if self._keeps_own else 0
        arguments = (sent, *in_bytes, ranks.rank, ranks.group, what)
        return _sized(like, collectives.start_trade, arguments, (sum(taken) - own) * width, torch.uint8)

    def _added(self, like: fx.Node, flat: fx.Node, sums: list[fx.Node]) -> list[fx.Node]:
        """The partial sums of this rank with its last shard."""
        there = dict(zip(self.earlier, sums, strict=True))
        met, node = self._climbed
        for neighbour in met:
            flat = _call(like, torch.ops.aten.add.Tensor, (flat, there.pop(neighbour)))
        there[node] = flat
        return [there[one] for one in self.nodes[self.ranks.rank]]

    def tell(self, values: Mapping[Key, fx.Node], end: fx.Node) -> fx.Node:
        """Starts to tell the others what this rank has to tell, behind all that can fail."""
        graph, ranks, like = self.part.module.graph, self.ranks, values[self.told.losses[0]]
        height, width = self.told.shape
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]), fake(like).fake_mode:
            own = graph.placeholder("news")
            inherit(own, like, fake(like).new_empty((height + 1, width), dtype=news.DTYPE))
        met, node = self._climbed
        order = [-1 if one == node else self.earlier.index(one) for one in self.nodes[ranks.rank]]
        losses, statistics = ([values[key] for key in keys] for keys in (self.told.losses, self.told.statistics))
        notes = [values[REFUSED]] if REFUSED in values else []
        sums = [self.earlier.index(one) for one in met]
        arguments = (own, losses, statistics, notes, self.step.batch[1], sums, order, ranks.size, ranks.group)
        with graph.inserting_before(end):
            size = ranks.size * height * width * news.DTYPE.itemsize
            telling = _sized(like, collectives.start_news, (*arguments, news.WHAT), size, torch.uint8)
        note(telling, phase=Phase.GRADIENT)
        return telling

    def hear(self, telling: fx.Node, end: fx.Node) -> fx.Node:
        """Waits for what the others tell."""
        shape = [self.ranks.size, *self.told.shape]
        with end.graph.inserting_before(end):
            return _call(telling, collectives.finish_news, (telling, shape, self.ranks.group))

    def finish(self, bucket: Sequence[Tensor], started: _Started, end: fx.Node) -> fx.Node:
        """Waits for this rank's part of the sum of a bucket."""
        ranks, (node, kept, edges) = self.ranks, started
        with end.graph.inserting_before(end):
            size = ranks.sizes(bucket)[ranks.rank]
            if not ranks.is_ordered:
                return _call(node, collectives.finish_scatter, (node, size, ranks.group))
            levels, indices = ([*one] for one in zip(*(node for own in self.nodes for node in own), strict=True))
            dtype = bucket[0].data_type.torch
            rest = (ranks.rank, levels, indices, self.step.shards, dtype, ranks.group)
            made = _sized(node, collectives.finish_trade, (node, [*kept], [*edges], *rest), size, dtype)
            if kept and len(levels) > 2:  # sums of more than two are taken in a copy of its own part
                note(made, workspace=(sum(edges[1::2]) - sum(edges[::2])) * dtype.itemsize)
            return made


def _call(like: fx.Node, target: object, arguments: tuple[object, ...]) -> fx.Node:
    """A new operator of the exchange."""
    node = call(like, target, arguments)
    note(node, layer=EXCHANGE)
    return node


def _sized(
    like: fx.Node, target: Any, arguments: tuple[Any, ...], count: int, dtype: torch.dtype | None = None
) -> fx.Node:
    """The same if its result has a known size: PyTorch would look at each of its numbers, some for every rank."""
    node, array = like.graph.call_function(target, arguments), fake(like)
    note(node, layer=EXCHANGE, phase=notes(like).phase)
    with array.fake_mode:
        set_fake(node, array.new_empty(count, dtype=dtype or array.dtype))
    return node


# Parameters


def gather_updates(part: Part, step: Step) -> Part:
    """The update with collectives."""
    ranks = step.ownership
    assert ranks is not None
    part = part.changeable()
    for node in [one for one in part.nodes if one.target is collectives.of_all_ranks]:
        node.target = collectives.from_all_ranks
        node.args = (*node.args, ranks.group, f"numbers of the {notes(node).layer}")
    for marker in [one for one in part.nodes if one.target is collectives.updated_]:
        _gather(part, marker, step, ranks)
        part.module.graph.erase_node(marker)
    part.module.graph.lint()
    return part


def _gather(part: Part, marker: fx.Node, step: Step, ranks: Ownership) -> None:
    """Gathers the parameters of which a marker says that they have been updated."""
    given = zip(part.inputs, part.placeholders, strict=True)
    tensors = {node: key.owner for key, node in given if key.kind == KeyKind.VALUE}
    nodes = {tensors[node]: node for node in marker.all_input_nodes}
    agreed = part.placeholders[part.inputs.index(AGREED)] if AGREED in part.inputs else None
    graph, started = marker.graph, []
    following = _after_numbers(part)
    for bucket in _by_completion(nodes, step):
        following = _after_writes([nodes[one] for one in bucket], following, marker)
        what = f"updates of {_named(bucket, step)}"
        own = [ranks.own(one) for one in bucket]
        starts, stops = [one.start for one in own], [one.stop for one in own]
        settings = (max(ranks.sizes(bucket)), ranks.rank, ranks.size, ranks.group, what)
        arguments = ([nodes[one] for one in bucket], starts, stops, *settings)
        with graph.inserting_before(following):
            started.append((bucket, _call(marker, collectives.start_gather, arguments)))
    with graph.inserting_before(marker):
        for bucket, start in started:
            bounds = [edge for one in bucket for piece in ranks.slices[one] for edge in piece]
            rest = (bounds, ranks.rank, ranks.size, ranks.group)
            _call(marker, collectives.finish_gather_, ([nodes[one] for one in bucket], start, agreed, *rest))


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


def title(index: int, bucket: Sequence[Tensor], step: Step) -> str:
    """A bucket in words: which gradients it has."""
    return f"bucket {index} (gradients of {_named(bucket, step)})"


def _named(bucket: Sequence[Tensor], step: Step) -> str:
    first, last = (step.names.get(one, one.label) for one in (bucket[0], bucket[-1]))
    return f"'{first}'" if len(bucket) == 1 else f"{len(bucket)} parameters, '{first}' to '{last}'"
