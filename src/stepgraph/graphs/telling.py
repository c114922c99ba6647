"""What a rank tells the others about itself and its shards, in an array that is kept between updates.

What stays the same is written once. A captured shard reads the array in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from math import nan

import torch

from stepgraph.compiler.ranks.news import DTYPE, HEADER, Header, Layout
from stepgraph.compiler.ranks.shards import TreeSum

SAMPLE = 16  # elements of an array that ranks compare


class Telling:
    """The array of a rank: a header, the sums of its earlier shards, and the shares of its last one in the losses.

    Args:
        told: what the array has.
        rows: the rows of a batch.
        device: where the array is.

    Attributes:
        graph: the number of the graph.
        change: by how much numbers that ranks share have changed on this one, and which; None if they cannot have.
    """

    def __init__(self, told: Layout, rows: int, device: torch.device) -> None:
        (height, width), self._rows = told.shape, rows
        self.array = torch.zeros(height + 1, width, dtype=DTYPE, device=device)
        self.header, self._sums = self.array[0, : told.head], self.array[1:-1, : told.size].unbind()
        self._sample, self._shares = self.array[0, HEADER.index("sample")], self.array[-1, : len(told.losses)]
        self.graph = 0
        self.change: torch.Tensor | None = None
        self._told: torch.Tensor | None = None  # the change that the array has
        self._changed = self.array[0, HEADER.index("changed") : HEADER.index("which") + 1]
        self._facts: Header | None = None
        self._shared: torch.Tensor | None = None

    def tell_header(self, failed: bool, readiness: float, replays: bool, compared: Iterable[torch.Tensor]) -> None:
        """Writes the header; notes about indices are missing.

        A sample shows whether ranks have the same arrays: a weighted sum of a few elements of each.
        """
        self.tell_facts(failed, readiness, replays)
        every = torch.cat([_few(one).to(DTYPE) for one in compared])
        every.nan_to_num_(posinf=0, neginf=0).asinh_()  # a learning rate counts beside large numbers
        torch.dot(every, _weights(len(every), every.device), out=self._sample)

    def tell_facts(self, failed: bool, readiness: float, replays: bool) -> None:
        """Writes what the host knows of this rank, unless it is there already."""
        facts = Header(nan if failed else 0.0, self.graph, self._rows, readiness=readiness, replays=float(replays))
        if self._facts == facts and self._told is self.change:
            return
        self._facts, self._told = facts, self.change
        self.header.copy_(_header(facts, len(self.header), self.array.device))
        if self.change is not None:
            self._changed.copy_(self.change)

    def tell_shards(self, sums: TreeSum, shares: torch.Tensor) -> None:
        """Writes the sums of earlier shards, and the shares of the last one, unless these are the same array again."""
        for place, node in enumerate(sums.in_order):
            (numbers,) = sums.sums[node] or ()
            self._sums[place].copy_(numbers)
        if self._shared is not shares:
            self._shares.copy_(shares)
            self._shared = shares


def _few(array: torch.Tensor) -> torch.Tensor:
    """Some elements of an array, in the order of its dimensions; one in another order in memory is not copied."""
    step = max(1, array.numel() // SAMPLE)
    if array.is_contiguous():
        return array.view(-1)[::step]
    return array.take(_places(array.numel(), step, array.device))


@cache  # captured updates read it, so it must stay
def _places(count: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count, step, device=device)


@cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=DTYPE, device=device)


@lru_cache(maxsize=16)
def _header(facts: Header, size: int, device: torch.device) -> torch.Tensor:
    """A header without its sample and notes; copying one to a GPU in every step would wait for it."""
    return torch.tensor([*facts, *[0.0] * (size - len(facts))], dtype=DTYPE, device=device)
