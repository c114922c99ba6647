"""Which rank updates which part of every parameter, what is exchanged together, and how many bytes that is.

Pure functions of parameters and numbers: nothing here communicates, so that they also tell about worlds that do not
exist. A rank keeps optimizer state only for its own slices. They begin at multiples of `BLOCK` elements, where
vectorized kernels compute the same bits as on the whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from stepgraph.compiler.ranks.shards import partial_nodes
from stepgraph.tensors.tensor import Tensor

BLOCK = 4096  # elements; also those whose squares are summed together for the global norm
BUCKET = 25 << 20  # bytes; PyTorch's DistributedDataParallel uses as many


class Slice(NamedTuple):
    """Elements of a parameter, counted as they are in memory."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def first(self) -> int:
        """The number of its first block."""
        return self.start // BLOCK

    @property
    def blocks(self) -> int:
        """The number of blocks, the last of which may be incomplete."""
        return -(-self.size // BLOCK)


Slices = Mapping[Tensor, tuple[Slice, ...]]  # by parameter, then by rank
Buckets = tuple[tuple[Tensor, ...], ...]


def slices(parameters: Sequence[Tensor], cuts: Callable[[Tensor], bool], world: int) -> Slices:
    """The slices of all ranks, in any order; some may be empty.

    Parameters that cannot be cut go whole to the rank that has the least, the largest first. The blocks of others are
    spread evenly; those that are left over go to the ranks that have the least.

    Args:
        parameters: what is trained, in an order that all ranks know.
        cuts: whether parts of a parameter can be updated by themselves.
        world: the number of ranks.

    Example:
        >>> weights, bias = Tensor((3, BLOCK)), Tensor((5,))
        >>> [[*map(tuple, one)] for one in slices([weights, bias], lambda _: True, 2).values()]
        [[(0, 8192), (8192, 12288)], [(5, 5), (0, 5)]]
    """
    loads = [0] * world
    found: dict[Tensor, tuple[Slice, ...]] = {}
    whole = [one for one in parameters if not cuts(one)]
    for tensor in sorted(whole, key=lambda one: -one.descriptor.element_count):
        count, first = tensor.descriptor.element_count, loads.index(min(loads))
        found[tensor] = tuple(Slice(0, count * (rank == first)) for rank in range(world))
        loads[first] += tensor.descriptor.tensor_allocation_size_in_bytes
    for tensor in (one for one in parameters if one not in found):
        found[tensor] = _spread(tensor.descriptor.element_count, loads)
        size = tensor.data_type.torch.itemsize
        loads = [load + size * own.size for load, own in zip(loads, found[tensor], strict=True)]
    return {tensor: found[tensor] for tensor in parameters}


def _spread(count: int, loads: Sequence[int]) -> tuple[Slice, ...]:
    """Whole blocks for each rank, one after another; those that have the least come first, since the end is short."""
    each, more = divmod(-(-count // BLOCK), len(loads))
    found, start = [Slice(0, 0)] * len(loads), 0
    for place, rank in enumerate(sorted(range(len(loads)), key=lambda rank: loads[rank])):
        stop = min(count, start + BLOCK * (each + (place < more)))
        found[rank] = Slice(start, stop)
        start = stop
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Ownership:
    """What each rank of a world updates, as one of them sees it.

    Args:
        rank: the number of this process.
        size: the number of processes.
        group: PyTorch's name for all of them.
        slices: the slices of all ranks.
        is_ordered: whether sums are taken in the order of the tree.
    """

    rank: int
    size: int
    group: str
    slices: Slices
    is_ordered: bool = True

    def own(self, tensor: Tensor) -> Slice:
        """The slice of this rank."""
        return self.slices[tensor][self.rank]

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of this rank's optimizer buffers: flat, or that of a parameter it has whole."""
        size = self.own(tensor).size
        return tuple(tensor.shape) if size == tensor.descriptor.element_count else (size,)

    def piece(self, array: torch.Tensor, tensor: Tensor) -> torch.Tensor:
        """A view of this rank's slice of a contiguous array that is like a parameter."""
        start, stop = self.own(tensor)
        return array.view(-1)[start:stop].view(self.shape(tensor))

    @cached_property
    def owned(self) -> frozenset[Tensor]:
        """The parameters of which this rank has a slice."""
        return frozenset(tensor for tensor in self.slices if self.own(tensor).size)

    def sizes(self, tensors: Sequence[Tensor]) -> list[int]:
        """The elements of parameters by rank."""
        return [sum(self.slices[one][rank].size for one in tensors) for rank in range(self.size)]


def buckets(tensors: Sequence[Tensor]) -> Buckets:
    """Parameters whose gradients are exchanged together: of one type, and of about `BUCKET` bytes.

    Args:
        tensors: the parameters, in the order in which their gradients become complete.
    """
    done: list[tuple[Tensor, ...]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = filling.setdefault(tensor.data_type.torch, [])
        bucket.append(tensor)
        if sum(one.descriptor.tensor_allocation_size_in_bytes for one in bucket) >= BUCKET:
            done.append(tuple(filling.pop(tensor.data_type.torch)))
    return (*done, *map(tuple, filling.values()))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends to others in one update.

    Args:
        gradients: what it sends so that others can add the gradients of their slices.
        parameters: what it sends of its slices after their update.
    """

    gradients: int
    parameters: int

    @property
    def total(self) -> int:
        """Both."""
        return self.gradients + self.parameters


def traffic(owned: Slices, together: Buckets, shards: int, world: int, rank: int, *, order: bool = True) -> Traffic:
    """The bytes that a rank sends in one update.

    With as many ranks as a power of two, a multiple of as many shards, and equal slices, that is
    `2 (ranks - 1) / ranks` times the bytes of all gradients, as for an ordinary reduction. Otherwise a rank may have to
    send several partial sums, and what it updates is padded to the largest slice of any rank.

    Args:
        owned: the slices of all ranks.
        together: the buckets.
        shards: the parts of a batch.
        world: the number of ranks.
        rank: one of them.
        order: whether sums are taken in a fixed order; otherwise each rank sends one sum.
    """
    sums = len(partial_nodes(shards, rank, world))
    gradients = parameters = 0
    for bucket in together:
        width = bucket[0].data_type.torch.itemsize
        sizes = [sum(owned[one][other].size for one in bucket) for other in range(world)]
        everything = (world - 1) * max(sizes)  # padded, except for what each rank gets by itself
        gradients += width * (sums * (sum(sizes) - sizes[rank]) if order else everything)
        parameters += width * everything
    return Traffic(gradients, parameters)
