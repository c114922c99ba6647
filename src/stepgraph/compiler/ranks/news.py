"""What ranks tell each other in front of an update: whether all can make it, and small numbers that are added.

Each rank sends one array: a row about itself, then a row for each of its partial sums over shards. A sum has the
losses, each with its share in the whole, and the statistics, each with its rows. What a rank has noted about indices
out of range (`guard.py`) stands behind the header, as integers with the bits of these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from stepgraph.compiler import guard
from stepgraph.compiler.program import Part
from stepgraph.compiler.ranks.shards import most_nodes
from stepgraph.compiler.step import Key, KeyKind, Step, value


class Header(NamedTuple):
    """What a rank tells about itself, in the first row.

    Args:
        failed: NaN if it cannot make the update, otherwise 0.
        graph: the number of the graph that it executes.
        rows: the rows of its batch.
        sample: a sum of a few numbers that must be the same on all ranks.
        changed: by how much a program has changed what all ranks have in common.
        which: the number of the first tensor that has changed, from 1.
        readiness: whether it can run fused operators.
        replays: whether it replays the update, and goes on without looking at what others tell.
        call: the call that it makes; this and what follows are 0 for a plain update (`runtime/rank_calls.py`).
        detail: what must be the same in that call.
        switched: the first tensor that it has frozen or unfrozen.
    """

    failed: float = 0.0
    graph: float = 0.0
    rows: float = 0.0
    sample: float = 0.0
    changed: float = 0.0
    which: float = 0.0
    readiness: float = 0.0
    replays: float = 0.0
    call: float = 0.0
    detail: float = 0.0
    switched: float = 0.0


HEADER = Header._fields
COMPARED = 5  # numbers of it that must be the same on all ranks; a rank that has failed tells NaN
_CALL = HEADER.index("call")
TOLERANCE = 1e-9  # by which they may differ
WHAT = "losses and statistics"
DTYPE = torch.float64


@dataclass(frozen=True)
class Layout:
    """What the array has.

    Args:
        losses: the losses, in order; of one that is more than a number, it has zeros.
        statistics: what a shard changes.
        shards: the parts of a batch.
        notes: the tensors whose indices a shard checks.
    """

    losses: tuple[Key, ...]
    statistics: tuple[Key, ...]
    shards: int
    notes: int = 0

    @cached_property
    def size(self) -> int:
        """The numbers of a sum."""
        return len(self.losses) + sum(key.owner.descriptor.element_count for key in self.statistics)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array, for as many partial sums as any rank may have."""
        return 1 + most_nodes(self.shards), max(self.size, self.head)

    @property
    def head(self) -> int:
        """The numbers that a rank tells about itself."""
        return len(HEADER) + self.notes


def layout(part: Part, step: Step) -> Layout:
    """What ranks tell each other about a shard."""
    statistics = tuple(key for key in part.written if key.kind == KeyKind.VALUE)
    losses = tuple(value(node.results[0]) for node in step.losses)
    return Layout(losses, statistics, step.shards, len(step.guarded))


def tell_notes_(header: torch.Tensor, notes: torch.Tensor) -> None:
    """Writes what a rank has noted about indices behind its header; with a note, it cannot make the update."""
    header[len(HEADER) : len(HEADER) + len(notes)] = notes.view(DTYPE)
    header[0] = torch.where(guard.accepts(notes), header[0], torch.nan)


def tell_call_(header: torch.Tensor, call: tuple[int, int, int]) -> None:
    """Writes that a rank makes another call than an update."""
    header[_CALL : _CALL + len(call)] = torch.tensor(call, dtype=DTYPE)


def headers_of(told: torch.Tensor) -> list[Header]:
    """What each rank has told about itself, on the host."""
    return [Header(*one[: len(HEADER)]) for one in told.tolist()]


def calls_of(headers: Sequence[Header]) -> list[tuple[int, int, int]]:
    """The call of each rank."""
    return [(int(one.call), int(one.detail), int(one.switched)) for one in headers]


def any_replays(told: torch.Tensor) -> bool:
    """Whether a rank replays its update, and goes on without looking at what others tell; from headers on the host."""
    return bool(told[:, HEADER.index("replays")].any())


def notes_of(told: torch.Tensor) -> list[list[int]]:
    """What each rank has noted, from their headers on the host."""
    return told[:, len(HEADER) :].contiguous().view(torch.int64).tolist()


def agreed(heard: torch.Tensor) -> torch.Tensor:
    """Whether all ranks can make the update, with the same batch, as an array on the device."""
    told = heard[:, 0, :COMPARED]
    return ((told - told[:1]).abs().amax() < TOLERANCE).reshape(1)  # a NaN is not less


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
