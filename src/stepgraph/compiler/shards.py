"""The parts of a batch: which rows each has, which rank runs it, and in which order their sums are taken.

Shards are the leaves of a binary tree that depends only on their number. The node `(level, index)` is the sum of the
shards from `index · 2^level` on; a node without a neighbour moves up unchanged. A rank runs neighbouring shards, so
most of what it can add alone are whole nodes, and others add the rest in the same order as a single rank would.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from stepgraph.system import torch_private

Node = tuple[int, int]
Arrays = Sequence[torch.Tensor]


def spans(rows: int, shards: int) -> list[tuple[int, int]]:
    """The first row of each shard and the row after its last; the larger shards come first, empty ones are left out.

    Example:
        >>> spans(7, 3), spans(2, 8)
        ([(0, 3), (3, 5), (5, 7)], [(0, 1), (1, 2)])
    """
    size, larger = divmod(rows, shards)
    starts = [index * size + min(index, larger) for index in range(shards + 1)]
    return [(start, stop) for start, stop in pairwise(starts) if start < stop]


def own(count: int, rank: int, world: int) -> range:
    """The shards of a rank, of `count` that are not empty.

    Example:
        >>> [list(own(8, rank, 3)) for rank in range(3)]
        [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    return range(count * rank // world, count * (rank + 1) // world)


class TreeSum:
    """The sums of arrays by node: neighbours are added as soon as both are there.

    Args:
        count: the number of leaves.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: dict[Node, Arrays] = {}

    def add(self, node: Node, arrays: Arrays) -> None:
        """Adds the sum of a node, whose arrays may be overwritten."""
        while (width := self._width(node[0])) > 1:
            level, index = node
            if index ^ 1 < width:
                neighbour = self.sums.pop((level, index ^ 1), None)
                if neighbour is None:
                    break
                if neighbour:
                    torch_private.foreach_add_([*neighbour], [*arrays])
                arrays = neighbour
            node = level + 1, index // 2
        self.sums[node] = arrays

    def _width(self, level: int) -> int:
        """The number of nodes of a level."""
        return -(-self.count >> level)

    @property
    def total(self) -> Arrays:
        """The sum of all leaves, once every one is there."""
        (total,) = self.sums.values()
        return total


def most_nodes(shards: int) -> int:
    """The nodes that neighbouring shards are left with at most: two on each level below the root."""
    return max(1, min(shards, 2 * (shards - 1).bit_length()))


def partial_nodes(count: int, rank: int, world: int) -> list[Node]:
    """The nodes that a rank is left with when it has added what it can, in order of their leaves."""
    found = TreeSum(count)
    for shard in own(count, rank, world):
        found.add((0, shard), ())
    return sorted(found.sums, key=lambda node: node[1] << node[0])
