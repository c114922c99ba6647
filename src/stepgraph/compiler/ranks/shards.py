"""The parts of a batch: which rows each has, which rank runs it, and in which order their sums are taken.

Shards are the leaves of a binary tree that depends only on their number. The node `(level, index)` is the sum of the
shards from `index · 2^level` on; a node without a neighbour moves up unchanged. A rank runs neighbouring shards, so
most of what it can add alone are whole nodes, and others add the rest in the same order as a single rank would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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

    A leaf that is None stands for zeros, and so do sums of such leaves.

    Args:
        count: the number of leaves.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: dict[Node, Arrays | None] = {}

    def add(self, node: Node, arrays: Arrays | None) -> None:
        """Adds the sum of a node, whose arrays may be overwritten."""
        met, node = climbed(self.count, self.sums, node)
        for neighbour in met:
            arrays = _added(self.sums.pop(neighbour), arrays)
        self.sums[node] = arrays

    @property
    def in_order(self) -> list[Node]:
        """The nodes whose sums are there, in order of their leaves."""
        return in_order(self.sums)

    @property
    def total(self) -> Arrays:
        """The sum of all leaves, once every one is there."""
        (total,) = self.sums.values()
        assert total is not None
        return total


def _added(one: Arrays | None, other: Arrays | None) -> Arrays | None:
    if one is None:
        one, other = other, one
    if one:
        # Zeros are added, too: a negative zero becomes a positive one, as if they had come from another rank.
        torch_private.foreach_add_([*one], 0.0 if other is None else [*other])
    return one


def climbed(count: int, there: Collection[Node], node: Node) -> tuple[list[Node], Node]:
    """The neighbours that a new node is added to one after another, and the node that it becomes.

    Args:
        count: the number of leaves.
        there: the nodes whose sums are there.
        node: the new one.

    Example:
        >>> climbed(4, [(0, 2), (1, 0)], (0, 3)), climbed(3, [], (0, 2))
        (([(0, 2), (1, 0)], (2, 0)), ([], (1, 1)))
    """
    met: list[Node] = []
    while (width := -(-count >> node[0])) > 1:
        level, index = node
        if index ^ 1 < width:
            if (level, index ^ 1) not in there:
                break
            met.append((level, index ^ 1))
        node = level + 1, index // 2
    return met, node


def most_nodes(shards: int) -> int:
    """The nodes that neighbouring shards are left with at most: two on each level below the root."""
    return max(1, min(shards, 2 * (shards - 1).bit_length()))


def partial_nodes(count: int, rank: int, world: int, before: int = 0) -> list[Node]:
    """The nodes that a rank is left with when it has added what it can, in order of their leaves.

    Args:
        count: the number of leaves.
        rank: the rank.
        world: the number of ranks.
        before: how many of its last shards it has not run yet.
    """
    there: set[Node] = set()
    shards = own(count, rank, world)
    for shard in shards[: len(shards) - before]:
        met, node = climbed(count, there, (0, shard))
        there = (there - {*met}) | {node}
    return in_order(there)


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """Nodes in order of their leaves."""
    return sorted(nodes, key=lambda node: node[1] << node[0])
