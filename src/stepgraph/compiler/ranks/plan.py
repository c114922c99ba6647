"""The memory and the traffic of one of many ranks: its programs are made, but no rank needs to exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TypeVar

from stepgraph import draw
from stepgraph.compiler import memory, pipeline
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.passes.exchange import gradient_buckets
from stepgraph.compiler.program import EXCHANGE, Part, PartName
from stepgraph.compiler.ranks.collectives import swaps
from stepgraph.compiler.ranks.parallel import TREE, Parallel
from stepgraph.compiler.ranks.shards import own, partial_nodes
from stepgraph.compiler.ranks.slices import Buckets, Ownership, Slices, slices, traffic
from stepgraph.compiler.step import Step

_Plan = TypeVar("_Plan", bound=MemoryPlan)


@dataclass(frozen=True)
class RankPlan(MemoryPlan):
    """The bytes that one rank needs, the one that needs the most, and those that it sends to others in an update.

    It is a `MemoryPlan` with more. `gradients` has the sums of earlier shards in it.

    Args:
        ranks: the number of ranks.
        shards: the parts of the batch.
        rows: the rows of the largest part.
        copies: bytes of parameters in the compute type; `parameters` includes them.
        shard_activations: bytes of activations that a shard needs at its own peak.
        buckets: bytes, at the peak, of what is being exchanged.
        gradients_sent: bytes of gradients that the rank sends in an update.
        parameters_sent: bytes of updated parameters that it sends in an update.
    """

    ranks: int = field(default=1, kw_only=True)
    shards: int = field(default=1, kw_only=True)
    rows: int = field(default=0, kw_only=True)
    copies: int = field(default=0, kw_only=True)
    shard_activations: int = field(default=0, kw_only=True)
    buckets: int = field(default=0, kw_only=True)
    gradients_sent: int = field(default=0, kw_only=True)
    parameters_sent: int = field(default=0, kw_only=True)

    @property
    def intermediates(self) -> int:
        """The peak of everything that is allocated and freed within an update."""
        return super().intermediates + self.buckets

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in an update; it receives about as many."""
        return self.gradients_sent + self.parameters_sent

    def __str__(self) -> str:
        count = f"{self.shards} shard{'s' * (self.shards != 1)} of {self.rows} row{'s' * (self.rows != 1)}"
        sizes = {
            "parameters": self.parameters,
            **({"  copies in them": self.copies} if self.copies else {}),
            "optimizer state": self.optimizer_state,
            "running statistics": self.statistics,
            "activations at peak": self.activations,
            "gradients at peak": self.gradients,
            "buckets at peak": self.buckets,
            "workspace at peak": self.workspace,
            "total": self.total,
            "activations, shard": self.shard_activations,
            "sent per update": self.sent,
        }
        lines = (f"  {name:<20}{draw.size(size):>12}" for name, size in sizes.items())
        return "\n".join([f"Memory plan of one of {self.ranks} ranks, {count}", *lines])


@dataclass(frozen=True, eq=False)
class Shard:
    """A shard as it was recorded, whatever the number of ranks.

    Args:
        step: what was recorded, for a rank that is alone.
        part: the part `shard`.
    """

    step: Step
    part: Part

    @cached_property
    def plan(self) -> MemoryPlan:
        """The memory of a shard that exchanges nothing, without sums of others."""
        return memory.plan(replace(self.step, shards=0), pipeline.settled(self.part, self.step, PartName.SHARD))

    @cached_property
    def buckets(self) -> Buckets:
        """What is exchanged together."""
        return gradient_buckets(self.part, self.step)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return sum(one.descriptor.tensor_allocation_size_in_bytes for bucket in self.buckets for one in bucket)

    @property
    def copies(self) -> int:
        """Bytes of parameters in the compute type."""
        return 2 * sum(tensor.descriptor.element_count for tensor in self.step.rounded)


def rank_plan(shard: Shard, parallel: Parallel, rows: int, ranks: int) -> RankPlan:
    """The plan of the rank that needs the most memory.

    Args:
        shard: what each rank runs.
        parallel: how updates are divided.
        rows: the rows of the largest shard.
        ranks: the number of ranks.
    """
    optimizer, step, count = shard.step.optimizer, shard.step, parallel.shards
    assert optimizer is not None
    cut = slices(step.trainable, lambda tensor: optimizer.cuts(step.slots_of(tensor)), ranks)
    is_ordered, divided = parallel.order == TREE, replace(step, shards=count)
    plans = {
        rank: max(_Rank(shard, divided, Ownership(rank, ranks, "", cut, is_ordered)).moments, key=_total)
        for rank in _busiest(cut, step, count, ranks)
    }
    rank = max(plans, key=lambda one: plans[one].total)
    sent = traffic(cut, shard.buckets, count, ranks, rank, order=is_ordered)
    return replace(
        plans[rank],
        ranks=ranks,
        shards=count,
        rows=rows,
        copies=shard.copies,
        shard_activations=shard.plan.activations,
        gradients_sent=sent.gradients if ranks > 1 else 0,
        parameters_sent=sent.parameters if ranks > 1 else 0,
    )


def own_plan(step: Step, parts: Mapping[PartName, Part]) -> MemoryPlan:
    """The plan of a rank that exists, from the parts that it runs; at the moment when it needs the most.

    Args:
        step: what it computes.
        parts: its shards, ready to run. The last one exchanges gradients, so its operators are the timeline.
    """
    assert step.ownership is not None
    single, rank = replace(step, shards=0), _Rank(Shard(step, parts[PartName.SHARD]), step, step.ownership)
    last = _with_sums(memory.plan(single, parts[PartName.LAST]), rank.sums(1) * rank.shard.gradients)
    found = [last, rank.update(last)]
    if len(rank.own) > 1:
        running = memory.plan(single, parts[PartName.SHARD])
        found += rank.earlier(running)
    return replace(max(found, key=_total), timeline=last.timeline)


def _with_sums(plan: MemoryPlan, sums: int) -> MemoryPlan:
    timeline = tuple((layer, phase, size + sums) for layer, phase, size in plan.timeline)
    return replace(plan, gradients=plan.gradients + sums, timeline=timeline)


def _total(plan: MemoryPlan) -> int:
    return plan.total


def _busiest(cut: Slices, step: Step, shards: int, ranks: int) -> list[int]:
    """Ranks with the most shards; of those that add and send alike, the one with the most optimizer state."""
    state = [0] * ranks
    for tensor, pieces in cut.items():
        size = (len(step.slots_of(tensor)) + step.averages) * tensor.data_type.element_size
        state = [before + size * piece.size for before, piece in zip(state, pieces, strict=True)]
    found: dict[tuple[int, ...], int] = {}
    most = max(len(own(shards, rank, ranks)) for rank in range(ranks))
    for rank in (one for one in range(ranks) if len(own(shards, one, ranks)) == most):
        alike = tuple(len(partial_nodes(shards, rank, ranks, before)) for before in range(most))
        found[alike] = max(rank, found.get(alike, rank), key=lambda one: state[one])
    return list(found.values())


@dataclass(frozen=True, eq=False)
class _Rank:
    """One rank of a world.

    Args:
        shard: what it runs.
        step: the same, with the number of shards.
        ownership: what it updates.
    """

    shard: Shard
    step: Step
    ownership: Ownership

    @property
    def moments(self) -> Iterator[RankPlan]:
        """Its memory at the moments of an update that may need the most."""
        running = self._plan(self.shard.plan)
        yield from self.earlier(running)
        if self.ownership.size > 1:
            last = self._last()
            yield replace(last, gradients=last.gradients + self.sums(1) * self.shard.gradients)
            yield self._updating(running)

    def earlier(self, running: _Plan) -> Iterator[_Plan]:
        """Its memory while it runs its shards, without the last one if that exchanges gradients."""
        gradients, count = self.shard.gradients, len(self.own)
        for left in range(count - (self.ownership.size > 1)):
            sums = self.sums(count - left) * gradients
            yield replace(running, gradients=running.gradients + sums)
            # Its gradients are copied into buckets before they are added to those of earlier shards.
            yield replace(running, activations=0, workspace=0, gradients=sums + 2 * gradients)

    @property
    def own(self) -> range:
        """Its shards."""
        return own(self.step.shards, self.ownership.rank, self.ownership.size)

    def sums(self, before: int) -> int:
        """The sums of gradients that it has in front of one of its last shards."""
        return len(partial_nodes(self.step.shards, self.ownership.rank, self.ownership.size, before))

    def _plan(self, plan: MemoryPlan, buckets: int = 0) -> RankPlan:
        """A plan with the optimizer state of this rank."""
        whole = {one.name: getattr(plan, one.name) for one in fields(MemoryPlan) if one.name != "timeline"}
        state = memory.optimizer_state(replace(self.step, ownership=self.ownership))
        return RankPlan(**whole | {"optimizer_state": state}, buckets=buckets)

    def _last(self) -> RankPlan:
        """The last shard of the rank, which exchanges gradients as they become complete."""
        step = replace(self.step, ownership=self.ownership)
        part = pipeline.settled(self.shard.part, step, PartName.LAST)
        plan = memory.plan(replace(step, shards=0), part)
        sizes = [size for _, _, size in plan.timeline]
        held = memory.holders(part, sizes.index(max(sizes)))
        exchanged = {kind: 0 for _, _, kind, _ in held}
        for layer, _, kind, size in held:
            exchanged[kind] += size * (layer == EXCHANGE)
        others = {kind: getattr(plan, kind) - size for kind, size in exchanged.items()}
        return replace(self._plan(plan, sum(exchanged.values())), **others)

    @property
    def _totals(self) -> int:
        """Bytes of its part of the sums of all ranks."""
        return sum(
            self.ownership.own(one).size * one.data_type.element_size for bucket in self.shard.buckets for one in bucket
        )

    def update(self, plan: MemoryPlan) -> MemoryPlan:
        """The update, with what is exchanged as workspace."""
        found = self._updating(self._plan(plan))
        workspace = found.workspace + found.buckets
        return replace(plan, activations=0, gradients=found.gradients, workspace=workspace)

    def _updating(self, running: RankPlan) -> RankPlan:
        """The update: its parameters to send, and all of them as they arrive; Gloo has a copy of those of a bucket."""
        sums = self.sums(1) * self.shard.gradients
        ranks = self.ownership.size
        largest = [max(self.ownership.sizes(one)) * one[0].data_type.element_size for one in self.shard.buckets]
        swapped = swaps(self.step.device, ranks)
        copy = ranks * max(largest, default=0) if self.step.device.type == "cpu" and not swapped else 0
        moving = (2 if swapped else ranks + 1) * sum(largest)
        return replace(running, activations=0, gradients=sums + self._totals, workspace=copy, buckets=moving)
