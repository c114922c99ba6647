"""The memory and the traffic of one of many ranks, computed from numbers: no rank but this process needs to exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from stepgraph import draw
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.parallel import TREE, Parallel
from stepgraph.compiler.shards import TreeSum, own, partial_nodes, spans
from stepgraph.compiler.slices import Buckets, Slices, buckets, slices, traffic
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True)
class RankPlan(MemoryPlan):
    """The bytes that one rank needs, the one that needs the most, and those that it sends to others in an update.

    `activations`, `gradients` and `workspace` are what is alive while a shard runs, with the sums of earlier shards.
    `buckets` is what is alive while gradients and updated parameters are exchanged. The larger of the two counts.

    Args:
        ranks: the number of ranks.
        shards: the parts of the batch.
        rows: the rows of the largest part.
        copies: bytes of parameters in the compute type; `parameters` includes them.
        buckets: bytes of gradients and of copies of them while they are exchanged.
        gradients_sent: bytes of gradients that the rank sends in an update.
        parameters_sent: bytes of updated parameters that it sends in an update.
    """

    ranks: int = field(default=1, kw_only=True)
    shards: int = field(default=1, kw_only=True)
    rows: int = field(default=0, kw_only=True)
    copies: int = field(default=0, kw_only=True)
    buckets: int = field(default=0, kw_only=True)
    gradients_sent: int = field(default=0, kw_only=True)
    parameters_sent: int = field(default=0, kw_only=True)

    @property
    def intermediates(self) -> int:
        """The peak of everything that is allocated and freed within an update."""
        return max(super().intermediates, self.buckets)

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in an update; it receives about as many."""
        return self.gradients_sent + self.parameters_sent

    def __str__(self) -> str:
        rows, shards = self.rows, self.shards
        title = f"Memory plan of one of {self.ranks} ranks, {shards} shards of {rows} row{'s' * (rows != 1)}"
        halves = {"  copies among them": self.copies} if self.copies else {}
        sizes = {
            "parameters": self.parameters,
            **halves,
            "optimizer state": self.optimizer_state,
            "running statistics": self.statistics,
            "activations": self.activations,
            "gradients": self.gradients,
            "workspace": self.workspace,
            "or, exchanging": self.buckets,
            "total": self.total,
            "sent per update": self.sent,
        }
        return "\n".join([title, *(f"  {name:<20}{draw.size(size):>12}" for name, size in sizes.items())])


@dataclass(frozen=True, eq=False)
class Shard:
    """What is known about one shard, whatever the number of ranks.

    Args:
        plan: its memory, without sums of gradients.
        copies: bytes of parameters in the compute type.
        trained: parameters that are updated, in an order that all ranks know.
        exchanged: those with a gradient, in the order in which these become complete.
        uncut: those that only one rank can update.
        slots: the number of optimizer buffers of each.
        averages: bytes of their averages, which every rank has.
    """

    plan: MemoryPlan
    copies: int
    trained: tuple[Tensor, ...]
    exchanged: tuple[Tensor, ...]
    uncut: frozenset[Tensor]
    slots: Mapping[Tensor, int]
    averages: int

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return sum(tensor.descriptor.tensor_allocation_size_in_bytes for tensor in self.exchanged)


def rank_plan(shard: Shard, parallel: Parallel, batch: int, ranks: int) -> RankPlan:
    """The plan of the rank that needs the most memory.

    Args:
        shard: what one shard needs.
        parallel: how updates are divided.
        batch: the rows of an update.
        ranks: the number of ranks.
    """
    parts = spans(batch, parallel.shards)
    shared = slices(shard.trained, lambda tensor: tensor not in shard.uncut, ranks)
    together = buckets(shard.exchanged)
    state = _state(shard, shared, ranks)
    rank = max(range(ranks), key=lambda one: (len(own(len(parts), one, ranks)), state[one]))
    sums = _sums(len(parts), rank, ranks) * shard.gradients
    sent = traffic(shared, together, len(parts), ranks, rank, order=parallel.order == TREE)
    kept = {one.name: getattr(shard.plan, one.name) for one in fields(MemoryPlan) if one.name != "timeline"}
    mine = {"optimizer_state": state[rank], "gradients": shard.plan.gradients + sums}
    return RankPlan(
        **kept | mine,
        ranks=ranks,
        shards=len(parts),
        rows=parts[0][1],
        copies=shard.copies,
        buckets=max(sums + 2 * shard.gradients, _exchanging(shard, shared, together, len(parts), rank, ranks)),
        gradients_sent=sent.gradients if ranks > 1 else 0,
        parameters_sent=sent.parameters if ranks > 1 else 0,
    )


def _state(shard: Shard, shared: Slices, ranks: int) -> list[int]:
    """Bytes of optimizer state by rank."""
    found = [shard.averages] * ranks
    for tensor, pieces in shared.items():
        size = shard.slots[tensor] * tensor.data_type.element_size
        for rank, piece in enumerate(pieces):
            found[rank] += size * piece.size
    return found


def _sums(count: int, rank: int, ranks: int) -> int:
    """The sums of gradients that a rank keeps at most while it runs another shard."""
    found, most = TreeSum(count), 0
    for index in own(count, rank, ranks):
        most = max(most, len(found.sums))
        found.add((0, index), ())
    return most


def _exchanging(shard: Shard, shared: Slices, together: Buckets, count: int, rank: int, ranks: int) -> int:
    """Bytes of gradients and of what is exchanged, when that is the most.

    A rank has its sums of gradients and its part of those of all others; before, a copy to send, joined bucket by
    bucket; afterwards its parameters to send, and all of them as they arrive.
    """
    nodes = [len(partial_nodes(count, one, ranks)) for one in range(ranks)]
    left = nodes[rank] * shard.gradients
    if ranks == 1:
        return left
    received = gathered = largest = 0
    for bucket in together:
        sizes = [sum(shared[one][other].size for one in bucket) for other in range(ranks)]
        width = bucket[0].data_type.element_size
        received += width * sum(nodes) * sizes[rank]
        gathered += width * (ranks + 1) * max(sizes)
        largest = max(largest, width * sum(sizes))
    return left + received + max(left + nodes[rank] * largest, gathered)
