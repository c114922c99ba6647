"""What ranks tell each other in front of an update: whether all can make it, and small numbers that are added.

Each rank sends one array: a row about itself, then a row for each of its partial sums over shards. A sum has the
losses, each with its share in the whole, and the statistics, each with its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from stepgraph.compiler.program import Part
from stepgraph.compiler.shards import most_nodes
from stepgraph.compiler.step import Key, KeyKind, Step, value

HEADER = ("failed", "rows", "sample", "readiness")  # the first row
WHAT = "losses and statistics"
DTYPE = torch.float64


@dataclass(frozen=True)
class Layout:
    """What the array has.

    Args:
        losses: the losses, in order; of one that is more than a number, it has zeros.
        statistics: what a shard changes.
        shards: the parts of a batch.
    """

    losses: tuple[Key, ...]
    statistics: tuple[Key, ...]
    shards: int

    @cached_property
    def size(self) -> int:
        """The numbers of a sum."""
        return len(self.losses) + sum(key.owner.descriptor.element_count for key in self.statistics)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array, for as many partial sums as any rank may have."""
        return 1 + most_nodes(self.shards), max(self.size, len(HEADER))


def layout(part: Part, step: Step) -> Layout:
    """What ranks tell each other about a shard."""
    statistics = tuple(key for key in part.written if key.kind == KeyKind.VALUE)
    return Layout(tuple(value(node.results[0]) for node in step.losses), statistics, step.shards)


def weighted(
    losses: Sequence[torch.Tensor], statistics: Sequence[torch.Tensor], shares: torch.Tensor, rows: int
) -> torch.Tensor:
    """The numbers of one shard.

    Args:
        losses: its losses.
        statistics: what it has changed.
        shares: its share in each loss.
        rows: its rows.
    """
    every = zip(losses, shares, strict=True)
    single = [one.reshape(1).to(DTYPE) * share if one.numel() == 1 else share.new_zeros(1) for one, share in every]
    return torch.cat([*single, *(one.reshape(-1).to(DTYPE) * rows for one in statistics)])
