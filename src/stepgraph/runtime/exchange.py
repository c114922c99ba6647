"""Sums over the shards of all ranks: gradients as flat buckets, and small numbers that every rank needs at once.

Each rank receives, of every partial sum, the slices that it updates, and adds them in the order of the tree. That is as
much traffic as the first half of an ordinary reduction; gathering the updated parameters is the other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from stepgraph.compiler.ranks.news import WHAT, Layout
from stepgraph.compiler.ranks.shards import Node, TreeSum, partial_nodes
from stepgraph.compiler.ranks.slices import Slices
from stepgraph.compiler.step import Key, gradient
from stepgraph.runtime.world import Waiting, World
from stepgraph.tensors.tensor import Tensor

Pieces = dict[Tensor, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """The gradients of some parameters as one flat array: first what the first rank updates, then the others.

    Args:
        tensors: the parameters, of one type.
        slices: those of all ranks; None if one rank updates them all.
        name: what it is, for errors.
    """

    tensors: tuple[Tensor, ...]
    slices: Slices | None
    name: str

    @cached_property
    def sizes(self) -> list[int]:
        """The elements by rank."""
        return [sum(stop - start for _, start, stop in of_rank) for of_rank in self._ranges]

    @cached_property
    def _ranges(self) -> list[list[tuple[Tensor, int, int]]]:
        if self.slices is None:
            return [[(one, 0, one.descriptor.element_count) for one in self.tensors]]
        ranks = range(len(self.slices[self.tensors[0]]))
        return [[(one, *self.slices[one][rank]) for one in self.tensors] for rank in ranks]

    def flat(self, found: Mapping[Key, torch.Tensor]) -> torch.Tensor:
        """The gradients of one shard, copied."""
        if self.slices is None:
            return torch.cat([found[gradient(one)].reshape(-1) for one in self.tensors])
        ranges = [one for of_rank in self._ranges for one in of_rank]
        return torch.cat([found[gradient(one)].reshape(-1)[start:stop] for one, start, stop in ranges])

    def zeros(self, device: torch.device, rank: int | None = None) -> torch.Tensor:
        """The gradients of no shard, or what a rank has of them."""
        count = sum(self.sizes) if rank is None else self.sizes[rank]
        return torch.zeros(count, dtype=self.tensors[0].data_type.torch, device=device)

    def pieces(self, flat: torch.Tensor, rank: int) -> Pieces:
        """What a rank has of each gradient, as views of what it has of the bucket."""
        counts, shapes = self._pieces[rank]
        parts = flat.split(counts)
        return {
            one: part if shape is None else part.view(shape)
            for one, part, shape in zip(self.tensors, parts, shapes, strict=True)
        }

    @cached_property
    def _pieces(self) -> list[tuple[list[int], list[Sequence[int] | None]]]:
        """By rank: the elements of its pieces, and the shapes of those that are whole."""
        return [
            (
                [stop - start for _, start, stop in ranges],
                [one.shape if stop - start == one.descriptor.element_count else None for one, start, stop in ranges],
            )
            for ranges in self._ranges
        ]


def summed(sums: TreeSum, buckets: Sequence[Bucket], world: World, device: torch.device) -> list[torch.Tensor]:
    """What this rank has of the sum of the gradients of all shards, in the order of the tree."""
    if world.is_alone:
        return [*sums.total]
    nodes = [partial_nodes(sums.count, rank, world.size) for rank in range(world.size)]
    mine = [_sums(sums, node, buckets, device) for node in nodes[world.rank]]
    # All exchanges are started before the first is waited for.
    traded = [_traded([one[i] for one in mine], bucket, nodes, world, device) for i, bucket in enumerate(buckets)]
    return [_total(wait(), nodes, sums.count) for wait in traded]


def summed_in_any_order(
    sums: TreeSum, buckets: Sequence[Bucket], world: World, device: torch.device
) -> list[torch.Tensor]:
    """The same sum in the order that the communication library chooses."""
    mine = [_sums(sums, node, buckets, device) for node in sums.sums] or [[one.zeros(device) for one in buckets]]
    local = [torch.stack(arrays).sum(0) if len(arrays) > 1 else arrays[0] for arrays in zip(*mine, strict=True)]
    started = [_scattered(array, bucket, world) for array, bucket in zip(local, buckets, strict=True)]
    return [wait()[: bucket.sizes[world.rank]] for wait, bucket in zip(started, buckets, strict=True)]


def _sums(sums: TreeSum, node: Node, buckets: Sequence[Bucket], device: torch.device) -> Sequence[torch.Tensor]:
    """The sum of a node; zeros if its shards have no rows, or could not run."""
    found = sums.sums.get(node)
    return [bucket.zeros(device) for bucket in buckets] if found is None else found


def _scattered(array: torch.Tensor, bucket: Bucket, world: World) -> Waiting:
    """Starts a sum of which each rank receives its part, all of one size."""
    if world.is_alone:
        return lambda: array
    most = max(bucket.sizes)
    padded = [F.pad(part, (0, most - len(part))) for part in array.split(bucket.sizes)]
    return world.scatter_sum(torch.cat(padded), bucket.name)


def gathered(sums: TreeSum, header: torch.Tensor, told: Layout, world: World) -> torch.Tensor:
    """What all ranks tell, as `[rank, ...]`: a header, and small numbers of their shards.

    Args:
        sums: those of this rank, each with one array; empty if it has failed.
        header: numbers about this rank.
        told: what the array has.
        world: all ranks.
    """
    sent = torch.zeros(told.shape, dtype=header.dtype, device=world.device)
    sent[0, : len(header)] = header
    for place, node in enumerate(partial_nodes(sums.count, world.rank, world.size), start=1):
        found = sums.sums.get(node)
        if found is not None:
            sent[place, : told.size] = found[0]
    return world.gather(sent, WHAT)()


def added(heard: torch.Tensor, told: Layout, world: World) -> torch.Tensor:
    """The sum of the small numbers of all shards, which only equal headers make meaningful."""
    found = TreeSum(told.shards)
    for rank in range(world.size):
        for place, node in enumerate(partial_nodes(told.shards, rank, world.size), start=1):
            found.add(node, [heard[rank, place, : told.size]])
    return found.total[0]


def _traded(
    parts: Sequence[torch.Tensor], bucket: Bucket, nodes: Sequence[Sequence[Node]], world: World, device: torch.device
) -> Waiting:
    """Starts the exchange of a bucket: afterwards this rank has its part of every partial sum."""
    sizes = bucket.sizes
    split = [part.split(sizes) for part in parts]
    nothing = bucket.zeros(device)[:0]
    slices = [torch.cat([part[rank] for part in split]) if split else nothing for rank in range(world.size)]
    return world.trade(slices, [len(own) * sizes[world.rank] for own in nodes], bucket.name)


def _total(received: torch.Tensor, nodes: Sequence[Sequence[Node]], count: int) -> torch.Tensor:
    """The sum of a part over all partial sums, in the order of the tree."""
    order = [node for own in nodes for node in own]
    found = TreeSum(count)
    for node, part in zip(order, received.view(len(order), -1), strict=True):
        found.add(node, [part])
    return found.total[0]
