"""Sums over the shards of all ranks: gradients as flat buckets, and small numbers that every rank needs at once.

A bucket is exchanged in slices. Each rank receives its slice of every partial sum, adds them in the order of the tree,
and hands the total to the others. That is as much traffic as an ordinary reduction of the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.compiler.shards import Node, TreeSum, partial_nodes
from stepgraph.compiler.step import Key, gradient
from stepgraph.runtime.world import Waiting, World
from stepgraph.tensors.tensor import Tensor

Headers = list[list[float]]
BUCKET = 25 << 20  # bytes; PyTorch's DistributedDataParallel uses as many


@dataclass(frozen=True)
class Buckets:
    """Gradients as flat arrays, each of one type and of about `BUCKET` bytes.

    Args:
        members: the tensors whose gradients are in each.
    """

    members: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Buckets:
        """Buckets for gradients that become complete in this order."""
        done: list[tuple[Tensor, ...]] = []
        filling: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            bucket = filling.setdefault(tensor.data_type.torch, [])
            bucket.append(tensor)
            if sum(one.descriptor.tensor_allocation_size_in_bytes for one in bucket) >= BUCKET:
                done.append(tuple(filling.pop(tensor.data_type.torch)))
        return cls((*done, *map(tuple, filling.values())))

    def flat(self, found: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of one shard, copied."""
        return [torch.cat([found[gradient(one)].reshape(-1) for one in bucket]) for bucket in self.members]

    def zeros(self, device: torch.device) -> list[torch.Tensor]:
        """The gradients of no shard."""
        counts = [sum(one.descriptor.element_count for one in bucket) for bucket in self.members]
        types = [bucket[0].data_type.torch for bucket in self.members]
        return [torch.zeros(count, dtype=dtype, device=device) for count, dtype in zip(counts, types, strict=True)]

    def by_tensor(self, flat: Sequence[torch.Tensor]) -> dict[Tensor, torch.Tensor]:
        """Views of the gradients in flat arrays."""
        found: dict[Tensor, torch.Tensor] = {}
        for bucket, array in zip(self.members, flat, strict=True):
            pieces = array.split([one.descriptor.element_count for one in bucket])
            found |= {one: piece.view(one.shape) for one, piece in zip(bucket, pieces, strict=True)}
        return found


def summed(sums: TreeSum, buckets: Buckets, world: World, device: torch.device) -> list[torch.Tensor]:
    """The sum of the gradients of all shards, in the order of the tree."""
    if world.size == 1:
        return [*sums.total]
    nodes = [partial_nodes(sums.count, rank, world.size) for rank in range(world.size)]
    mine = [sums.sums[node] for node in nodes[world.rank]]
    whole = buckets.zeros(device) if not mine else mine[0]  # for their sizes
    # All exchanges are started before the first is waited for.
    traded = [_traded([one[index] for one in mine], array, nodes, world, index) for index, array in enumerate(whole)]
    totals = [_total(wait(), nodes, sums.count) for wait in traded]
    gathered = [world.gather(total, f"bucket {index}") for index, total in enumerate(totals)]
    return [wait().view(-1)[: len(array)] for wait, array in zip(gathered, whole, strict=True)]


def summed_in_any_order(sums: TreeSum, buckets: Buckets, world: World, device: torch.device) -> list[torch.Tensor]:
    """The same sum in the order that the communication library chooses."""
    mine = [*sums.sums.values()] or [buckets.zeros(device)]
    local = [torch.stack(arrays).sum(0) if len(arrays) > 1 else arrays[0] for arrays in zip(*mine, strict=True)]
    started = [world.sum(array, f"bucket {index}") for index, array in enumerate(local)]
    return [wait() for wait in started]


def gathered(sums: TreeSum, header: Sequence[float], size: int, most: int, world: World) -> tuple[Headers, Waiting]:
    """The headers of all ranks, and the sum of one small array per shard, which only equal headers make meaningful.

    Args:
        sums: those of this rank, each with one float64 array; empty if it has failed.
        header: numbers about this rank.
        size: the numbers in an array.
        most: the nodes that a rank may be left with, whatever the number of shards.
        world: all ranks.
    """
    width = max(size, len(header))
    sent = torch.zeros(1 + most, width, dtype=torch.float64, device=world.device)
    sent[0, : len(header)] = torch.tensor(header, dtype=torch.float64)
    nodes = partial_nodes(sums.count, world.rank, world.size)
    for index, node in enumerate(node for node in nodes if node in sums.sums):
        sent[1 + index, :size] = sums.sums[node][0]
    received = world.gather(sent, "losses and statistics")()

    def total() -> torch.Tensor:
        found = TreeSum(sums.count)
        for rank in range(world.size):
            for index, node in enumerate(partial_nodes(sums.count, rank, world.size)):
                found.add(node, [received[rank, 1 + index, :size]])
        return found.total[0]

    return received[:, 0, : len(header)].tolist(), total


def _traded(
    parts: Sequence[torch.Tensor], like: torch.Tensor, nodes: Sequence[Sequence[Node]], world: World, index: int
) -> Waiting:
    """Starts the exchange of a bucket: afterwards this rank has its slice of every partial sum."""
    size = -(-len(like) // world.size)
    padded = [F.pad(part, (0, size * world.size - len(part))).view(world.size, size) for part in parts]
    slices = [torch.cat([part[rank] for part in padded]) if padded else like.new_empty(0) for rank in range(world.size)]
    return world.trade(slices, [len(own) * size for own in nodes], f"bucket {index}")


def _total(received: torch.Tensor, nodes: Sequence[Sequence[Node]], count: int) -> torch.Tensor:
    """The sum of a slice over all partial sums, in the order of the tree."""
    order = [node for own in nodes for node in own]
    found = TreeSum(count)
    for node, part in zip(order, received.view(len(order), -1), strict=True):
        found.add(node, [part])
    return found.total[0]
